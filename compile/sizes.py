"""Whether inputs and values fit the board and this host, before one is made: a small file can ask for terabytes."""

from __future__ import annotations

import math

from compile.errors import OptionError
from compile.graph import ir, nodes_of
from compile.shapes import largest_nbytes, sizes_at
from targets.board import MIB, Board
from targets.budget import budget_bytes
from targets.errors import BudgetError
from targets.tensor import Contract, DimRange, human

# Of its inputs the compiler holds a sample for each corner of their ranges, and makes one in 8 bytes an element.
_HELD = 8
# So much is part of what the compiler itself takes.
_ROOM = 100 * MIB
_SMALLER = "use smaller shapes, or choose a larger board"


def _ceiling(board: Board) -> int:
    """The largest tensor that a board may hold (bytes)."""
    return min(budget_bytes(board), board.memory.contiguous_ceiling_mib * MIB)


def check_inputs(contract: Contract, board: Board, host_memory: int) -> None:
    """No input may be larger than the board allows, nor samples of all larger than this host may hold.

    Raises BudgetError, OptionError.
    """
    ceiling, sizes = _ceiling(board), sizes_at(contract.dims, "max")
    for spec in contract.inputs:
        if spec.max_nbytes > ceiling:
            raise BudgetError(
                f"input {spec.describe()} takes {human(spec.max_nbytes)}; on {board.name} one tensor can have "
                f"{human(ceiling)}",
                _SMALLER,
            )
        # Also of a tensor without elements: numpy counts them without the axes that have none.
        if math.prod(max(dim if isinstance(dim, int) else sizes[dim], 1) for dim in spec.shape) > 1 << 59:
            raise BudgetError(f"input {spec.describe()} has a shape that no memory could hold", _SMALLER)
    held, room = _HELD * sum(spec.max_nbytes for spec in contract.inputs), max(host_memory, _ROOM)
    if held > room:
        raise OptionError(
            f"the inputs take {human(held // _HELD)}, and samples of them {human(held)}; compiling may take "
            f"{human(room)}",
            f"say --host-memory {-(-held // MIB)}MiB or more, or use smaller shapes",
        )


def check_sizes(model: ir.Model, dims: dict[str, DimRange], board: Board, host_memory: int) -> None:
    """No value may be larger than the board allows, or than this host may hold.

    Raises BudgetError, OptionError.
    """
    ceiling, room, sizes = _ceiling(board), max(host_memory, _ROOM), sizes_at(dims, "max")
    for node in nodes_of(model):
        for value in node.outputs:
            size = largest_nbytes(value, sizes) or 0
            if size > ceiling:
                raise BudgetError(
                    f"{node.op_type} node {node.name!r} makes a tensor of {human(size)}; on {board.name} one "
                    f"tensor can have {human(ceiling)}",
                    _SMALLER,
                )
            if size > room:
                raise OptionError(
                    f"{node.op_type} node {node.name!r} makes a tensor of {human(size)}; compiling may take "
                    f"{human(room)}",
                    f"say --host-memory {-(-2 * size // MIB)}MiB or more, or use smaller shapes",
                )
