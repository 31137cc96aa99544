"""The arena's packer on google/minimalloc's challenging instances: `python -m bench.packing`.

Every solution is judged by `targets.arena.check_arena`. First the question that minimalloc answers: is there an arena
of at most the capacity? Then what the compiler asks: how low can it be, with the effort that a model gets?

    python -m bench.packing                                   # prints the tables
    python -m bench.packing --save                            # and writes bench/results/packing.md
    python -m bench.packing --rival minimalloc/build/minimalloc   # runs it in turn with ours, on the same machine
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from bench.machine import describe_machine, measured_on
from compile.packing.greedy import first_fit, orders
from compile.packing.place import EFFORT, Packing, pack
from compile.packing.problem import Problem, sections_of
from targets.arena import Arena, Buffer, Placed, check_arena, lower_bound

RESULTS = Path(__file__).parent / "results" / "packing.md"
INSTANCES = Path(__file__).parents[1] / "tests" / "data" / "minimalloc"
UNIT = 1024
"""Every size and the capacity are multiples of it."""

RIVAL_SECONDS = 600
ROUNDS = 3
MORE = 4
"""Times the effort that a model gets, where the capacity is given: minimalloc has no limit."""
COMPILE = """
import time; began = time.perf_counter()
from compile.packing.place import pack
from tests.support.packing import NO_PERFECT_PACKING, problem_of
pack(problem_of(NO_PERFECT_PACKING)); print(time.perf_counter() - began)
"""

T = TypeVar("T")


class Instance(msgspec.Struct, frozen=True):
    """A file of buffers, and how many bytes its arena may have."""

    path: Path
    capacity: int
    buffers: tuple[Buffer, ...]

    @property
    def name(self) -> str:
        """The letter by which it is known."""
        return self.path.name[0]

    def problem(self) -> Problem:
        """The same in sections and units."""
        begin, end = sections_of([(buffer.lower, buffer.upper) for buffer in self.buffers])
        return Problem(begin, end, np.array([buffer.nbytes // UNIT for buffer in self.buffers], np.int64))

    def judge(self, packing: Packing) -> None:
        """Raises BudgetError where the packing is no arena."""
        offsets = (packing.offsets * UNIT).tolist()
        placed = (
            Placed(b.name, b.lower, b.upper, b.nbytes, offset) for b, offset in zip(self.buffers, offsets, strict=True)
        )
        check_arena(Arena(packing.height * UNIT, lower_bound(self.buffers), UNIT, tuple(placed)))


def read(path: Path) -> Instance:
    """NAME.CAPACITY.csv with the columns id, lower, upper, size."""
    with path.open() as file:
        buffers = tuple(
            Buffer(row["id"], int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)
        )
    return Instance(path, int(path.name.split(".")[1]), buffers)


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """(seconds, what it returned)."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def rival_seconds(program: Path, instance: Instance) -> float:
    """What minimalloc says it took, without reading and writing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(program),
            f"--capacity={instance.capacity}",
            f"--input={instance.path}",
            f"--output={Path(folder) / 'out.csv'}",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=RIVAL_SECONDS, check=True)
    found = re.search(r"Elapsed time ([0-9.]+)s", ran.stderr)
    assert found, ran.stderr
    return float(found[1])


def compile_seconds() -> tuple[float, float]:
    """What the first and every later process pays before its first search."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        runs = (
            subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True)
            for _ in range(2)
        )
        first, later = (float(ran.stdout) for ran in runs)
    return first, later


class Row(msgspec.Struct):
    """One instance: solved for its capacity, and as low as it gets; units, seconds of every round."""

    instance: Instance
    greedy: int
    solved: Packing
    lowest: Packing
    lowest_seconds: float
    seconds: list[float]
    rival: list[float]


def measure(instance: Instance, rival: Path | None) -> Row:
    """Ours and the rival in turn."""
    problem = instance.problem()
    greedy = problem.height(first_fit(problem, next(orders(problem))))
    seconds, rivals = [], []
    for _ in range(ROUNDS):
        if rival:
            rivals.append(rival_seconds(rival, instance))
        took, solved = timed(lambda: pack(problem, MORE * EFFORT, instance.capacity // UNIT))
        seconds.append(took)
    lowest_seconds, lowest = timed(lambda: pack(problem))
    for packing in (solved, lowest):
        instance.judge(packing)
    return Row(instance, greedy, solved, lowest, lowest_seconds, seconds, rivals)


def line(row: Row) -> str:
    """A row of the table."""
    capacity, load = row.instance.capacity, lower_bound(row.instance.buffers)
    solved = "yes" if row.solved.height * UNIT <= capacity else "no"
    height = row.lowest.height * UNIT
    return (
        f"| {row.instance.name} | {len(row.instance.buffers)} | {load:,} | {row.greedy * UNIT / capacity - 1:+.1%} "
        f"| {solved} | {row.solved.nodes:,} | {statistics.median(row.seconds):.2f} "
        f"| {f'{statistics.median(row.rival):.2f}' if row.rival else '-'} "
        f"| {height:,} | {height / load - 1:.1%} | {'yes' if row.lowest.proven else 'no'} | {row.lowest.nodes:,} "
        f"| {row.lowest_seconds:.2f} |"
    )


HEAD = """\
| instance | buffers | largest load | greedy by size, to the capacity | solved | nodes | seconds | minimalloc, seconds \
| height | above the load | proven lowest | nodes | seconds |
|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---|---:|---:|"""


def total(rows: list[Row]) -> str:
    """The last row: seconds in all."""
    ours = sum(statistics.median(row.seconds) for row in rows)
    rival = f"{sum(statistics.median(row.rival) for row in rows):.2f}" if all(row.rival for row in rows) else "-"
    solved = sum(row.solved.height * UNIT <= row.instance.capacity for row in rows)
    return (
        f"| all | | | | {solved} of {len(rows)} | {sum(row.solved.nodes for row in rows):,} | {ours:.2f} | {rival} "
        f"| | | {sum(row.lowest.proven for row in rows)} of {len(rows)} | {sum(row.lowest.nodes for row in rows):,} "
        f"| {sum(row.lowest_seconds for row in rows):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", type=Path, help="google/minimalloc's program, to be run in turn with ours")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    chosen = parser.parse_args()
    first, later = compile_seconds()
    rows = []
    print(HEAD)
    for path in sorted(INSTANCES.glob("*.csv")):
        rows.append(measure(read(path), chosen.rival))
        print(line(rows[-1]), flush=True)
    print(total(rows))
    print(f"compiling: {first:.1f} s once, {later:.1f} s in later processes")
    if chosen.save:
        RESULTS.write_text(report(rows, first, later))


def report(rows: list[Row], first: float, later: float) -> str:
    """The page that is committed."""
    table = "\n".join([HEAD, *map(line, rows), total(rows)])
    return f"""\
# Packing: google/minimalloc's challenging instances

Capacity 1,048,576 bytes. Made by `python -m bench.packing --save`; every solution was judged by
`targets.arena.check_arena`, and takes the same number of nodes in every run. On the left the capacity is given, as
minimalloc has it, with {MORE} times the effort that a model gets; on the right the lowest arena is asked for, with just
that. Ours and minimalloc (where `--rival` names it) ran in turn, on one core each; seconds are the median of {ROUNDS}
rounds (on the right of one), while other programs shared the machine.

{table}

Beside that the first search of an installation compiles it, which took {first:.1f} s; a later process reads it in
{later:.1f} s. A model whose buffers greedy or the local search packs down to the load does neither.

{measured_on(describe_machine("numba", "numpy"))}
"""


if __name__ == "__main__":
    main()
