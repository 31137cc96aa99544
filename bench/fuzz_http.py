"""A million wrong requests through both lanes of the agent: `python -m bench.fuzz_http`.

    python -m bench.fuzz_http --requests 1000000 --save   # writes bench/results/fuzz_http.md
    python -m bench.fuzz_http --seed 7 --requests 20000   # others, and fewer
    python -m bench.fuzz_http --seed 7 --cases 120-127    # those again, on one connection of each lane, and what came

Half of the cases are valid requests whose bytes were changed, half are written by a grammar that slips
(`bench.http_cases`). They go out eight to a connection, and behind each goes a marked good request, of which only one
answer is right. Each connection is made twice: on one the first case is what it begins with, so that the fast lane
takes what it takes; on the other a GET comes first, which makes it aiohttp's for good. Both count as requests.

Wrong is: a 5xx that nobody asked for with a deadline; a good request that is not answered with exactly its own answer,
though what came before it ended where it should; an answer to a request that stood within a body; lanes that answer
differently, or of which only one closes; a connection that is not closed behind a FIN; an agent or engine that ended;
a traceback in the log; descriptors, slots or memory that are not given back. Where something is wrong, or a connection
was slow, it is asked again at the end, with patience: what then is as it should be was the machine's fault.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.http_cases import CHAIN, MODELS, SMUGGLED, Case, case_of, good
from bench.http_mutants import FIRST
from bench.machine import describe_machine, measured_on
from bench.soak import MIB, Process
from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving

RESULT = Path(__file__).parent / "results" / "fuzz_http.md"
LANES = {"fast lane": b"", "aiohttp": FIRST}
"""What a connection begins with."""
PAIRS = 64
"""Connections of each lane at once."""
# Of each model. A request whose body does not come holds one, until its connection is given up.
SLOTS = 48
# How long nothing has to come before what came is taken for all: under load, and to judge again.
QUIET_S, PATIENT_S = 0.4, 2.0
# A connection that is not closed so long after a FIN is not going to be.
HANGS_S = 30.0
# What is allowed to stay of the second half of a run: allocators round up.
GROWTH_BYTES, GROWTH = 4 * MIB, 0.03
# A slow machine makes many suspicious; so many are asked again, so many at once.
MOST_SUSPECTS, AGAIN = 5000, 4
SETTINGS = """
[http]
connections = 1024
[requests]
queue_length = 512
[streams]
most = 512
"""


# --- answers


class MalformedError(ValueError):
    """What came is not a sequence of answers."""


class Answer(NamedTuple):
    """One answer, without what differs from moment to moment: its head without the date, its body without chunks."""

    status: int
    head: bytes
    body: bytes

    @property
    def is_final(self) -> bool:
        return self.status >= 200

    @property
    def closes(self) -> bool:
        return b"\r\nconnection: close" in self.head.lower() or self.head.startswith(b"HTTP/1.0")


def answers_in(data: bytes, bodiless: bool = False) -> list[Answer]:
    """All that `data` consists of; `bodiless` where it answers a HEAD. Raises MalformedError where it is cut off, or
    is something else."""
    found = []
    while data:
        head, blank, rest = data.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.[01] (\d{3}) [ -~]*(?:\r\n|\Z)", head)
        if not blank or status is None:
            raise MalformedError(f"no answer: {data[:100]!r}")
        code = int(status[1])
        fields = head.lower()
        length = re.search(rb"\r\ncontent-length: (\d+)", fields)
        if bodiless or code < 200 or code == 204:
            body = b""
        elif length is not None:
            body, rest = rest[: int(length[1])], rest[int(length[1]) :]
            if len(body) < int(length[1]):
                raise MalformedError(f"an answer that is cut off: {data[:100]!r}")
        elif b"\r\ntransfer-encoding: chunked" in fields:
            body, rest = _dechunked(rest)
        else:
            body, rest = rest, b""
        found.append(
            Answer(code, re.sub(rb"\r\nDate: [^\r]*", b"", head), _timeless(body, b"tightfit.frames" in fields))
        )
        data = rest
    return found


def _answers_to(case: Case, segment: bytes) -> tuple[Answer, ...]:
    """What came for a case. That to a HEAD has no body, unless its head was none that could be read."""
    if b"HEAD " in case.data[:40]:
        with contextlib.suppress(MalformedError):
            return tuple(answers_in(segment, bodiless=True))
    return tuple(answers_in(segment))


def _timeless(body: bytes, frames: bool) -> bytes:
    """Records of a stream without how long each took, and where they are frames, how long each is."""
    body = re.sub(rb'_us":\d+', b'_us":0', body)
    return re.sub(rb'.{8}(?={"type":")', b"", body, flags=re.DOTALL) if frames else body


def _dechunked(data: bytes) -> tuple[bytes, bytes]:
    """(body, what follows it)."""
    body = b""
    while True:
        size, blank, data = data.partition(b"\r\n")
        if not blank or not re.fullmatch(rb"[0-9a-f]+", size):
            raise MalformedError(f"chunks that are cut off behind {body[-100:]!r}")
        length = int(size, 16)
        if data[length : length + 2] != b"\r\n":
            raise MalformedError(f"a chunk that is cut off: {data[:100]!r}")
        body, data = body + data[:length], data[length + 2 :]
        if not length:
            return body, data


def expected(template: bytes, number: int) -> bytes:
    """The answer to `good(number)`, made from that to `good(0)`; both without dates."""
    value = number % 9000 + 1000
    return template.replace(b"g00000000", b"g%08d" % number).replace(b"[1000.0]", b"[%d.0]" % value)


# --- one connection


class Reply(NamedTuple):
    """What came back, without dates; whether the agent closed, and whether it did at last behind a FIN."""

    data: bytes
    closed: bool
    ended: bool


class _Client(asyncio.Protocol):
    """Takes what comes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.came = asyncio.Event()
        self.closed = False

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.came.set()

    def eof_received(self) -> bool:
        self.closed = True
        self.came.set()
        return False

    def connection_lost(self, _: Exception | None) -> None:
        self.closed = True
        self.came.set()


async def exchange(port: int, pieces: Sequence[bytes], quiet_s: float) -> Reply:
    """Send the pieces on a connection, and take what comes until it is closed, or nothing more comes: then send FIN."""
    transport, client = await asyncio.get_running_loop().create_connection(_Client, "127.0.0.1", port)
    try:
        for at, piece in enumerate(pieces):
            if at:
                await asyncio.sleep(0.001)
            if client.closed:
                break
            transport.write(piece)
        await _until_closed(client, quiet_s)
        closed = client.closed
        if not closed:
            transport.write_eof()
            await _until_closed(client, HANGS_S)
        return Reply(re.sub(rb"\r\nDate: [^\r]*", b"", b"".join(client.parts)), closed, client.closed)
    finally:
        transport.abort()


async def _until_closed(client: _Client, quiet_s: float) -> None:
    """Until then, or until nothing came for so long."""
    while not client.closed:
        client.came.clear()
        try:
            await asyncio.wait_for(client.came.wait(), quiet_s)
        except (TimeoutError, asyncio.TimeoutError):
            return


def pieces_of(cases: Sequence[Case], first: bytes) -> list[bytes]:
    """A chain as it is sent: behind each case a good request, of which the last closes the connection."""
    pieces, piece = [], first
    for case in cases:
        start = 0
        for cut in case.cuts:
            pieces.append(piece + case.data[start:cut])
            piece, start = b"", cut
        piece += case.data[start:] + good(case.number, last=case is cases[-1])
    return [*pieces, piece]


# --- judging


@dataclass(frozen=True)
class Told:
    """What a reply says of a chain: how many of its cases it was about, the answers to each, and what is wrong."""

    cases: int
    answers: tuple[tuple[Answer, ...], ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Judge:
    """Knows the answers to good requests: to one, to the last of a connection, and to the GET before all."""

    template: bytes
    last_template: bytes
    first: bytes

    def told(self, cases: Sequence[Case], reply: Reply, begins_with_first: bool) -> Told:
        """Read a reply. Good answers stand between those to cases, and nothing else does."""
        data, wrong = reply.data, []
        if begins_with_first:
            if not data.startswith(self.first):
                return Told(len(cases), (), (f"the GET was not answered: {data[:200]!r}",))
            data = data[len(self.first) :]
        told: list[tuple[Answer, ...]] = []
        reached = 0
        for case, segment, answered, clean in self._segments(cases, data):
            try:
                answers = _answers_to(case, segment)
            except MalformedError as error:
                # Of bytes that were changed nobody knows which request has the answer, and whether that was a HEAD.
                if case.framed or b"HEAD" not in case.data:
                    wrong.append(f"case {case.number} ({case.kind}): {error}")
                answers = (Answer(0, b"", segment),)
            told.append(answers)
            wrong += self._of_one(case, answers, answered, clean, reply.closed)
            reached = len(told) if answered else reached
        if not reply.ended:
            wrong.append("not closed behind a FIN")
        # Behind one whose good request was not answered nothing can be told of the next ones.
        return Told(min(reached + 1, len(cases)), tuple(told), tuple(wrong))

    def _segments(self, cases: Sequence[Case], data: bytes) -> Iterator[tuple[Case, bytes, bool, bool]]:
        """(case, what came for it, whether its good request was answered, whether that before it was). What came for
        some that swallowed their good requests cannot be told apart: it is the last one's."""
        at, clean = 0, True
        waiting: list[Case] = []
        for case in cases:
            answer = expected(self.last_template if case is cases[-1] else self.template, case.number)
            found = data.find(answer, at)
            waiting.append(case)
            if found < 0:
                continue
            for early in waiting[:-1]:
                yield early, b"", False, clean
                clean = False
            yield case, data[at:found], True, clean
            at, clean = found + len(answer), True
            waiting.clear()
        if waiting:
            yield waiting[0], data[at:], False, clean

    def _of_one(
        self, case: Case, answers: Sequence[Answer], answered: bool, clean: bool, closed: bool
    ) -> Iterator[str]:
        """What is wrong with the answers to a case. `answered`: so was the good request behind it; `clean`: and that
        before it."""
        name = f"case {case.number} ({case.kind})"
        for answer in answers:
            if answer.status >= 500 and not (case.may_be_late and answer.status in (503, 504)):
                yield f"{name}: {answer.status} {answer.body[:200]!r}"
            if b'"status":500' in answer.body:
                yield f"{name}: a record of 500 {answer.body[:200]!r}"
            if case.framed and f'"id":"{SMUGGLED}"'.encode() in answer.body:
                yield f"{name}: a request within it was answered"
        if not (case.framed and clean):
            return
        finals = [answer for answer in answers if answer.is_final]
        if len(finals) != 1:
            yield f"{name}: {len(finals)} answers"
        elif not answered and not (finals[0].closes or (closed and b"/stream" in case.data[:600])):
            yield f"{name}: it was answered {finals[0].status}, and what follows it was not"


class Finding(NamedTuple):
    """Cases, sent on one connection of each lane, of which something is wrong."""

    cases: tuple[Case, ...]
    wrong: tuple[str, ...]
    replies: tuple[Reply, ...]

    def __str__(self) -> str:
        first, last = self.cases[0].number, self.cases[-1].number
        return f"--cases {first}-{last}: " + "; ".join(self.wrong)


# --- the run


@dataclass
class Fuzz:
    """Sends cases to an agent and keeps what is wrong. `sent` counts cases, each of which goes through both lanes."""

    port: int
    seed: int
    judge: Judge
    sent: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    suspects: list[tuple[Case, ...]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    async def run(self, first: int, count: int, progress: Callable[[Fuzz], None]) -> None:
        """Cases from `first` on, all of a chain on one connection."""
        chains = iter(range(first, first + count, CHAIN))
        started, before = time.monotonic(), self.seconds
        workers = [asyncio.ensure_future(self._work(chains, first + count)) for _ in range(PAIRS)]
        while not all(worker.done() for worker in workers):
            await asyncio.wait(workers, timeout=10)
            self.seconds = before + time.monotonic() - started
            progress(self)
        await asyncio.gather(*workers)

    async def _work(self, chains: Iterator[int], end: int) -> None:
        for start in chains:
            cases = [case_of(self.seed, number) for number in range(start, min(start + CHAIN, end))]
            while cases:
                done = await self._chain(tuple(cases))
                del cases[:done]
            if len(self.suspects) > MOST_SUSPECTS:
                return

    async def _chain(self, cases: tuple[Case, ...]) -> int:
        """How many of them were dealt with."""
        told, wrong, _ = await self._ask(cases, QUIET_S)
        done = cases[: told.cases]
        self.sent += len(done)
        for case, answers in zip(done, told.answers, strict=False):
            self.kinds[case.kind] += 1
            self.statuses[case.kind, " ".join([str(each.status) for each in answers]) or "nothing"] += 1
        if wrong:
            self.suspects.append(cases)
        return len(done)

    async def _ask(self, cases: tuple[Case, ...], quiet_s: float) -> tuple[Told, list[str], tuple[Reply, ...]]:
        replies = await asyncio.gather(
            *[exchange(self.port, pieces_of(cases, first), quiet_s) for first in LANES.values()]
        )
        told = [
            self.judge.told(cases, reply, begins_with_first=bool(first))
            for reply, first in zip(replies, LANES.values(), strict=True)
        ]
        wrong = [f"{lane}: {each}" for lane, one in zip(LANES, told, strict=True) for each in one.wrong]
        if told[0].answers != told[1].answers or replies[0].closed != replies[1].closed:
            wrong.append("the lanes differ")
        return told[0], wrong, tuple(replies)

    async def look_again(self) -> None:
        """Judge what was suspicious, with patience, and with little beside it."""
        waiting = iter(self.suspects)
        await asyncio.gather(*[self._look_again(waiting) for _ in range(AGAIN)])
        if len(self.suspects) > MOST_SUSPECTS:
            self.findings.append(
                Finding(self.suspects[-1], ("from here on nothing was sent: too much is suspicious",), ())
            )

    async def _look_again(self, waiting: Iterator[tuple[Case, ...]]) -> None:
        for cases in waiting:
            for _ in range(3):
                _, wrong, replies = await self._ask(cases, PATIENT_S)
                if not wrong:
                    break
            else:
                self.findings.append(Finding(cases, tuple(wrong), replies))


async def judge_of(port: int) -> Judge:
    """Ask what the answers to good requests are."""
    first = (await exchange(port, [FIRST], 1.0)).data
    one = (await exchange(port, [good(0)], 1.0)).data
    last = (await exchange(port, [good(0, last=True)], 1.0)).data
    for answer in (first, one, last):
        if not answer.startswith(b"HTTP/1.1 200 OK\r\n"):
            raise SystemExit(f"a good request is not answered: {answer!r}")
    return Judge(one, last, first)


@dataclass(frozen=True)
class State:
    """What the agent holds while nobody asks."""

    gateway: Process
    engines: tuple[Process, ...]
    pids: tuple[int, ...]
    held: dict[str, float]

    @classmethod
    def of(cls, agent: Agent) -> State:
        names = ("tightfit_in_flight", "tightfit_door_depth", "tightfit_queue_depth", "tightfit_streams",
                 "tightfit_lane_connections", "tightfit_engine_restarts_total")  # fmt: skip
        pids = tuple(agent.engine_pids)
        held = {name: agent.metric(name) for name in names}
        return cls(Process.of(agent.process.pid), tuple(Process.of(pid) for pid in pids), pids, held)


def leaks(before: State, after: State) -> list[str]:
    """What was not given back between two quiet moments."""
    found = [f"{name} is {value:g}" for name, value in after.held.items() if value]
    if after.pids != before.pids:
        return [*found, "an engine was started again"]
    pairs = {"the gateway": (before.gateway, after.gateway)}
    pairs |= {f"engine {at}": pair for at, pair in enumerate(zip(before.engines, after.engines, strict=True))}
    for name, (was, now) in pairs.items():
        if now.rss - was.rss > max(GROWTH_BYTES, GROWTH * was.rss):
            found.append(f"{name} grew from {was.rss / MIB:.1f} to {now.rss / MIB:.1f} MiB")
        # A connection that was just closed may be among them.
        if now.descriptors > was.descriptors + 2:
            found.append(f"{name} has {now.descriptors} descriptors, {was.descriptors} before")
        if now.threads > was.threads + 1:
            found.append(f"{name} has {now.threads} threads, {was.threads} before")
    return found


async def fuzz(
    agent: Agent, seed: int, requests: int, progress: Callable[[Fuzz], None]
) -> tuple[Fuzz, list[str], tuple[State, State]]:
    """(the run, what is wrong beside its findings, what the agent held after half of it and at its end)."""
    made = Fuzz(agent.port, seed, await judge_of(agent.port))
    cases = requests // len(LANES)
    half = cases // 2 // CHAIN * CHAIN
    await made.run(0, half, progress)
    middle = await _quiet(agent)
    await made.run(half, cases - half, progress)
    end = await _quiet(agent)
    await made.look_again()
    wrong = leaks(middle, end)
    if "Traceback" in agent.log:
        wrong.append("there is a traceback in the log")
    return made, wrong, (middle, end)


async def _quiet(agent: Agent) -> State:
    """What it holds when everything of clients that left has ended, or after a while."""
    for _ in range(100):
        state = await asyncio.to_thread(State.of, agent)
        if not any(state.held.values()):
            break
        await asyncio.sleep(0.1)
    return state


@contextlib.contextmanager
def fuzzed(folder: Path) -> Iterator[Agent]:
    """An agent with `MODELS`."""
    bundles.adding(folder / "adding.tfb", SLOTS)
    for name, (kind, shape) in MODELS.items():
        if name != "adding":
            bundles.identity(folder / f"{name}.tfb", next(each for each in DType if each.oip == kind), shape, SLOTS)
    models = "".join(f'[[models]]\nbundle = "{folder / name}.tfb"\n' for name in MODELS)
    (folder / "agent.toml").write_text(SETTINGS + models)
    with serving(None, folder / "log", "--config", str(folder / "agent.toml")) as agent:
        yield agent


# --- the report


def report(made: Fuzz, wrong: Sequence[str], states: tuple[State, State], machine: str) -> str:
    """Markdown."""
    requests = made.sent * len(LANES)
    middle, end = states
    lines = [
        "# Wrong requests",
        "",
        f"{requests:,} wrong requests by `python -m bench.fuzz_http --seed {made.seed}` in "
        f"{made.seconds / 60:.1f} minutes ({requests / max(made.seconds, 1e-9):,.0f} a second): {made.sent:,} cases, "
        "each through both lanes, and behind each a good request, of which exactly one answer is right.",
        "",
        "Nothing was wrong." if not (wrong or made.findings) else f"**{len(made.findings) + len(wrong)} findings.**",
        *[f"- {each}" for each in (*wrong, *made.findings)],
        "",
        f"{len(made.suspects)} connections were asked again, with patience.",
        "",
        "| kind | cases | answered most often |",
        "|---|---|---|",
    ]
    for kind, count in sorted(made.kinds.items()):
        of_kind = Counter({status: number for (name, status), number in made.statuses.items() if name == kind})
        often = ", ".join(f"{status} ({number / count:.1%})" for status, number in of_kind.most_common(6))
        lines.append(f"| {kind} | {count:,} | {often} |")
    lines += ["", "| held while nobody asks | after half of it | at the end |", "|---|---|---|"]
    held: tuple[tuple[str, Callable[[State], str]], ...] = (
        ("gateway, RSS", lambda state: f"{state.gateway.rss / MIB:.1f} MiB"),
        ("engines, RSS", lambda state: f"{sum(each.rss for each in state.engines) / MIB:.1f} MiB"),
        ("gateway, descriptors", lambda state: str(state.gateway.descriptors)),
        ("slots, queues, streams and connections", lambda state: f"{sum(state.held.values()):g}"),
    )
    lines += [f"| {what} | {read(middle)} | {read(end)} |" for what, read in held]
    return "\n".join((*lines, "", machine, ""))


def show(made: Fuzz) -> None:
    """A line of progress."""
    requests = made.sent * len(LANES)
    rate = requests / max(made.seconds, 1e-9)
    print(
        f"{made.seconds:6.0f} s {requests:9,} requests, {rate:6,.0f}/s, {len(made.suspects)} to ask again", flush=True
    )


async def replay(port: int, seed: int, cases: Sequence[int]) -> bool:
    """Send them again and print all that goes out and comes back; whether nothing is wrong."""
    made = Fuzz(port, seed, await judge_of(port))
    chain = tuple(case_of(seed, number) for number in cases)
    _, wrong, replies = await made._ask(chain, PATIENT_S)
    for case in chain:
        print(f"{case.number} ({case.kind}{', framed' if case.framed else ''}) {case.data!r} {case.cuts or ''}")
    for lane, reply in zip(LANES, replies, strict=True):
        print(f"--- {lane}: {'closed' if reply.closed else 'left open'}\n{reply.data.decode('latin-1')}")
    print("\n".join(wrong) or "nothing is wrong")
    return not wrong


def _range(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> int:
    """0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="through both lanes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=_range, help="FIRST-LAST: only these, on one connection")
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fuzzed(Path(folder)) as agent:
        if options.cases:
            return not uvloop.run(replay(agent.port, options.seed, options.cases))
        made, wrong, states = uvloop.run(fuzz(agent, options.seed, options.requests, show))
        code = agent.stop()
        wrong += [f"the agent ended with exit code {code}"] if code else []
    text = report(made, wrong, states, measured_on(describe_machine("aiohttp", "uvloop", "onnxruntime")))
    if options.save:
        RESULT.write_text(text, encoding="utf-8")
    print(text)
    return bool(wrong or made.findings)


if __name__ == "__main__":
    sys.exit(main())
