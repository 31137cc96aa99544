"""Streams for long, beside peers that read slowly or never: `python -m bench.stream_soak --minutes 30 [--save]`.

So many healthy streams, half of lines and half of frames, each at an even rate that does not wait for answers; slow
readers, which read as much as a healthy one gets, and send ten times as much as far as their socket takes it; and dead
peers, which send likewise and never read a byte: some are cut off after a while (RST) and replaced, others stay. Every
answer has to be the one to its own record, in order, `seq` without a gap and none twice. A tenth of the time warms up;
then all leave, and memory, descriptors and threads of both processes are noted; they are noted at the end again, when
all have left. It fails (exit 1) where by then one has 1 % more resident memory, or more descriptors or threads; where
memory in between was ever over what `[streams]` allows them; or where an answer was not the one to be expected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from onnx import helper

from agent.http.framing.decoder import Decoder
from agent.http.framing.frames import FrameDecoder
from agent.http.framing.lines import LineDecoder
from agent.load.histogram import Histogram
from agent.load.samples import Form, infer_message
from bench.machine import describe_machine, measured_on
from bench.rivals.server import cpu_seconds
from bench.soak import ENGINE, GATEWAY, MIB, QUIET_S, Note, faults, note_of, table
from bench.streams import FRAMES, LINES, record_of
from targets.tensor import Contract, DimRange, DType
from tests.support.agents import Agent, serving
from tests.support.bundles import dense, model_of, plan_of, write_bundle

RESULT = Path(__file__).parent / "results" / "stream_soak.md"
NAME, WIDTH, SLOTS, IN_FLIGHT = "numbers", 64, 32, 8
UNREAD_KIB, READY_KIB, RECORD_KIB = 64, 384, 64
"""What one stream may have in the gateway, as docs/streams.md says: unread answers, its socket's, a record's."""
_LONGEST = 1 << 16
_SLOW_BUFFER, _SLOW_BYTES = 4096, 1024
# About what an answer has, with its framing.
_ANSWER_BYTES = 500
_GREED = 10
# As Ethernet has it: with loopback's of 64 KiB the kernel would take megabytes for a peer that does not read.
_SEGMENT = 1460
_DEAD_S = (5.0, 20.0)
_ABSENT_S = 0.2
_LAST_S = 60.0
# A float counts whole numbers so far; the numbers of records begin anew there.
_NUMBERS = 1 << 20


def bundle(folder: Path) -> Path:
    """`y` is `x`, FP32[n,64], rows of several requests put together."""
    x, y = (dense(name, DType.FLOAT32, "n", WIDTH, largest=4 * WIDTH * SLOTS) for name in "xy")
    weights = {"w": np.eye(WIDTH, dtype=np.float32)}
    graph = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [x], [y], weights)
    contract = Contract((x,), (y,), {"n": DimRange(1, 1, SLOTS)}, "n")
    return write_bundle(
        folder, [graph], contract, {"x": np.ones((1, WIDTH), np.float32)}, plan=plan_of(contract, SLOTS)
    )


def settings(streams: int) -> str:
    """Of the agent, for so many at once."""
    return (
        f"[streams]\nmost = {streams}\nin_flight = {IN_FLIGHT}\nunread_kib = {UNREAD_KIB}\n"
        f"[requests]\nqueue_length = {streams * IN_FLIGHT}\n"
    )


# --- the wire


class Answers:
    """The bytes of an answer in, its records out."""

    def __init__(self, content_type: str) -> None:
        self.ended = False
        self._raw = bytearray()
        self._in_body = False
        self._decoder: Decoder = FrameDecoder(_LONGEST) if content_type == FRAMES else LineDecoder(_LONGEST)

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """(JSON, raw tensors) of every record that is whole by now. Raises ValueError where the answer is not 200."""
        self._raw += data
        if not self._in_body:
            end = self._raw.find(b"\r\n\r\n")
            if end < 0:
                return []
            if not self._raw.startswith(b"HTTP/1.1 200"):
                raise ValueError(self._raw[: end + 300].decode("latin-1"))
            del self._raw[: end + 4]
            self._in_body = True
        while (at := self._raw.find(b"\r\n")) >= 0:
            size = int(bytes(self._raw[:at]), 16)
            if len(self._raw) < at + 4 + size:
                break
            self._decoder.feed(bytes(self._raw[at + 2 : at + 2 + size]))
            del self._raw[: at + 4 + size]
            self.ended = self.ended or size == 0
        found = []
        while (message := self._decoder.next()) is not None:
            split = len(message.body) if message.header_length is None else int(message.header_length)
            found.append((json.loads(message.body[:split]), message.body[split:]))
        return found


class Records:
    """Requests of one form, each with a number in it."""

    def __init__(self, content_type: str) -> None:
        self.content_type = content_type
        self._binary = content_type == FRAMES
        self.head = (
            f"POST /v2/models/{NAME}/stream HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        ).encode()

    def chunk(self, number: int) -> bytes:
        """A record as a chunk of a body."""
        value = np.full((1, WIDTH), number % _NUMBERS, np.float32)
        record = record_of(infer_message(Form("", self._binary, {}), [("x", DType.FLOAT32, value)]), self.content_type)
        return b"%x\r\n%b\r\n" % (len(record), record)

    def holds(self, number: int, record: dict[str, Any], raw: bytes) -> bool:
        """Whether this is the answer to that record."""
        values = np.frombuffer(raw, np.float32).tolist() if self._binary else record["outputs"][0]["data"]
        return bool(values == [number % _NUMBERS] * WIDTH)


# --- peers


@dataclass
class Seen:
    """What all peers saw. `wrong` is told; latency in ns from when a record was due."""

    latency: Histogram = field(default_factory=Histogram)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Reader:
    """A stream whose answers are read, and held against what was sent."""

    kind, greed = "healthy", 1

    def __init__(self, address: tuple[str, int], records: Records, rate: float, seen: Seen) -> None:
        self._address, self._records, self._rate, self._seen = address, records, rate, seen

    async def run(self, stop: asyncio.Event) -> None:
        """One exchange after the other until told to stop; the last is ended properly and read to its end."""
        while not stop.is_set():
            try:
                await self._exchange(stop)
            except (OSError, ValueError, LookupError) as error:
                self._seen.wrong.append(f"a {self.kind} stream: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(_ABSENT_S)

    async def _exchange(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        connection = self._socket()
        with connection:
            await loop.sock_connect(connection, self._address)
            due: deque[float] = deque()
            sending = asyncio.ensure_future(self._send(connection, due, stop))
            try:
                await self._receive(connection, due, stop)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _socket(self) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    async def _send(self, connection: socket.socket, due: deque[float], stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, self._records.head)
        # Streams that began together do not send together.
        start = time.monotonic() + random.random() / self._rate
        rate = self._rate * self.greed
        number = 0
        while not stop.is_set():
            number += 1
            at = start + number / rate
            await asyncio.sleep(at - time.monotonic())
            due.append(at)
            await loop.sock_sendall(connection, self._records.chunk(number))
        await loop.sock_sendall(connection, b"0\r\n\r\n")

    async def _receive(self, connection: socket.socket, due: deque[float], stop: asyncio.Event) -> None:
        """Until the server ends it. Raises ValueError where an answer is not the one that is next."""
        answers, expected = Answers(self._records.content_type), 1
        while data := await self._read(connection, stop):
            for record, raw in answers.feed(data):
                if record["type"] == "overflow" and self.kind != "healthy":
                    self._seen.counts["overflow"] += 1
                    return
                if record["type"] != "result" or record["seq"] != expected:
                    raise ValueError(f"{expected} is next, and this came: {json.dumps(record)}")
                if not self._records.holds(expected, record, raw):
                    raise ValueError(f"{expected} has the answer of another: {json.dumps(record)} {raw!r}")
                latency = time.monotonic() - due.popleft()
                if self.kind == "healthy":
                    self._seen.latency.record(max(round(latency * 1e9), 0))
                self._seen.counts[self.kind] += 1
                expected += 1
            if answers.ended:
                break
        if not answers.ended and self.kind != "healthy":
            # Cut off: its last record may be lost with what it had not read.
            self._seen.counts["overflow"] += 1
        elif due:
            raise ValueError(f"the stream ended, and {len(due)} records had no answer")

    async def _read(self, connection: socket.socket, stop: asyncio.Event) -> bytes:  # noqa: ARG002 - see below
        return await asyncio.get_running_loop().sock_recv(connection, _LONGEST)


def keep_small(connection: socket.socket) -> None:
    """What both kernels take of what is not read."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)


class SlowReader(Reader):
    """Sends more than it reads, which is as much as a healthy one gets, a little at a time."""

    kind, greed = "slow", _GREED

    def _socket(self) -> socket.socket:
        connection = super()._socket()
        keep_small(connection)
        return connection

    async def _read(self, connection: socket.socket, stop: asyncio.Event) -> bytes:
        data = await asyncio.get_running_loop().sock_recv(connection, _SLOW_BYTES)
        # When all end, what is left is read at once.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), len(data) / _ANSWER_BYTES / self._rate)
        return data


class DeadPeer:
    """Sends as far as its socket takes it, and never reads; `stays`: until the end, else it is replaced by another."""

    def __init__(self, address: tuple[str, int], records: Records, rate: float, stays: bool, seen: Seen) -> None:
        self._address, self._records, self._stays, self._seen = address, records, stays, seen
        self._pause_s = 1 / rate / _GREED

    async def run(self, stop: asyncio.Event) -> None:
        """One after the other until told to stop."""
        loop = asyncio.get_running_loop()
        while not stop.is_set():
            with socket.socket() as connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                keep_small(connection)
                # What is unread when this is closed is answered with RST, as for a machine that was switched off.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await loop.sock_connect(connection, self._address)
                self._seen.counts["dead"] += 1
                sending = asyncio.ensure_future(self._send(connection))
                life_s = None if self._stays else random.uniform(*_DEAD_S)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), life_s)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, connection: socket.socket) -> None:
        loop, number = asyncio.get_running_loop(), 0
        await loop.sock_sendall(connection, self._records.head)
        while True:
            number += 1
            await loop.sock_sendall(connection, self._records.chunk(number))
            await asyncio.sleep(self._pause_s)


# --- the soak


@dataclass(frozen=True)
class Load:
    """How many of each, and records a second of a stream."""

    streams: int
    slow: int
    dead: int
    rate: float

    @property
    def all(self) -> int:
        return self.streams + self.slow + self.dead

    @property
    def allowed_bytes(self) -> int:
        """What all of them may take in the gateway beside what it has without them."""
        return self.all * (UNREAD_KIB + READY_KIB + RECORD_KIB) << 10


class Soak:
    """Peers against one agent, for a while."""

    def __init__(self, agent: Agent, load: Load) -> None:
        self._agent, self.load = agent, load
        self._started = time.monotonic()
        self.warm, self.seen = Seen(), Seen()
        self.notes: list[Note] = []
        self.cpu: dict[str, float] = {}

    async def run(self, seconds: float, warm_s: float) -> None:
        """Warm up for so long, leave, and come again."""
        await self._peers(warm_s, self.warm)
        before, began = self._cpu(), time.monotonic()
        await self._peers(seconds, self.seen)
        took = time.monotonic() - began
        self.cpu = {name: (after - before[name]) / took for name, after in self._cpu().items()}

    async def _peers(self, seconds: float, seen: Seen) -> None:
        load, address, stop = self.load, ("127.0.0.1", self._agent.port), asyncio.Event()
        forms = [Records(content_type) for content_type in (LINES, FRAMES)]
        peers: list[Reader | DeadPeer] = [
            *(Reader(address, forms[at % 2], load.rate, seen) for at in range(load.streams)),
            *(SlowReader(address, forms[at % 2], load.rate, seen) for at in range(load.slow)),
            *(DeadPeer(address, forms[at % 2], load.rate, at % 4 < 2, seen) for at in range(load.dead)),
        ]
        tasks = [asyncio.ensure_future(peer.run(stop)) for peer in peers]
        end, pause_s = time.monotonic() + seconds, min(max(seconds / 100, 0.5), 10.0)
        while (left := end - time.monotonic()) > 0:
            await asyncio.wait(tasks, timeout=min(left, pause_s))
            self._note(quiet=False)
        stop.set()
        _, late = await asyncio.wait(tasks, timeout=_LAST_S)
        for task in late:
            task.cancel()
        if late:
            seen.wrong.append(f"{len(late)} streams were not answered to their end within {_LAST_S:g} s")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        for _ in range(round(_LAST_S / _ABSENT_S)):
            left_open = await asyncio.to_thread(self._agent.metric, "tightfit_streams")
            if not left_open:
                break
            await asyncio.sleep(_ABSENT_S)
        else:
            seen.wrong.append(f"{left_open:.0f} streams are open {_LAST_S:g} s after all had left")
        await asyncio.sleep(QUIET_S)
        self._note(quiet=True)

    def _note(self, quiet: bool) -> None:
        answered = sum(seen.counts[kind] for seen in (self.warm, self.seen) for kind in ("healthy", "slow"))
        self.notes.append(note_of(self._agent, time.monotonic() - self._started, answered, quiet))

    def _cpu(self) -> dict[str, float]:
        pids = {GATEWAY: self._agent.process.pid, ENGINE: self._agent.engine_pid, "clients": os.getpid()}
        return {name: cpu_seconds(pid) for name, pid in pids.items()}

    def faults(self) -> list[str]:
        """What is not as it should be."""
        found = faults(self.notes, [*self.warm.wrong, *self.seen.wrong])
        quiet = next(note for note in self.notes if note.quiet)
        most = max(note.processes[GATEWAY].rss for note in self.notes) - quiet.processes[GATEWAY].rss
        if most > self.load.allowed_bytes:
            found.append(
                f"the gateway had {most / MIB:.0f} MiB more than without streams, "
                f"{self.load.allowed_bytes / MIB:.0f} MiB are allowed"
            )
        return found

    def report(self, found: Sequence[str], machine: str) -> str:
        """Markdown."""
        load, counts, latency = self.load, self.seen.counts, self.seen.latency
        ms = {f"p{share:g}": (latency.quantile(share / 100) or 0) / 1e6 for share in (50.0, 99.0, 99.9)}
        quiet, busy = ([note.processes for note in self.notes if note.quiet is which] for which in (True, False))
        more = [
            f"{max(each[name].rss for each in busy) / MIB:.1f} MiB in the {name} (without streams "
            f"{quiet[0][name].rss / MIB:.1f})"
            for name in (GATEWAY, ENGINE)
        ]
        return "\n".join(
            (
                "# Streams for long",
                "",
                f"{load.streams} streams at {load.rate:g} records a second each ({load.streams * load.rate:g}/s in "
                f"all), {load.slow} slow readers and {load.dead} dead peers, for {self.notes[-1].at_s / 60:.1f} "
                f"minutes, by `python -m bench.stream_soak`. {counts['healthy']:,} answers to healthy streams and "
                f"{counts['slow']:,} to slow readers, each the one to its record, in order, none missing and none "
                f"twice unless said below; {counts['overflow']} slow readers were given up, {counts['dead']} dead "
                "peers came.",
                "",
                "Of the healthy, from when a record was due: "
                + ", ".join(f"{name} {value:.1f} ms" for name, value in ms.items())
                + f", most {latency.max / 1e6:.0f} ms. "
                + "Of a core took: "
                + ", ".join(f"{name} {share:.0%}" for name, share in self.cpu.items())
                + f". Most memory (RSS): {' and '.join(more)}; streams may take "
                f"{load.allowed_bytes / MIB:.0f} MiB in the gateway.",
                "",
                "Nothing grew and every answer was the one to be expected." if not found else f"**{'; '.join(found)}**",
                "",
                *table(self.notes, "answers"),
                "",
                machine,
                "",
            )
        )


async def soak(agent: Agent, load: Load, seconds: float, warm_s: float) -> Soak:
    """Load the agent so long, beside warming up."""
    made = Soak(agent, load)
    await made.run(seconds, warm_s)
    return made


def main() -> int:
    """Print, and save where that is asked for; exit code 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=200, help="healthy ones")
    parser.add_argument("--slow", type=int, default=20)
    parser.add_argument("--dead", type=int, default=20)
    parser.add_argument("--rate", type=float, default=2.0, help="records a second of each stream")
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{RESULT.name}")
    options = parser.parse_args()
    load = Load(options.streams, options.slow, options.dead, options.rate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "agent.toml"
        config.write_text(settings(load.all), encoding="utf-8")
        with serving(bundle(folder / f"{NAME}.tfb"), folder / "log", "--config", str(config)) as agent:
            seconds = options.minutes * 60
            made = uvloop.run(soak(agent, load, seconds * 0.9, seconds * 0.1))
            code = agent.stop()
            found = made.faults()
            found += ["there is a traceback in the log"] if "Traceback" in agent.log else []
            found += [f"the agent ended with exit code {code}"] if code else []
    text = made.report(found, measured_on(describe_machine("onnxruntime", "aiohttp", "uvloop")))
    if options.save:
        RESULT.write_text(text, encoding="utf-8")
    print(text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
