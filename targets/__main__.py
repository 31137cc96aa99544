"""`tightfit-targets`: the boards that Tightfit knows, what each leaves for a model, and checks of board files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from targets.board import (
    MIB,
    Board,
    board_names,
    board_source,
    figure_notes,
    load_board,
    parse_board,
    unsourced_figures,
)
from targets.budget import budget_bytes
from targets.errors import TightfitError
from targets.tensor import human

PROGRAM = "tightfit-targets"
EXAMPLES = """\
examples:
  tightfit-targets list
  tightfit-targets show raspberry-pi-5-4gb
  tightfit-targets show ./my-board.toml --json
  tightfit-targets check ./my-board.toml
"""

# Key in the board file -> how people read it. Order is the order of the table.
ROWS: tuple[tuple[str, str, str], ...] = (
    ("cores", "CPU cores", ""),
    ("memory.physical_mib", "physical memory", "MiB"),
    ("memory.mem_total_mib", "MemTotal", "MiB"),
    ("memory.os_reserve_mib", "left to the system", "MiB"),
    ("memory.contiguous_ceiling_mib", "largest single tensor", "MiB"),
    ("memory.runtime_fixed_mib", "fixed cost of the runtime", "MiB"),
    ("bandwidth.dram_gb_s", "memory bandwidth", "GB/s"),
    ("bandwidth.storage_read_mb_s", "storage, sequential read", "MB/s"),
    ("runtime.max_opset", "newest opset", ""),
    ("power.idle_w", "power, idle", "W"),
    ("power.max_w", "power, busy", "W"),
    ("price.usd", "list price", "USD"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 with one line per problem on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        problems: list[str] = arguments.run(arguments)
    except TightfitError as error:
        problems = [str(error)]
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more while it flushes at exit.
        sys.stderr.close()
        return 0
    for problem in problems:
        # A board file can put a line break into a message; a problem is one line.
        print(f"{PROGRAM}: error: {' '.join(problem.split())}", file=sys.stderr)
    return 2 if problems else 0


class _Parser(argparse.ArgumentParser):
    """argparse with our one error line instead of the usage text before it."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=PROGRAM, description=__doc__, epilog=EXAMPLES, formatter_class=layout)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    listing = commands.add_parser("list", help="the boards that come with Tightfit", description="List the boards.")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)

    show = commands.add_parser(
        "show",
        help="one board: its figures and what it leaves for a model",
        description="Show one board. Figures marked with * are assumed, not taken from a source.",
        epilog="examples:\n  tightfit-targets show jetson-orin-nano-4gb\n  tightfit-targets show ./my-board.toml\n",
        formatter_class=layout,
    )
    show.add_argument("board", metavar="BOARD_OR_FILE", help="a name from `list`, or a .toml file")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)

    check = commands.add_parser(
        "check",
        help="judge board files: keys, values, and a source for every figure",
        description="Check board files; without arguments, the boards that come with Tightfit. "
        "Every number needs `# source: ...` or `# assumed: ...` on its line.",
        epilog="examples:\n  tightfit-targets check\n  tightfit-targets check ./my-board.toml\n",
        formatter_class=layout,
    )
    check.add_argument("boards", metavar="FILE", nargs="*", help=".toml files, or names from `list`")
    check.set_defaults(run=_check)
    return parser


def budget_of(board: Board) -> dict[str, int]:
    """M, the runtime's fixed cost F_rt, and what is left of M for the model, in bytes."""
    budget = budget_bytes(board)
    fixed = board.memory.runtime_fixed_mib * MIB
    return {"budget_bytes": budget, "runtime_fixed_bytes": fixed, "model_bytes": budget - fixed}


def _list(arguments: argparse.Namespace) -> list[str]:
    boards = [load_board(name) for name in board_names()]
    if arguments.json:
        _print_json([{"name": b.name, "title": b.title, "runtime": b.runtime.name, **budget_of(b)} for b in boards])
        return []
    width = max(len(board.name) for board in boards)
    print(f"{'board':{width}}  {'memory':>9}  {'for models':>10}  {'runtime':16}  title")
    for board in boards:
        memory = human(board.memory.physical_mib * MIB)
        runtime = f"{board.runtime.name} {board.runtime.version}"
        left = human(budget_of(board)["model_bytes"])
        print(f"{board.name:{width}}  {memory:>9}  {left:>10}  {runtime:16}  {board.title}")
    return []


def _show(arguments: argparse.Namespace) -> list[str]:
    name, text = board_source(arguments.board)
    board = parse_board(text, name)
    if arguments.json:
        _print_json({**msgspec.to_builtins(board), **budget_of(board), "notes": figure_notes(text)})
        return []
    notes = figure_notes(text)
    rows = [("architecture", f"{board.arch}, {board.cpu}", ""), ("memory", board.memory.kind, "")]
    rows += [(label, _figure(board, key, unit), notes.get(key, "")) for key, label, unit in ROWS]
    rows += [
        (f"peak {dtype}", f"{rate:g} GOP/s", notes.get(f"compute.{dtype}", "")) for dtype, rate in board.compute.items()
    ]
    runtime = f"{board.runtime.name} {board.runtime.version}" + (f", SM {board.runtime.sm}" if board.runtime.sm else "")
    rows += [("runtime", runtime, ""), ("element types", ", ".join(d.value for d in board.runtime.dtypes), "")]
    print(f"{board.name}: {board.title}\n")
    for label, value, note in rows:
        mark = "*" if note.startswith("assumed") else " "
        print(f"  {label:26}{mark} {value:<14}  {note}".rstrip())
    print("\n  * assumed, not taken from a source\n")
    budget = budget_of(board)
    for label, key, remark in (
        ("budget of the service, M", "budget_bytes", "min(85 % of MemTotal, less the system)"),
        ("fixed cost of the runtime, F_rt", "runtime_fixed_bytes", ""),
        ("left for the model", "model_bytes", "weights, activations, requests"),
    ):
        print(f"  {label:33} {human(budget[key]):>10}  {remark}".rstrip())
    return []


def _figure(board: Board, key: str, unit: str) -> str:
    value: Any = board
    for part in key.split("."):
        value = getattr(value, part)
    return f"{value:g} {unit}".rstrip() if isinstance(value, float) else f"{value} {unit}".rstrip()


def _check(arguments: argparse.Namespace) -> list[str]:
    problems: list[str] = []
    for wanted in arguments.boards or board_names():
        try:
            name, text = board_source(wanted)
            board = parse_board(text, name)
        except TightfitError as error:
            problems.append(str(error))
            continue
        unsourced = unsourced_figures(text)
        problems += [
            f"board {name!r}: {key} has no source (end its line with `# source: ...` or `# assumed: ...`)"
            for key in unsourced
        ]
        if not unsourced:
            print(f"{name}: ok, {human(budget_of(board)['model_bytes'])} for models")
    return problems


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
