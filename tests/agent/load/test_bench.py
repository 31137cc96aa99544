"""The whole program: against the agent, and against servers that stand still, vanish or say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.__main__ import main
from agent.access.tokens import line_of, make
from tests.support import bundles, images
from tests.support.agents import COMMAND, ROOT, Agent, serving, until
from tests.support.certificates import Authority

METADATA = {"name": "m", "versions": ["1"], "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]}
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run `tightfit-agent bench` in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tightfit-agent", "bench", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def report_of(done: tuple[int, str, str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done[1])
    return report


# --- a server that does as it is told


@dataclass
class Told:
    """What the server does to the infer request of that number, and what it saw."""

    stall_at: int = -1
    stall_s: float = 0.0
    silent: bool = False
    vanish_at: int = -1
    answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    heads: list[bytes] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)


@contextlib.contextmanager
def server(told: Told) -> Iterator[str]:
    """The URL of a model on a server that takes one request after the other, like one that runs on one core."""
    loop = asyncio.new_event_loop()
    ready, urls, over = threading.Event(), [], asyncio.Event()
    writers: set[asyncio.StreamWriter] = set()
    turn = asyncio.Lock()

    async def infer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: asyncio.Server) -> None:
        arrived = time.monotonic()
        if told.silent:
            await over.wait()
        async with turn:
            if len(told.heads) == told.stall_at:
                await asyncio.sleep(told.stall_s)
            if len(told.heads) == told.vanish_at:
                listener.close()
                for each in writers:
                    each.transport.abort()
                return
            writer.write(told.answer)
        told.held_s.append(time.monotonic() - arrived)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not over.is_set():
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith(b"POST"):
                    told.heads.append(head)
                    await infer(reader, writer, listeners[0])
                else:
                    body = json.dumps(METADATA if b"/models/" in head else {"extensions": []}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    listeners: list[asyncio.Server] = []

    async def serve() -> None:
        listeners.append(await asyncio.start_server(connection, "127.0.0.1", 0))
        host, port = listeners[0].sockets[0].getsockname()
        urls.append(f"http://{host}:{port}/v2/models/m")
        ready.set()
        await over.wait()
        listeners[0].close()
        for each in writers:
            each.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 60)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)
        loop.close()


def test_a_stall_is_charged_for_every_request_that_was_due(bench: Bench) -> None:
    told = Told(stall_at=100, stall_s=1.0)
    with server(told) as url:
        options = ("--rate", 100, "--arrivals", "fixed", "--duration", 3, "--warmup", 0, "--connections", 2)
        done = bench(url, *options, "--slo", "p99=900ms", "--slo", "p50=9s", "--json")
    (run,) = report_of(done)["runs"]
    # The server sees two slow requests, one for each connection: a client that waits for it would report no more, which
    # is 0.7 % of 300 and not in p99. A hundred were due while it stood still.
    # Where the machine stands still as well, that is two more.
    assert sum(seconds > 0.5 for seconds in told.held_s) <= 10
    assert run["all"]["requests"] == run["all"]["answered"] == 300
    assert run["all"]["latency_ms"]["p99"] > 950
    assert run["all"]["latency_ms"]["p90"] > 650
    assert run["waited"] > 0.25
    assert [promise["kept"] for promise in run["promises"]] == [False, True]
    assert done[0] == 1


def test_every_request_has_its_trace(bench: Bench) -> None:
    told = Told()
    with server(told) as url:
        code, out, _ = bench(url, "--rate", 200, "--requests", 40, "--warmup", 0, "--json")
    assert code == 0
    report = json.loads(out)
    ids = [re.search(rb"X-Request-Id: (\S+)", head)[1].decode() for head in told.heads]  # type: ignore[index]
    assert len(set(ids)) == 40
    assert all(each.startswith(report["trace"] + "-") for each in ids)
    assert {trace for trace, _ in report["runs"][0]["slowest"]} <= set(ids)
    parents = {re.search(rb"traceparent: (\S+)", head)[1] for head in told.heads}  # type: ignore[index]
    assert len(parents) == 40
    assert all(re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-01", parent) for parent in parents)
    assert not any(b"accept-encoding" in head.lower() for head in told.heads)


def test_a_server_that_says_nothing_ends_the_run(bench: Bench) -> None:
    with server(Told(silent=True)) as url:
        options = ("--rate", 10_000, "--requests", 200, "--warmup", 0, "--arrivals", "fixed", "--connections", 1)
        code, out, err = bench(url, *options, "--timeout", 2, "--json")
    failures = json.loads(out)["runs"][0]["all"]["failures"]
    # All answers end at their time, and a little after it: soon the next has no time left to be sent.
    assert sorted(failures) == [
        "no answer within 2 s of when it was due",
        "not sent within 2 s of when it was due: every connection was busy",
    ]
    assert sum(failures.values()) == 200
    assert code == 1
    assert "Traceback" not in err


def test_a_server_that_vanishes_is_reported_by_reason(bench: Bench) -> None:
    with server(Told(vanish_at=20)) as url:
        options = ("--rate", 100, "--requests", 60, "--warmup", 0, "--arrivals", "fixed", "--connections", 4)
        code, out, err = bench(url, *options, "--slo", "p99=9s", "--json")
    failures = json.loads(out)["runs"][0]["all"]["failures"]
    assert failures["no connection: connection refused"] > 20
    assert set(failures) <= {
        "no connection: connection refused",
        "the connection was lost before the answer was whole",
    }
    assert code == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 503 X\r\nContent-Length: 21\r\n\r\n" + b'{"error": "9 waiting"}'[:21], "503 without a message"),
        (b"HTTP/1.1 503 X\r\nContent-Length: 22\r\n\r\n" + b'{"error": "9 waiting"}', "503 N waiting"),
        (b"HTTP/1.1 302 X\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", "302 without a message"),
        (b"nonsense\r\n\r\n", "the answer is not HTTP (ClientResponseError)"),
    ],
)
def test_answers_that_are_none(bench: Bench, answer: bytes, failure: str) -> None:
    with server(Told(answer=answer)) as url:
        code, out, _ = bench(url, "--rate", 100, "--requests", 5, "--warmup", 0, "--json")
    assert code == 1
    assert json.loads(out)["runs"][0]["all"]["failures"] == {failure: 5}


def test_a_rate_so_low_that_nothing_was_due(bench: Bench) -> None:
    told = Told()
    with server(told) as url:
        code, out, _ = bench(url, "--rate", 0.01, "--duration", 0.1, "--warmup", 0, "--json")
    assert (code, told.heads) == (1, [])
    assert json.loads(out)["runs"][0]["all"]["latency_ms"] is None


# --- the agent


@pytest.fixture(scope="module")
def add(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("bench")
    with serving(bundles.add(folder / "add.tfb", slots=8), folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log


def url_of(agent: Agent) -> str:
    return f"{agent.url}/v2/models/{agent.name}"


SHAPES = ("--shape", "a=1..4,8", "--shape", "b=1..4,8")


@pytest.mark.parametrize("tensors", ["binary", "json"])
def test_several_rates_and_what_is_written(add: Agent, bench: Bench, tmp_path: Path, tensors: str) -> None:
    written, drawn = tmp_path / "r.json", tmp_path / "r.svg"
    options = ("--rate", "40,80", "--requests", 40, "--warmup", 0.2, "--tensors", tensors, "--deadline", 9000)
    code, out, err = bench(url_of(add), *options, *SHAPES, "--json-output", written, "--plot", drawn)
    assert code == 0, out + err
    report = json.loads(written.read_text())
    assert [run["all"]["answered"] for run in report["runs"]] == [40, 40]
    assert report["tensors"] == tensors
    for word in ("rate/s", "in time/s", "p99.9", "at 40/s", "at 80/s", "of a core"):
        assert word in out
    lines = ET.parse(drawn).getroot().findall("{http://www.w3.org/2000/svg}text")  # noqa: S314 - our own
    assert {"40/s", "80/s", "deadline", "99"} <= {line.text for line in lines}


@pytest.mark.parametrize("tensors", ["binary", "json"])
def test_records_of_streams(add: Agent, bench: Bench, tensors: str) -> None:
    before = add.metric("tightfit_requests_total", model=add.name, reason="ok")
    options = ("--rate", 60, "--requests", 40, "--warmup", 0, "--connections", 4, "--deadline", 9000, "--stream")
    report = report_of(bench(url_of(add), *options, *SHAPES, "--tensors", tensors, "--json"))
    (run,) = report["runs"]
    assert (report["stream"], run["all"]["answered"], run["all"]["failures"]) == (True, 40, {})
    assert run["all"]["received_bytes"] > 40 * 100
    assert add.metric("tightfit_requests_total", model=add.name, reason="ok") == before + 40
    until(lambda: add.metric("tightfit_streams") == 0)


def test_streams_that_are_refused_and_records_that_are(bench: Bench, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[streams]\nmost = 2\n")
    np.save(tmp_path / "turns.npy", np.array([2_000_000]))
    with serving(bundles.slow(tmp_path / "slow.tfb", slots=1), tmp_path / "log", "--config", str(config)) as agent:
        options = ("--rate", 200, "--requests", 40, "--warmup", 0, "--arrivals", "fixed", "--stream")
        inputs = ("--input", f"turns={tmp_path / 'turns.npy'}", "--deadline", 100, "--connections", 8)
        report = report_of(bench(url_of(agent), *options, *inputs, "--json"))
    failures = report["runs"][0]["all"]["failures"]
    assert failures["503 N streams are open, as many as may (close one, or try later)"] > 0
    assert any(failure.startswith("504 ") for failure in failures)
    assert sum(failures.values()) + report["runs"][0]["all"]["answered"] == 40


def test_rates_as_shares_of_the_capacity(add: Agent, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.load.command._CAPACITY_S", 0.5)
    options = ("--load", "20%,50%", "--requests", 20, "--warmup", 0.1, "--connections", 4)
    report = report_of(bench(url_of(add), *options, *SHAPES, "--json"))
    assert report["capacity_connections"] == 4
    rates = [run["rate"] / report["capacity_per_s"] for run in report["runs"]]
    assert rates == pytest.approx([0.2, 0.5])
    assert [run["all"]["answered"] for run in report["runs"]] == [20, 20]


def test_refusals_stand_by_reason(bench: Bench, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[requests]\nqueue_length = 1\n")
    np.save(tmp_path / "turns.npy", np.array([2_000_000]))
    with serving(bundles.slow(tmp_path / "slow.tfb", slots=1), tmp_path / "log", "--config", str(config)) as agent:
        options = ("--rate", 200, "--requests", 60, "--warmup", 0, "--arrivals", "fixed", "--deadline", 60_000)
        inputs = ("--input", f"turns={tmp_path / 'turns.npy'}", "--timeout", 60)
        report = report_of(bench(url_of(agent), *options, *inputs, "--json"))
    group = report["runs"][0]["all"]
    assert group["failures"] == {"503 the queue is full: N are waiting": 60 - group["answered"]}
    assert 0 < group["answered"] < 60


def test_the_capacity_is_that_of_the_connections_that_are_admitted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("agent.load.command._CAPACITY_S", 1.0)
    config = tmp_path / "agent.toml"
    config.write_text("[requests]\nqueue_length = 1\n")
    np.save(tmp_path / "turns.npy", np.array([50_000]))
    with serving(bundles.slow(tmp_path / "slow.tfb", slots=1), tmp_path / "log", "--config", str(config)) as agent:
        options = ("--load", "10%", "--requests", 5, "--connections", 8, "--warmup", 0)
        done = bench(url_of(agent), *options, "--input", f"turns={tmp_path / 'turns.npy'}", "--json")
    report = report_of(done)
    # One runs, one waits; a third may have come just between two.
    assert 1 <= report["capacity_connections"] <= 3
    assert report["capacity_per_s"] > 0


def test_a_mix_of_images_is_reported_apart(bench: Bench, tmp_path: Path) -> None:
    for name, colour in (("red", images.RED), ("blue", images.BLUE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(images.png(images.plain(8, 8, colour)))
    (tmp_path / "blue" / "b.jpg").write_bytes(b"not an image")
    mix = ("--mix", f"red=3:{tmp_path / 'red'}", "--mix", f"blue=1:{tmp_path / 'blue'}")
    with serving(images.classifier(tmp_path / "c.tfb"), tmp_path / "log") as agent:
        options = ("--rate", 100, "--requests", 60, "--warmup", 0, *mix, "--json")
        reports = [report_of(bench(url_of(agent), *options, *extra)) for extra in ((), ("--deadline", "9000"))]
    for report in reports:
        (run,) = report["runs"]
        red, blue = run["kinds"]
        assert (red["name"], blue["name"]) == ("red", "blue")
        assert red["requests"] > blue["requests"] > 0
        assert red["requests"] + blue["requests"] == run["all"]["requests"] == 60
        assert red["failures"] == {}
        assert 0 < sum(blue["failures"].values()) < blue["requests"]


def test_ctrl_c_prints_what_was_measured(add: Agent) -> None:
    before = add.metric("tightfit_requests_total", reason="ok")
    command = [*COMMAND, "bench", url_of(add), "--rate", "50", "--duration", "600", "--warmup", "0", *SHAPES]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "measuring at 50/s" in process.stderr.readline()
    until(lambda: add.metric("tightfit_requests_total", reason="ok") >= before + 10)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == ""
    assert "stopped by Ctrl-C" in out
    (row,) = re.findall(r"^ *50  all +(\d+)", out, re.MULTILINE)
    assert int(row) > 0


def test_ctrl_c_while_the_capacity_is_measured(add: Agent) -> None:
    command = [*COMMAND, "bench", url_of(add), "--warmup", "0", "--json", *SHAPES]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "measuring the capacity" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    assert (json.loads(out)["runs"], json.loads(out)["interrupted"]) == ([], True)


def test_help_shows_examples(bench: Bench) -> None:
    code, out, _ = bench("--help")
    assert code == 0
    assert "tightfit-agent bench " in out


# --- what is refused before anything is sent


def refused(done: tuple[int, str, str]) -> str:
    code, out, err = done
    assert (code, out) == (2, ""), err
    (line,) = err.splitlines()
    assert line.startswith("tightfit-agent: error: ")
    return line


def test_a_server_that_is_away(bench: Bench) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        line = refused(bench(f"http://127.0.0.1:{port}/v2/models/m", "--rate", 1))
    assert "no connection: connection refused (is the server started?)" in line


def test_a_model_that_is_not_there(add: Agent, bench: Bench) -> None:
    assert "404 unknown model 'ad'" in refused(bench(f"{add.url}/v2/models/ad", "--rate", 1))
    assert "say --shape a=?,8" in refused(bench(url_of(add), "--rate", 1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://x"], "no model's URL"), (["ftp://x/v2/models/m"], "no model's URL"),
        (["http://x:y/v2/models/m"], "no model's URL"),
        (["--rate", "0"], "--rate '0'"), (["--rate", "5,x"], "--rate 'x'"), (["--rate", "50%"], "--rate '50%'"),
        (["--rate", "nan"], "--rate 'nan'"), (["--load", "80"], "--load '80'"),
        (["--rate", "1", "--load", "5%"], "both given"), (["--duration", "0"], "--duration 0"),
        (["--duration", "1", "--requests", "1"], "both given"), (["--tensors", "xml"], "binary or json"),
        (["--mix", "a=1"], "NAME=WEIGHT:PATH"), (["--mix", "a=-1:b"], "NAME=WEIGHT:PATH"),
        (["--mix", "a=1:b", "--mix", "a=1:c"], "once for each name"), (["--shape", "x"], "NAME=VALUE"),
        (["--mix", "a=1:b", "--samples", "c"], "both given"), (["--slo", "p99"], "--slo 'p99'"),
        (["--slo", "p99=20s"], "larger --timeout"), (["--deadline", "20000"], "larger --timeout"),
        (["--plot", "/none/x.svg"], "its folder is not there"),
    ],
)  # fmt: skip
def test_options_that_are_refused(bench: Bench, arguments: list[str], words: str) -> None:
    url = [] if arguments[0].partition(":")[2] else ["http://127.0.0.1:1/v2/models/m"]
    assert words in refused(bench(*url, *arguments))


@pytest.mark.parametrize("form", [(), ("--stream",)])
def test_over_tls_with_a_token_and_a_certificate(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    authority = Authority(tmp_path / "ca")
    shown, own = authority.server(), authority.issue("bench")
    token = make()
    (tmp_path / "tokens").write_text(line_of("bench", token))
    (tmp_path / "agent.toml").write_text(
        f'[tls]\ncertificate = "{shown.certificate}"\nkey = "{shown.key}"\n'
        f'client_ca = "{authority.own.certificate}"\nclient_certificate = "required"\n'
        f'[access]\nanonymous = []\ntokens = "{tmp_path / "tokens"}"\n[[callers]]\nname = "bench"\ninfer = ["add"]\n'
    )
    bundle = bundles.add(tmp_path / "add.tfb")
    with serving(bundle, tmp_path / "log", "--config", str(tmp_path / "agent.toml")) as agent:
        url = f"https://localhost:{agent.port}/v2/models/add"
        files = ("--ca", authority.own.certificate, "--cert", own.certificate, "--key", own.key)
        rate = ("--rate", "50", "--requests", "20", "--warmup", "0", "--shape", "a=1,8", "--shape", "b=1,8", *form)
        code, _, err = bench(url, *files, *rate)
        assert (code, "401" in err) == (2, True), err
        monkeypatch.setenv("TIGHTFIT_TOKEN", token)
        code, out, err = bench(url, *files, *rate, "--json")
        assert code == 0, err
        assert json.loads(out)["runs"][0]["all"]["failures"] == {}
        assert token not in out
        code, _, err = bench(url, "--ca", own.key, *rate)
        assert (code, f"--ca {own.key}: " in err) == (2, True), err
        code, _, err = bench(url, "--cert", own.certificate, *rate)
        assert (code, "--cert and --key go together" in err) == (2, True), err
