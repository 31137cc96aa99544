"""What the engine's process costs, without HTTP: `python -m bench.engine_hop [--save]`.

A hop is what the gateway does for a pass: inputs are written into the slab, `Pass` crosses the socket, the engine runs
one product over 64 numbers a row, its answers come back, and the outputs are read. Beside it, interleaved: the same
rows in this process, by `session.run` and nothing else. Then what loading and unloading leave behind: the memory of the
service (PSS of both processes) before, with, and after an engine that holds 128 MiB of weights.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import uvloop
from onnx import helper

from agent.engine.channel import Done, Layout, Load, Pass, Passed, Run, RunError, Slab
from agent.engine.host import EngineHost
from agent.memory import pss_by_kind
from bench.machine import describe_machine, measured_on
from targets.bundle import Manifest, read_manifest
from targets.tensor import Contract, DimRange, DType
from tests.support.bundles import dense, model_of, plan_of, write_bundle

RESULT = Path(__file__).parent / "results" / "engine_hop.md"
WIDTH, MOST = 64, 16
MIB = 1 << 20


def product(folder: Path, width: int, layers: int = 1) -> Path:
    """`y = x w ... w` over FP32[n,width], n up to 16, which may be put together."""
    x, y = (dense(name, DType.FLOAT32, "n", width, largest=MOST * width) for name in "xy")
    names = ["x", *(f"h{layer}" for layer in range(1, layers)), "y"]
    steps = enumerate(itertools.pairwise(names))
    nodes = [helper.make_node("MatMul", [source, f"w{at}"], [target]) for at, (source, target) in steps]
    rng = np.random.default_rng(0)
    weights = {f"w{at}": rng.standard_normal((width, width), np.float32) for at in range(layers)}
    contract = Contract((x,), (y,), {"n": DimRange(1, 1, MOST)}, "n")
    sample = {"x": np.ones((1, width), np.float32)}
    plan = plan_of(contract, MOST, sizes=[4 * layers * width * width])
    return write_bundle(folder, [model_of(nodes, [x], [y], weights)], contract, sample, plan=plan)


class Engine:
    """An engine process, and one pass at a time through it."""

    def __init__(self, bundle: Path) -> None:
        self.manifest: Manifest = read_manifest(bundle)
        self._bundle = bundle
        self.slab = Slab.create(Layout.of(self.manifest.contract, self.manifest.plan.slots))
        self._host = EngineHost(self.slab, self._replied, self._died)
        self._left = 0
        self._ended: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int:
        assert self._host.pid is not None
        return self._host.pid

    async def start(self) -> None:
        load = Load(str(self._bundle), self.manifest.digest, 1, "error", "json", ("heap",), "", sample_slot=0)
        await self._host.start(load, 60)

    async def close(self) -> None:
        await self._host.close()
        self.slab.close_fd()

    def run(self, runs: tuple[Run, ...], ended: Callable[[], None]) -> None:
        """One pass over one batch; `ended` is called when every answer is there."""
        self._left, self._ended = len(runs), ended
        self._host.send(Pass((runs,)))

    def _replied(self, reply: Passed | Done | RunError) -> None:
        if isinstance(reply, Passed):
            return
        if not isinstance(reply, Done):
            raise RuntimeError(reply.message)
        self._left -= 1
        if not self._left:
            self._ended()

    def _died(self, how: str) -> None:
        raise RuntimeError(how)


async def hops(engine: Engine, batch: int, count: int) -> list[float]:
    """Microseconds of each of so many hops, with so many requests of one row in each."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    value = np.ones((1, WIDTH), np.float32)
    data = np.frombuffer(value.tobytes(), np.uint8)
    took: list[float] = []
    started = 0

    def begin() -> None:
        nonlocal started
        started = time.perf_counter_ns()
        for slot in range(batch):
            engine.slab.input(slot, 0)[: data.nbytes] = data
        engine.run(tuple(Run(slot + 1, slot, ((1, WIDTH),), (data.nbytes,), (0,)) for slot in range(batch)), ended)

    def ended() -> None:
        for slot in range(batch):
            bytes(engine.slab.output(slot, 0)[: data.nbytes].data)
        took.append((time.perf_counter_ns() - started) / 1e3)
        if len(took) < count:
            begin()
        else:
            done.set_result(None)

    begin()
    await done
    return took


def bare(session: onnxruntime.InferenceSession, batch: int, count: int) -> list[float]:
    """Microseconds of `session.run` alone."""
    value = np.ones((batch, WIDTH), np.float32)
    took = []
    for _ in range(count):
        started = time.perf_counter_ns()
        session.run(None, {"x": value})
        took.append((time.perf_counter_ns() - started) / 1e3)
    return took


@dataclass(frozen=True)
class Figures:
    """p50 and p99 in microseconds, medians over the rounds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, rounds: list[list[float]]) -> Figures:
        ordered = [sorted(each) for each in rounds]
        return cls(
            statistics.median(each[len(each) // 2] for each in ordered),
            statistics.median(each[int(len(each) * 0.99)] for each in ordered),
        )


async def measure_hops(folder: Path, rounds: int, count: int) -> dict[int, tuple[Figures, Figures]]:
    """Requests in a pass -> (a hop, `session.run`)."""
    bundle = product(folder / "hop.tfb", WIDTH)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = bundle / "segments" / "00.onnx"
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    engine = Engine(bundle)
    await engine.start()
    seen: dict[int, tuple[list[list[float]], list[list[float]]]] = {batch: ([], []) for batch in (1, 4, MOST)}
    for _ in range(rounds):
        for batch, (through, alone) in seen.items():
            through.append(await hops(engine, batch, count))
            alone.append(bare(session, batch, count))
    await engine.close()
    return {batch: (Figures.of(through), Figures.of(alone)) for batch, (through, alone) in seen.items()}


async def measure_memory(folder: Path, times: int) -> tuple[list[int], list[int]]:
    """PSS of the service in bytes, (with an engine, after it) for each of so many loads."""
    bundle = product(folder / "large.tfb", 2048, layers=8)
    loaded, after = [], []
    for _ in range(times):
        engine = Engine(bundle)
        await engine.start()
        loaded.append(pss(os.getpid()) + pss(engine.pid))
        await engine.close()
        after.append(pss(os.getpid()))
    return loaded, after


def pss(pid: int) -> int:
    return sum(pss_by_kind(pid).values())


async def measure(rounds: int, count: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        figures = await measure_hops(Path(folder), rounds, count)
        loaded, after = await measure_memory(Path(folder), 5)
    lines = [
        "# What the engine's process costs",
        "",
        f"Medians over {rounds} interleaved rounds of {count} passes; FP32[1,{WIDTH}] times a matrix, one thread. Made "
        "by `python -m bench.engine_hop --save`.",
        "",
        "| requests in a pass | hop p50 | p99 | a request | `session.run` p50 | p99 |",
        "|---|---|---|---|---|---|",
    ]
    for batch, (hop, alone) in figures.items():
        lines.append(
            f"| {batch} | {hop.p50:.0f} us | {hop.p99:.0f} us | {hop.p50 / batch:.1f} us "
            f"| {alone.p50:.1f} us | {alone.p99:.1f} us |"
        )
    lines += [
        "",
        "A hop writes the inputs, crosses to the engine and back, and reads the outputs. The bar: p50 100 us alone, "
        "and 10 us a request where 16 are together.",
        "",
        f"Memory of the service with an engine that holds 128 MiB of weights, {len(loaded)} times loaded and unloaded: "
        f"{mib_list(loaded)} MiB with it, {mib_list(after)} MiB after it.",
        "",
        measured_on(describe_machine("onnxruntime", "uvloop", "msgspec", "numpy")),
        "",
    ]
    return "\n".join(lines)


def mib_list(sizes: list[int]) -> str:
    return ", ".join(f"{size / MIB:.0f}" for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=2000, help="passes a round")
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{RESULT.name}")
    options = parser.parse_args()
    text = uvloop.run(measure(options.rounds, options.count))
    if options.save:
        RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
