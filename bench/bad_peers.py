"""A client that behaves, beside some that do not: `python -m bench.bad_peers [--save]`.

`tightfit-agent bench` asks a small model 50 times a second, in open loop, alone and beside each of these, and beside
all of them; the rounds are interleaved, so that what the machine does otherwise falls on all alike:

- `bodies`: one client sends 38 MB of JSON for a large model, again and again,
- `reader`: one asks for 16 MB and reads a byte of it every second,
- `connections`: one opens 1,000 connections and leaves them open,
- `heads`: one sends half of a head on 50 connections, a byte every second.

Each has an address of its own (127.0.0.2 and on) and a process of its own, and has begun when the client that behaves
does. p99 should stay within 1.5 times that of the client alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from agent.errors import Reason
from bench.machine import describe_machine, measured_on
from bench.soak import MIB, Process
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving

RESULT = Path(__file__).parent / "results" / "bad_peers.md"
RATE = 50
BAR = 1.5
SHAPE = (1024, 4096)
CONNECTIONS, HALF_HEADS = 1000, 50
# Files that a process needs for all its connections.
FILES = 4096
SLOW_S = 1.0
BEGINS_S = 60.0


def large_request(binary: bool) -> bytes:
    """38 MB of JSON, or 16 MB of raw tensors; the answer to it is raw tensors."""
    count = SHAPE[0] * SHAPE[1]
    tensor: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": list(SHAPE)}
    more = {"parameters": {"binary_data_output": True}}
    fields: tuple[str, ...] = ()
    if binary:
        text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 4 * count}}], **more}).encode()
        body, fields = text + bytes(4 * count), (f"Inference-Header-Content-Length: {len(text)}",)
    else:
        data = ",".join(["0.123456"] * count)
        body = json.dumps({"inputs": [{**tensor, "data": 0}], **more}).replace('"data": 0', f'"data":[{data}]').encode()
    lines = ["POST /v2/models/large/infer HTTP/1.1", "Host: ecu", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


# --- those that do not behave; each counts what comes of it


@dataclass
class Peer:
    """One of them: its address, and how its connections ended."""

    host: str
    port: int
    ends: Counter[str] = field(default_factory=Counter)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def connect(self, limit: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(self.host, 0), limit=limit)

    def count(self, data: bytes) -> None:
        """What the agent said before it closed: a status, or nothing."""
        self.ends[data[9:12].decode("ascii", "replace") or "closed"] += 1


async def bodies(peer: Peer) -> None:
    """38 MB of JSON, again and again."""
    sent = large_request(binary=False)
    peer.begun.set()
    while True:
        reader, writer = await peer.connect()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            peer.count(head)
        writer.close()


async def slow_reader(peer: Peer) -> None:
    """A byte a second of 16 MB."""
    sent = large_request(binary=True)
    peer.begun.set()
    while True:
        reader, writer = await peer.connect(limit=1)
        data = b""
        with contextlib.suppress(OSError):
            writer.write(sent)
            await writer.drain()
            while byte := await reader.read(1):
                data += byte
                await asyncio.sleep(SLOW_S)
        peer.count(data)
        writer.close()


async def connections(peer: Peer) -> None:
    """A thousand that stay open; those that are closed are opened again after a second."""
    opened = 0

    async def one() -> None:
        nonlocal opened
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await peer.connect()
                opened += 1
                if opened >= CONNECTIONS:
                    peer.begun.set()
                peer.count(await reader.read(4096))
                writer.close()
            await asyncio.sleep(SLOW_S)

    await asyncio.gather(*[one() for _ in range(CONNECTIONS)])


async def half_heads(peer: Peer) -> None:
    """A byte a second of a head that never ends."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await peer.connect()
                writer.write(b"POST /v2/models/adding/infer HTTP/1.1\r\nHost: ecu\r\nX: ")
                answer = asyncio.ensure_future(reader.read(4096))
                while not answer.done():
                    writer.write(b"x")
                    await asyncio.wait([answer], timeout=SLOW_S)
                peer.count(answer.result())
                writer.close()
            await asyncio.sleep(0)

    peer.begun.set()
    await asyncio.gather(*[one() for _ in range(HALF_HEADS)])


PEERS: dict[str, Callable[[Peer], Awaitable[None]]] = {
    "bodies": bodies,
    "reader": slow_reader,
    "connections": connections,
    "heads": half_heads,
}


def _misbehave(kind: str, host: str, port: int, pipe: Connection) -> None:
    """In a process of its own, until told to stop: then say how its connections ended."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, most), most))

    async def until_told() -> Peer:
        peer = Peer(host, port)
        task = asyncio.ensure_future(PEERS[kind](peer))
        begun = asyncio.ensure_future(peer.begun.wait())
        await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
        pipe.send("begun")
        told = asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        task.cancel()
        return peer

    pipe.send(dict(asyncio.run(until_told()).ends))


@contextlib.contextmanager
def misbehaving(kinds: Sequence[str], port: int) -> Iterator[dict[str, Counter[str]]]:
    """These peers, while the block lasts. What is yielded is filled when it ends: how their connections did."""
    context, ends = multiprocessing.get_context("spawn"), dict[str, Counter[str]]()
    started = []
    for kind in kinds:
        ours, theirs = context.Pipe()
        host = f"127.0.0.{2 + list(PEERS).index(kind)}"
        process = context.Process(target=_misbehave, args=(kind, host, port, theirs), daemon=True)
        process.start()
        started.append((kind, process, ours))
    for kind, _, ours in started:
        if not ours.poll(BEGINS_S) or ours.recv() != "begun":
            raise SystemExit(f"{kind} did not begin")
    try:
        yield ends
    finally:
        for kind, process, ours in started:
            ours.send("stop")
            ends[kind] = Counter(ours.recv() if ours.poll(30) else {"lost": 1})
            process.join(10)
            if process.is_alive():
                process.kill()


# --- the one that behaves


@dataclass(frozen=True)
class Round:
    """What it measured, in milliseconds, what was refused to it, what its company got, and the gateway's memory."""

    company: str
    p50: float
    p99: float
    answered: int
    failures: dict[str, int]
    ends: dict[str, Counter[str]]
    rss: int


def one_round(agent: Agent, company: str, seconds: float) -> Round:
    """One measurement of the client that behaves, beside these."""
    with misbehaving(COMPANIES[company], agent.port) as ends:
        url = f"{agent.url}/v2/models/adding"
        options = ("--rate", str(RATE), "--duration", f"{seconds:g}", "--warmup", "2", "--json")
        code, text, errors = run_agent("bench", url, *options, timeout=seconds + 120)
        rss = Process.of(agent.process.pid).rss
    if code:
        raise SystemExit(f"tightfit-agent bench ended with {code}: {errors}")
    figures = json.loads(text)["runs"][0]["all"]
    latency = figures["latency_ms"]
    return Round(company, latency["p50"], latency["p99"], figures["answered"], figures["failures"], dict(ends), rss)


COMPANIES: dict[str, tuple[str, ...]] = {"alone": (), **{kind: (kind,) for kind in PEERS}, "all": tuple(PEERS)}


def measure(agent: Agent, seconds: float, rounds: int) -> list[Round]:
    """Every company in turn, and that again."""
    return [one_round(agent, company, seconds) for _ in range(rounds) for company in COMPANIES]


@contextlib.contextmanager
def served(folder: Path, settings: str = "") -> Iterator[Agent]:
    """An agent with a small model and a large one."""
    bundles.adding(folder / "adding.tfb")
    bundles.identity(folder / "large.tfb", DType.FLOAT32, SHAPE)
    models = "".join(f'[[models]]\nbundle = "{folder / name}.tfb"\n' for name in ("adding", "large"))
    (folder / "agent.toml").write_text(settings + models)
    with serving(None, folder / "log", "--config", str(folder / "agent.toml")) as agent:
        yield agent


# --- the report


def report(measured: Sequence[Round], seconds: float, reasons: Counter[str], machine: str) -> str:
    """Markdown; figures are medians of the rounds."""
    alone = statistics.median(each.p99 for each in measured if each.company == "alone")
    rounds = len(measured) // len(COMPANIES)
    lines = [
        "# Beside clients that do not behave",
        "",
        f"{RATE} requests a second for a small model, alone and beside others, by `python -m bench.bad_peers`: medians "
        f"of {rounds} rounds of {seconds:g} s each. p99 should be within {BAR:g} times that of the client alone.",
        "",
        "| beside | p50 | p99 | against alone | answered | refused | how the others' connections ended | gateway |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for company in COMPANIES:
        ours = [each for each in measured if each.company == company]
        p50, p99 = (statistics.median(getattr(each, name) for each in ours) for name in ("p50", "p99"))
        failures = sum((Counter(each.failures) for each in ours), Counter[str]())
        ends = sum((counter for each in ours for counter in each.ends.values()), Counter[str]())
        lines.append(
            f"| {company} | {p50:.2f} ms | {p99:.2f} ms | {p99 / alone:.2f} | {sum(each.answered for each in ours):,} "
            f"| {_counted(failures)} | {_counted(ends)} | {max(each.rss for each in ours) / MIB:.0f} MiB |"
        )
    lines += ["", f"How the agent counted what it ended: {_counted(reasons)}."]
    return "\n".join((*lines, "", machine, ""))


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{key} {count:,}" for key, count in counter.most_common()) or "none"


def reasons_of(agent: Agent) -> Counter[str]:
    """How requests ended that were not answered, and connections that asked for nothing."""
    names = ("tightfit_requests_total", "tightfit_connections_cut_total")
    reasons = [reason.value for reason in Reason if reason is not Reason.OK]
    return +Counter({reason: int(sum(agent.metric(name, reason=reason) for name in names)) for reason in reasons})


def main() -> int:
    """0 where the one that behaves is within the bar and was refused nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as agent:
        measured = measure(agent, options.seconds, options.rounds)
        reasons = reasons_of(agent)
        assert "Traceback" not in agent.log, agent.log[-4000:]
    text = report(measured, options.seconds, reasons, measured_on(describe_machine("aiohttp", "uvloop", "onnxruntime")))
    if options.save:
        RESULT.write_text(text, encoding="utf-8")
    print(text)
    by_company = {
        company: statistics.median(each.p99 for each in measured if each.company == company) for company in COMPANIES
    }
    kept = all(p99 <= BAR * by_company["alone"] for p99 in by_company.values())
    return not kept or any(each.failures for each in measured)


if __name__ == "__main__":
    sys.exit(main())
