"""HTTP, ours beside other servers of models, in one interleaved run: `python -m bench.http`.

    for name in triton kserve mlserver litserve fastify; do python -m bench.rivals.$name .cache/rivals/$name; done
    python -m bench.http --rivals .cache/rivals --save                        # everything, about 15 minutes
    python -m bench.http --rivals .cache/rivals --triton-backend DIR --save   # Triton's ONNX Runtime backend too
    python -m bench.http --rounds 1 --seconds 1                               # ours alone, briefly

All serve the same ONNX file with onnxruntime on one thread. One is loaded at a time, by wrk on the same machine, at 1,
8 and 32 connections, round after round; the others are idle. Tables hold medians over the rounds. Two models: `tiny`,
one product of 64 numbers, where all that is measured is the way, and whose JSON body of 1 KB is also what a gateway is
asked for; and `mobilenet`, whose run takes about 10 ms. Ours is there twice: as it comes, and with a header that leaves
every request to aiohttp. Then records of one stream, 16 of them unanswered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from agent.load.samples import Message
from bench import http_report, wrk
from bench.http_report import AIOHTTP, NATIVE, OURS, PYTHON, STREAM, Figures, Key, Row, long_seconds, report
from bench.machine import describe_machine
from bench.rivals import fastify, kserve, litserve, mlserver, tightfit, triton
from bench.rivals.server import ANSWER_S, Server, ServerError
from bench.served_models import MOBILENET, TINY, ServedModel
from bench.streams import FRAMES, IN_FLIGHT, LINES, SETTINGS, over_stream, record_of
from bench.traffic import Target
from targets.errors import TightfitError

RESULT = Path(__file__).parent / "results" / "http.md"
CONNECTIONS = (1, 8, 32)
JSON_ONLY = ("MLServer", "LitServe")
"""Those that do not know the binary form of tensors."""
# The fast lane takes plain requests only: one with Upgrade, which nobody here follows, is left to aiohttp.
TO_AIOHTTP = {"Upgrade": "none"}
STREAMS = {http_report.FRAMES: (FRAMES, True), http_report.LINES: (LINES, False)}
_WARM_S = 1.0
_IDLE_S = 2.0
_CALLS = 200

Start = Callable[[ServedModel, Path, Path], contextlib.AbstractContextManager[Server]]
"""A server of the model in that ONNX file, with a folder for itself."""


@dataclass(frozen=True)
class Contender:
    """A server under one name; `more` are headers that its requests have beside what all have."""

    target: Target
    more: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.target.name


@dataclass
class Bench:
    """One run: where, since when, and what was found."""

    folder: Path
    figures: Figures
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """A failure inside is noted, and the run goes on."""
        try:
            yield
        except (TightfitError, OSError, RuntimeError) as error:
            self.figures.notes.append(f"{what} was not measured: {error}")
            self.say(self.figures.notes[-1])


# --- servers


def starts(rivals: Path | None, backend: Path | None, bench: Bench) -> dict[str, Start]:
    """By name, all that can be had."""
    found: dict[str, Start] = {OURS: _ours}
    if rivals is None:
        bench.figures.notes.append("no --rivals were given: ours alone")
        return found
    with bench.noting("Triton"):
        installed = triton.find(rivals / "triton")
        if backend:
            native = installed.with_native(backend)
            found[NATIVE] = functools.partial(_triton, native, triton.NATIVE)
        else:
            bench.figures.notes.append(f"{NATIVE} was not measured: no --triton-backend was given")
        found[PYTHON] = functools.partial(_triton, installed, triton.PYTHON)
    for name, serving in (
        ("KServe", kserve.serving),
        ("MLServer", mlserver.serving),
        ("LitServe", litserve.serving),
        ("fastify", fastify.serving),
    ):
        found[name] = functools.partial(serving, rivals.absolute() / name.lower())
    return found


def _ours(model: ServedModel, onnx: Path, folder: Path) -> contextlib.AbstractContextManager[Server]:
    bundle = tightfit.bundle_of(model, onnx, folder)
    return tightfit.serving([bundle], folder / "agent", SETTINGS)


def _triton(
    installed: triton.Installed, backend: str, model: ServedModel, onnx: Path, folder: Path
) -> contextlib.AbstractContextManager[Server]:
    # Without its dynamic batcher, which for models of these costs more than it gains.
    rival = triton.RivalModel(model.name, model, onnx, model.max_batch, None, backend)
    return triton.serving(installed, [rival], folder)


@contextlib.contextmanager
def served(bench: Bench, model: ServedModel, onnx: Path, ways: Mapping[str, Start]) -> Iterator[list[Contender]]:
    """Every server that started."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for name, start in ways.items():
            bench.say(f"{model.name}: starting {name}")
            with bench.noting(f"{name} with {model.name}"):
                folder = Path(tempfile.mkdtemp(dir=bench.folder))
                server = stack.enter_context(start(model, onnx, folder))
                bench.figures.starts[name, model.name] = server.start_s
                contenders.append(Contender(Target(name, server, model.name, model), {}))
                if name == OURS:
                    contenders.append(Contender(Target(AIOHTTP, server, model.name, model), TO_AIOHTTP))
        yield contenders


# --- measuring


def measure(bench: Bench, model: ServedModel, ways: Mapping[str, Start], seconds: float) -> None:
    """One model: every contender in both forms at all numbers of connections, round after round."""
    onnx = model.write(bench.folder)
    session = session_of(onnx)
    bench.figures.floor_us[model.name] = floor(session, model) * 1e6
    (expected,) = session.run(None, {"x": model.sample()})
    with served(bench, model, onnx, ways) as contenders:
        able = [(each, binary) for binary in (False, True) for each in contenders if can(each, binary)]
        checked = []
        for each, binary in able:
            form = form_of(binary)
            with bench.noting(f"{each.name} with {model.name} in {form}"):
                check(each, binary, expected)
                run_wrk(bench, each, binary, 8, _WARM_S)
                checked.append((each, binary))
        idle(bench, contenders)
        for number in range(bench.figures.rounds):
            for connections in CONNECTIONS:
                for each, binary in in_turn(checked, number):
                    form = form_of(binary)
                    what = f"{model.name}, {form}, {connections} connections, round {number + 1}: {each.name}"
                    with bench.noting(what):
                        row = run_wrk(bench, each, binary, connections, seconds)
                        bench.figures.rows.setdefault(Key(model.name, form, connections, each.name), []).append(row)
                        bench.say(f"{what}: {row.per_s:.0f}/s, {row.cpu_us:.0f} us {row.errors or ''}")
            if model is TINY:
                stream(bench, contenders[0], seconds)
        for each, _ in checked:
            bench.figures.memory[each.name, model.name] = each.target.server.pss()


def run_wrk(bench: Bench, each: Contender, binary: bool, connections: int, seconds: float) -> Row:
    """One run of wrk against a server that is awake."""
    server, message = each.target.server, each.target.message(binary=binary)
    before = server.cpu_seconds()
    counted = wrk.load(server, message, bench.folder / "body", connections, seconds, each.more)
    cpu_us = (server.cpu_seconds() - before) / max(counted.requests, 1) * 1e6
    return Row(counted.per_s, counted.p50_us, counted.p99_us, cpu_us, Counter(counted.errors))


def idle(bench: Bench, contenders: Sequence[Contender]) -> None:
    """What they take while nobody asks, of which the one that is loaded is robbed."""
    before, began = [each.target.server.cpu_seconds() for each in contenders], time.monotonic()
    time.sleep(_IDLE_S)
    took = time.monotonic() - began
    for each, seconds in zip(contenders, before, strict=True):
        share = (each.target.server.cpu_seconds() - seconds) / took
        bench.figures.idle[each.name, each.target.model.name] = share


def stream(bench: Bench, ours: Contender, seconds: float) -> None:
    """Records of one stream, by both framings."""
    server, model = ours.target.server, ours.target.model.name
    for framing, (content_type, binary) in STREAMS.items():
        with bench.noting(f"a stream of {framing}"):
            record = record_of(ours.target.message(binary=binary), content_type)
            before = server.cpu_seconds()
            per_s = over_stream(server, model, content_type, record, IN_FLIGHT, seconds)
            cpu_us = (server.cpu_seconds() - before) / (per_s * seconds) * 1e6
            row = Row(per_s, float("nan"), float("nan"), cpu_us, Counter())
            bench.figures.rows.setdefault(Key(model, framing, 1, STREAM), []).append(row)


def can(each: Contender, binary: bool) -> bool:
    return not (binary and each.name in JSON_ONLY)


def form_of(binary: bool) -> str:
    return "binary" if binary else "JSON"


def in_turn(able: Sequence[tuple[Contender, bool]], number: int) -> Sequence[tuple[Contender, bool]]:
    """Another one first in each round."""
    first = number * len(able) // 3 % max(len(able), 1)
    return [*able[first:], *able[:first]]


def check(each: Contender, binary: bool, expected: np.ndarray[Any, Any]) -> None:
    """Raises ServerError where a server does not answer what onnxruntime does."""
    body = answer_of(each.target.server, each.target.message(binary=binary), each.more)
    if binary:
        found = np.frombuffer(body[-expected.nbytes :], np.float32)
    else:
        found = np.array(json.loads(body)["outputs"][0]["data"], np.float32).ravel()
    if found.shape != expected.ravel().shape or not np.allclose(found, expected.ravel(), rtol=1e-3, atol=1e-4):
        raise ServerError(f"it answers {found[:3]}, onnxruntime {expected.ravel()[:3]}")


def answer_of(server: Server, message: Message, more: Mapping[str, str]) -> bytes:
    """The body of an answer of status 200. Raises ServerError."""
    request = urllib.request.Request(  # noqa: S310 - http, on this machine
        server.address + message.path, message.body, {**message.headers, **more}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise ServerError(f"{error.code} {error.read(200).decode(errors='replace')}") from None


def session_of(onnx: Path) -> onnxruntime.InferenceSession:
    """onnxruntime in this process, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(onnx), options, providers=["CPUExecutionProvider"])


def floor(session: onnxruntime.InferenceSession, model: ServedModel) -> float:
    """Seconds of one run, the median."""
    x, took = {"x": model.sample()}, []
    for _ in range(_CALLS):
        began = time.perf_counter()
        session.run(None, x)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


# --- command line


def versions(backend: Path | None, machine: Mapping[str, str]) -> dict[str, str]:
    """What each is, for the reader."""
    inside = f"onnxruntime {machine['onnxruntime']}"
    described = {
        OURS: f"the agent with its defaults: requests of one row, a batch axis, {tightfit.SLOTS} slots; {inside}",
        AIOHTTP: "the same server, every request with a header that the fast lane leaves to aiohttp",
        PYTHON: f"2.51 ({triton.WHEEL}), its Python backend; {inside}",
        "KServe": f"{kserve.WANTED}, its Python server; {inside}",
        "MLServer": f"{mlserver.WANTED}, no parallel workers; {inside}; no binary form of tensors",
        "LitServe": f"{litserve.WANTED}, one worker; {inside}; JSON alone",
        "fastify": " and ".join(re.sub("@", " ", each) for each in fastify.WANTED),
    }
    if backend:
        described[NATIVE] = "2.51, its ONNX Runtime backend, built from the sources of its release; one instance"
    return described


def main() -> int:
    """Measure and print; exit code 2 and one line where nothing could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", type=Path, metavar="DIR", help="folder of triton, kserve, ..., as they were made")
    parser.add_argument("--triton-backend", type=Path, metavar="DIR", help="folder of Triton's ONNX Runtime backend")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2, help="of each figure of a round; half more for mobilenet")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name} to bench/results")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds < 1:
        parser.error("--rounds and --seconds: at least 1")
    try:
        wrk.find()
        with tempfile.TemporaryDirectory(prefix="tightfit-http-") as name:
            bench = Bench(Path(name), Figures(options.rounds, options.seconds))
            machine = describe_machine("onnxruntime", "aiohttp", "uvloop")
            machine["load average before"] = f"{os.getloadavg()[0]:.1f}"
            ways = starts(options.rivals, options.triton_backend, bench)
            for model, seconds in ((TINY, options.seconds), (MOBILENET, long_seconds(options.seconds))):
                measure(bench, model, ways, seconds)
            bench.say("done")
    except TightfitError as error:
        print(f"bench.http: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench.http: stopped", file=sys.stderr)
        return 130
    known = versions(options.triton_backend, machine)
    named = {name: known[name] for name in (OURS, AIOHTTP, *ways) if name in known}
    text = report(bench.figures, machine, named)
    print(text)
    if options.save:
        RESULT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
