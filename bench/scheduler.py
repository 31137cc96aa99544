"""The agent's scheduler beside a real Triton Inference Server, over HTTP, in one run: `python -m bench.scheduler`.

    python -m bench.rivals.triton .cache/triton                    # once: the rival, in an environment of its own
    python -m bench.scheduler --triton .cache/triton --save        # everything, about 20 minutes
    python -m bench.scheduler --triton .cache/triton --short       # everything, briefly: does it work?
    python -m bench.scheduler --only flood --only reload           # ours alone, some scenarios

Five servers of the same ONNX file, each with one thread in onnxruntime: ours as it comes, ours with a bundle that has
no batch axis, and Triton's Python backend with a fixed batch or a delay, with a largest batch of one, and with dynamic
batching; the last two with priority levels and timeouts. They are measured in turn, round after round, by the same
clients on the same machine; tables hold the medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bench import scenarios
from bench.machine import describe_machine
from bench.rivals import tightfit, triton
from bench.rivals.server import Server, ServerError
from bench.scenarios import Figures
from bench.scheduler_report import report
from bench.served_models import DENSE, MOBILENET, TINY, ServedModel
from bench.traffic import Target
from targets.errors import TightfitError

RESULTS = Path(__file__).parent / "results" / "scheduler"
LOADS = (0.5, 0.8, 0.95, 1.2, 2.0)
DEADLINE_PASSES = 10
"""The deadline of requests at a load, in times of one request alone."""
SCENARIOS = ("load", "flood", "idle", "abandon", "overhead", "reload", "fault")
OURS, UNBATCHED = "ours", "ours, no batching"
FIXED, ONE, DYNAMIC = "Triton, fixed", "Triton, batch 1", "Triton, dynamic"
PLAIN = "Triton, plain"
RIVALS = (FIXED, ONE, DYNAMIC)
DELAY_US = 10_000
# A request's own timeout counts where it is shorter than the default one, and never where there is no default.
_POLICY = """\
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy {
    timeout_action: REJECT
    default_timeout_microseconds: 30000000
    allow_timeout_override: true
  }
"""
# A hang is to be noticed within the time that is measured; the default suits models that take seconds.
_HANG = "[engine]\nhang_s = 1.0\nrestarts = 20\n"


@dataclass(frozen=True)
class Effort:
    """How long everything is measured, in seconds or calls of each round."""

    rounds: int = 3
    capacity_s: float = 2.0
    load_s: float = 3.0
    flood_s: float = 4.0
    tries: int = 40
    calls: int = 150
    reloads: int = 50
    steady_s: float = 5.0
    killed_s: float = 5.0
    stopped_s: float = 7.0


SHORT = Effort(
    rounds=1, capacity_s=1.0, load_s=1.0, flood_s=1.5, tries=30, calls=50, reloads=3, steady_s=1.0, killed_s=4.0
)


@dataclass
class Bench:
    """What a run needs everywhere; `figures` is scenario -> row -> values, `notes` are lines for the reader."""

    effort: Effort
    folder: Path
    installed: triton.Installed | None
    only: Sequence[str]
    began: float = field(default_factory=time.monotonic)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Progress, for people who wait."""
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        print(f"[{minutes:2}:{seconds:02}] {line}", file=sys.stderr, flush=True)

    def wants(self, scenario: str) -> bool:
        """Whether it was asked for."""
        return not self.only or scenario in self.only

    @contextlib.contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """What fails in here is told in one line, and the rest is measured."""
        try:
            yield
        except (TightfitError, OSError, RuntimeError) as error:
            self.notes.append(f"{what} was not measured: {' '.join(str(error).split())[:300]}")
            self.say(self.notes[-1])

    @contextlib.contextmanager
    def own_folder(self) -> Iterator[Path]:
        """A new folder for a server."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            yield Path(name)


# --- servers

Start = Callable[[Path], contextlib.AbstractContextManager[Server]]
"""Starts a server that has this folder for itself."""


@contextlib.contextmanager
def served(bench: Bench, model: ServedModel) -> Iterator[list[Target]]:
    """All servers of a model, each with an answer that was compared with onnxruntime's. The last is Triton at its
    quickest, for one request at a time."""
    onnx = model.write(bench.folder)
    with contextlib.ExitStack() as stack:
        targets = []
        for name, batched in ((OURS, True), (UNBATCHED, False)):
            folder = stack.enter_context(bench.own_folder())
            bench.say(f"{model.name}: compiling for {name}")
            bundle = tightfit.bundle_of(model, onnx, folder, batched)
            server = stack.enter_context(tightfit.serving([bundle], folder / "agent"))
            targets.append(Target(name, server, model.name, model))
        if bench.installed:
            bench.say(f"{model.name}: starting Triton")
            largest = model.max_batch
            fixed = f"preferred_batch_size: [ {largest} ] max_queue_delay_microseconds: {DELAY_US}"
            ways = {FIXED: (largest, fixed), ONE: (1, _POLICY), DYNAMIC: (largest, _POLICY), PLAIN: (1, None)}
            paths = {name: f"{model.name}-{number}" for number, name in enumerate(ways)}
            rivals = [triton.RivalModel(paths[name], model, onnx, *way) for name, way in ways.items()]
            folder = stack.enter_context(bench.own_folder())
            server = stack.enter_context(triton.serving(bench.installed, rivals, folder))
            targets += [Target(name, server, paths[name], model) for name in ways]
        for target in targets:
            check(target, onnx)
        yield targets


def check(target: Target, onnx: Path) -> None:
    """Raises ServerError when a server does not answer what onnxruntime does."""
    (expected,) = runtime_of(onnx).run(None, {"x": target.model.sample()})
    with scenarios.asking(target) as ask:
        answer = ask()
    found = np.frombuffer(answer[-expected.nbytes :], np.float32).reshape(expected.shape)
    if not np.allclose(found, expected, rtol=1e-3, atol=1e-4):
        raise ServerError(f"{target.name} answers {found.ravel()[:3]}, onnxruntime {expected.ravel()[:3]}")


@functools.cache
def runtime_of(onnx: Path) -> Any:
    """onnxruntime in this process, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(onnx), options, providers=["CPUExecutionProvider"])


def pass_seconds(model: ServedModel, onnx: Path) -> dict[int, float]:
    """Seconds of onnxruntime's run by rows, medians."""
    session, sizes = runtime_of(onnx), {1, 2, 4, 8, model.max_batch}
    took = {}
    for rows in sorted(sizes):
        x = {"x": model.sample(rows)}
        seconds = scenarios.take_turns({"run": lambda x=x: session.run(None, x)}, 10, 10)["run"]  # type: ignore[misc]
        took[rows] = statistics.median(seconds)
    return took


# --- measuring, in rounds


def measure_model(bench: Bench, model: ServedModel, stressed: bool) -> None:
    """Loads, and with `stressed` the scenarios of one model."""
    with served(bench, model) as servers:
        targets = [target for target in servers if target.name != PLAIN]
        costs = pass_seconds(model, bench.folder / f"{model.name}.onnx")
        bench.figures.setdefault("pass_ms", {})[model.name] = {rows: s * 1e3 for rows, s in costs.items()}
        if stressed:
            if bench.wants("idle"):
                # First, when all that a server knows is from its start.
                per_target(bench, "idle", targets, lambda each: scenarios.idle(each, costs[1], bench.effort.tries))
            if bench.wants("overhead"):
                overhead(bench, [target for target in servers if target.name in (OURS, PLAIN)])
            if bench.wants("abandon"):
                per_target(bench, "abandon", targets, scenarios.abandon)
            if bench.wants("flood"):
                per_target(bench, "flood", targets, lambda each: scenarios.flood(each, costs[1], bench.effort.flood_s))
        if bench.wants("load"):
            loads(bench, model, targets, DEADLINE_PASSES * costs[1])


def per_target(bench: Bench, scenario: str, targets: Sequence[Target], measure: Callable[[Target], Figures]) -> None:
    """A scenario with each target in turn, round after round."""
    seen: dict[str, list[Figures]] = {target.name: [] for target in targets}
    for number in range(bench.effort.rounds):
        for target in in_turn(targets, number):
            bench.say(f"{scenario}, round {number + 1} of {bench.effort.rounds}: {target.name}")
            with bench.noting(f"{scenario} of {target.name}"):
                seen[target.name].append(measure(target))
    bench.figures[scenario] = {name: medians(rounds) for name, rounds in seen.items() if rounds}


def loads(bench: Bench, model: ServedModel, targets: Sequence[Target], deadline_s: float) -> None:
    """Goodput at shares of the capacity, which is the most that any of the servers answered in closed loop."""
    capacities = {}
    for target in targets:
        bench.say(f"{model.name}, capacity: {target.name}")
        capacities[target.name] = scenarios.capacity(target, bench.effort.capacity_s)
    most = max(capacities.values())
    seen: dict[tuple[float, str], list[Figures]] = {}
    why: dict[tuple[float, str], Counter[str]] = {}
    for number in range(bench.effort.rounds):
        for load in LOADS:
            for target in in_turn(targets, number):
                bench.say(
                    f"{model.name} at {load:.0%} ({load * most:.0f}/s), "
                    f"round {number + 1} of {bench.effort.rounds}: {target.name}"
                )
                with bench.noting(f"{model.name} at {load:.0%} of {target.name}"):
                    figures, reasons = scenarios.at_load(target, load * most, deadline_s, bench.effort.load_s, number)
                    seen.setdefault((load, target.name), []).append(figures)
                    why.setdefault((load, target.name), Counter()).update(reasons)
    rows = [
        {"load": load, "server": name, **medians(rounds), "all_requests": sum(r["requests"] for r in rounds),
         "reasons": dict(why[load, name])}
        for (load, name), rounds in seen.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (row["load"], [OURS, UNBATCHED, *RIVALS].index(str(row["server"]))))
    found = {"capacities": capacities, "capacity": most, "deadline_ms": deadline_s * 1e3, "rows": rows}
    bench.figures.setdefault("load", {})[model.name] = found


def overhead(bench: Bench, targets: Sequence[Target]) -> None:
    """One request after the other: the targets, and onnxruntime in this process."""
    model = targets[0].model
    session, x = runtime_of(bench.folder / f"{model.name}.onnx"), {"x": model.sample()}
    rounds = []
    with contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[], object]] = {"session.run": lambda: session.run(None, x)}
        ways |= {target.name: stack.enter_context(scenarios.asking(target)) for target in targets}
        for number in range(bench.effort.rounds):
            bench.say(f"overhead, round {number + 1} of {bench.effort.rounds}")
            rounds.append(scenarios.take_turns(ways, bench.effort.calls))
    bench.figures["overhead"] = {
        name: medians(
            [{f"p{p}_ms": scenarios.quantile(each[name], p / 100) * 1e3 for p in (50, 99)} for each in rounds]
        )
        for name in ways
    }


def measure_reload(bench: Bench) -> None:
    """A model that comes and goes beside another that is asked."""
    own = Path(tempfile.mkdtemp(dir=bench.folder))
    onnx = {model: model.write(own) for model in (TINY, MOBILENET)}
    bundles = [tightfit.bundle_of(model, path, own) for model, path in onnx.items()]
    rivals = [triton.RivalModel(model.name, model, path, model.max_batch, _POLICY) for model, path in onnx.items()]
    bench.figures["reload"] = {}

    serving: dict[str, Start] = {OURS: lambda folder: tightfit.serving(bundles, folder / "agent")}
    if bench.installed:
        serving[DYNAMIC] = functools.partial(triton.serving, bench.installed, rivals, control=True)
    for name, start in serving.items():
        bench.say(f"reload, {bench.effort.reloads} times: {name}")
        with bench.noting(f"reload of {name}"), bench.own_folder() as folder, start(folder) as server:
            target = Target(name, server, TINY.name, TINY)
            found, reasons = scenarios.reloads(target, MOBILENET.name, bench.effort.reloads, bench.effort.steady_s)
            bench.figures["reload"][name] = {**found, "reasons": dict(reasons)}


def measure_faults(bench: Bench) -> None:
    """The process that runs the model is killed, and stopped, while 200 requests a second come."""
    own = Path(tempfile.mkdtemp(dir=bench.folder))
    onnx = TINY.write(own)
    bundle = tightfit.bundle_of(TINY, onnx, own)
    rival = triton.RivalModel(TINY.name, TINY, onnx, TINY.max_batch, _POLICY)
    serving: dict[str, Start] = {OURS: lambda folder: tightfit.serving([bundle], folder / "agent", _HANG)}
    if bench.installed:
        serving[DYNAMIC] = functools.partial(triton.serving, bench.installed, [rival])
    rows = bench.figures["fault"] = {}
    for number, seconds in ((signal.SIGKILL, bench.effort.killed_s), (signal.SIGSTOP, bench.effort.stopped_s)):
        for name, start in serving.items():
            bench.say(f"{number.name}: {name}")
            with bench.noting(f"{number.name} of {name}"), bench.own_folder() as folder, start(folder) as server:
                found, reasons = scenarios.fault(Target(name, server, TINY.name, TINY), number, seconds)
                rows[f"{number.name}, {name}"] = {**found, "start_s": server.start_s, "reasons": dict(reasons)}


def in_turn(targets: Sequence[Target], number: int) -> Sequence[Target]:
    """Another one first in each round."""
    first = number % len(targets)
    return [*targets[first:], *targets[:first]]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure, over the rounds that have it."""
    found = {}
    for name in rounds[0]:
        values = [figures[name] for figures in rounds if not math.isnan(figures[name])]
        found[name] = statistics.median(values) if values else float("nan")
    return found


# --- command line


def describe_servers(installed: triton.Installed | None) -> dict[str, str]:
    """What each is, for the reader."""
    described = {
        OURS: f"the agent with its defaults; a bundle of requests of one row, a batch axis, {tightfit.SLOTS} slots",
        UNBATCHED: "the same, of a bundle without a batch axis",
    }
    if installed:
        described |= {
            FIXED: f"dynamic batching that waits for a full batch or {DELAY_US // 1000} ms; no priorities, no timeouts",
            ONE: "largest batch 1, two priority levels, timeouts reject: what one who knows tunes for convolutions",
            DYNAMIC: "the largest batch, two priority levels, timeouts reject",
            PLAIN: "without its dynamic batcher, so without priorities and timeouts; for one request at a time",
        }
    return described


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", type=Path, metavar="VENV", help="made by python -m bench.rivals.triton VENV")
    parser.add_argument("--short", action="store_true", help="one brief round: to see that everything works")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"instead of {Effort().rounds}")
    parser.add_argument("--only", action="append", default=[], choices=SCENARIOS, help="several with several --only")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}.md and .json to bench/results")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that was asked for. Raises TightfitError where ours does not even start."""
    effort = SHORT if options.short else Effort()
    if options.rounds:
        effort = replace(effort, rounds=options.rounds)
    bench = Bench(effort, folder, None, options.only)
    machine = describe_machine("onnxruntime", "aiohttp", "uvloop")
    machine["load average before"] = f"{os.getloadavg()[0]:.1f}"
    with bench.noting("Triton"):
        if options.triton is None:
            raise ServerError("no --triton VENV was given")
        bench.installed = triton.find(options.triton)
        with bench.own_folder() as own, triton.serving(bench.installed, [], own) as server:
            machine["Triton"] = triton.version(server)
    if any(map(bench.wants, ("load", "flood", "idle", "abandon", "overhead"))):
        measure_model(bench, MOBILENET, stressed=True)
    if bench.wants("load"):
        measure_model(bench, DENSE, stressed=False)
    if bench.wants("reload"):
        measure_reload(bench)
    if bench.wants("fault"):
        measure_faults(bench)
    bench.say("done")
    servers = describe_servers(bench.installed)
    return {"machine": machine, "effort": asdict(effort), "servers": servers, "notes": bench.notes, **bench.figures}


def main() -> int:
    """Measure and print; exit code 2 and one line where nothing could be measured."""
    options = parse()
    try:
        with tempfile.TemporaryDirectory(prefix="tightfit-scheduler-") as name:
            figures = run(options, Path(name))
    except TightfitError as error:
        print(f"bench.scheduler: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench.scheduler: stopped", file=sys.stderr)
        return 130
    text = report(figures)
    print(text)
    if options.save:
        RESULTS.with_suffix(".md").write_text(text, encoding="utf-8")
        RESULTS.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
