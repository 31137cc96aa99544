"""Streams outlive what happens behind them: engines that die, models that are reloaded; and the example in C."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from targets.bundle import read_manifest
from tests.support import bundles
from tests.support.agents import ROOT, Agent, asking, serving, stopped, until
from tests.support.bundles import rewrite
from tests.support.streams import FRAMES, Exchange, Record, pick, stream

STREAMS = 8


@dataclass
class Client:
    """Sends records at a steady rate on one stream, and reads all that comes."""

    number: int
    agent: Agent
    records: list[Record] = field(default_factory=list)
    sent: int = 0
    wrong: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        with stream(self.agent) as exchange:
            reader = threading.Thread(target=self._read, args=(exchange,))
            reader.start()
            try:
                while not stop.is_set():
                    exchange.send(pick(f"{self.number}.{self.sent}", self._value(self.sent), self.sent % 16))
                    self.sent += 1
                    stop.wait(0.02)
                exchange.end()
            except OSError as error:
                self.wrong.append(f"the stream was lost: {error!r}")
            reader.join()

    def _value(self, turn: int) -> int:
        return 1000 * self.number + turn

    def _read(self, exchange: Exchange) -> None:
        try:
            while (record := exchange.record()) is not None:
                turn = len(self.records)
                self.records.append(record)
                if (record["seq"], record.get("id")) != (turn + 1, f"{self.number}.{turn}"):
                    self.wrong.append(f"not the answer to {turn}: {record}")
                elif record["type"] == "result":
                    expected = [8 * (turn % 16) + column + self._value(turn) for column in range(8)]
                    if record["outputs"][0]["data"] != expected:
                        self.wrong.append(f"{turn}: {record}")
        except (OSError, ValueError) as error:
            self.wrong.append(f"the stream was lost: {error!r}")


def run_clients(agent: Agent, meanwhile: object) -> list[Client]:
    """All streams at once; `meanwhile(clients)` is called when all of them have had answers, and answered after it."""
    clients = [Client(number, agent) for number in range(STREAMS)]
    with asking(clients):
        until(lambda: all(len(client.records) >= 10 for client in clients))
        meanwhile(clients)  # type: ignore[operator]
        back = [len(client.records) for client in clients]
        until(lambda: all(len(each.records) >= at + 40 for each, at in zip(clients, back, strict=True)))
    assert [client.wrong for client in clients] == [[]] * STREAMS
    assert [len(client.records) for client in clients] == [client.sent for client in clients]
    return clients


def test_an_engine_that_is_killed_ends_no_stream(tmp_path: Path) -> None:
    """kill -9 during 8 open streams: what was on its way is told why, and every stream goes on."""
    with serving(bundles.picking(tmp_path / "picking.tfb"), tmp_path / "log") as agent:
        # Followed from before: what happens to the engine is told as well.
        with Exchange(agent, "/v2/events") as events:

            def kill(_: list[Client]) -> None:
                pid = agent.engine_pid
                with stopped(pid):
                    until(lambda: agent.metric("tightfit_running") >= 1)
                    os.kill(pid, signal.SIGKILL)
                until(lambda: agent.metric("tightfit_engine_restarts_total") == 1)
                until(lambda: agent.metric("tightfit_engine_up") == 1)

            clients = run_clients(agent, kill)
            down, up = events.event(), events.event()
        assert (down["event"], up["event"]) == ("engine_down", "engine_up")
        assert "9" in json.loads(down["data"])["how"] or "KILL" in json.loads(down["data"])["how"]
        for client in clients:
            assert {record["status"] for record in client.records} <= {200, 503}
            assert {record.get("reason", "engine_down") for record in client.records} == {"engine_down"}
            assert [record["status"] for record in client.records[-15:]] == [200] * 15
        assert any(record["status"] == 503 for client in clients for record in client.records)
        assert agent.stop() == 0
        assert "Traceback" not in agent.log


def test_a_reload_ends_no_stream_and_loses_no_record(tmp_path: Path) -> None:
    versions = []
    for name in ("one", "two"):
        bundle = bundles.picking(tmp_path / f"{name}.tfb")
        rewrite(bundle, read_manifest(bundle), name="picking", options={"variant": name})
        versions.append(read_manifest(bundle).version)
    config = tmp_path / "agent.toml"
    config.write_text(f'bundle = "{tmp_path / "one.tfb"}"\n')
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:

        def reload_(clients: list[Client]) -> None:
            config.write_text(f'bundle = "{tmp_path / "two.tfb"}"\n')
            agent.process.send_signal(signal.SIGHUP)
            until(lambda: all(client.records[-1]["model_version"] == versions[1] for client in clients))

        with Exchange(agent, "/v2/events") as events:
            clients = run_clients(agent, reload_)
            happened = [json.loads(events.event()["data"]) for _ in range(3)]
        for client in clients:
            assert {record["status"] for record in client.records} == {200}
            seen = [record["model_version"] for record in client.records]
            assert seen == sorted(seen, key=versions.index)
        assert [each["type"] for each in happened] == ["load", "activate", "unload"]
        assert (happened[1]["version"], happened[1]["before"], happened[2]["version"]) == (
            versions[1],
            versions[0],
            versions[0],
        )
        assert "Traceback" not in agent.log


def test_the_example_in_c(tmp_path: Path) -> None:
    """docs/examples/frames.c writes a request that the agent answers, and reads what comes."""
    program = tmp_path / "frames"
    subprocess.run(["gcc", "-std=c99", "-o", program, ROOT / "docs" / "examples" / "frames.c"], check=True)
    request = subprocess.run([program, "request"], capture_output=True, check=True).stdout
    with serving(bundles.adding(tmp_path / "adding.tfb"), tmp_path / "log") as agent, stream(agent, FRAMES) as exchange:
        for piece in range(0, 3 * len(request), 7):
            exchange.send((request * 3)[piece : piece + 7])
        exchange.end()
        while exchange.receive():
            pass
        data = bytes(exchange.body)
    shown = subprocess.run([program, "read", "5", "1000"], input=data, capture_output=True, check=True).stdout
    lines = shown.decode().splitlines()
    assert [line.split(" ", 1)[0] for line in lines] == ["frame"] * 3
    for seq, line in enumerate(lines, 1):
        _, text, tensor = line.split(" ")
        record = json.loads(text)
        assert (record["type"], record["seq"], record["model_name"]) == ("result", seq, agent.name)
        assert struct.unpack("<f", bytes.fromhex(tensor)) == (-1.0,)


def test_streams_live_on_while_they_are_idle(tmp_path: Path) -> None:
    """Neither the keep-alive limit of connections nor that of bodies is one of streams."""
    config = tmp_path / "agent.toml"
    config.write_text("[http]\nkeepalive_s = 0.3\nbody_s = 0.3\nsend_s = 0.3\n[streams]\nheartbeat_s = 0.2\n")
    with (
        serving(bundles.picking(tmp_path / "p.tfb"), tmp_path / "log", "--config", str(config)) as agent,
        stream(agent) as exchange,
    ):
        for _ in range(3):
            exchange.send(pick("", 1, 1))
            assert exchange.records(1)[0]["status"] == 200
            time.sleep(1)
        assert exchange.line() == b"\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_as_documented(tmp_path: Path) -> None:
    """The command of docs/streams.md: the answer comes while the body is still open."""
    text = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```console\n\$ (.*?)\n\{", text, re.DOTALL)
    with serving(bundles.adding(tmp_path / "m.tfb"), tmp_path / "log") as agent:
        command = command.replace("localhost:8080", agent.address).replace("sleep 5", "cat")
        with subprocess.Popen(
            ["bash", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            record = json.loads(process.stdout.readline())
            assert (record["id"], record["outputs"][0]["data"]) == ("a", [-1.0])
            process.communicate("")
            assert process.returncode == 0
