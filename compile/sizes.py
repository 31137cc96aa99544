"""Whether inputs and values fit the board and this host, before one is made: a small file can ask for terabytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compile.backends.base import WeightFootprint
from compile.errors import OptionError
from compile.graph import initializers, ir, nodes_of
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


def largest_value(host_memory: int) -> int:
    """The largest value that the compiler may compute, in bytes."""
    return max(host_memory, _ROOM)


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
    held, room = _HELD * sum(spec.max_nbytes for spec in contract.inputs), largest_value(host_memory)
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
    ceiling, room, sizes = _ceiling(board), largest_value(host_memory), sizes_at(dims, "max")
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


# What the compiler itself takes beside a segment's weights, in anonymous memory. Python and onnx 90 MiB; the graph, and
# what is made of it, 40 MiB on 400 nodes and 60 on 3900; the observed process 25 MiB, and 25 KiB for each node that a
# segment has.
BASE_BYTES = 200 * MIB


def segment_limit(host_memory: int) -> int:
    """Most weight bytes of a segment: it is held as mapped and, at worst, once more as the runtime lays it out."""
    if host_memory < 2 * BASE_BYTES:
        raise OptionError(
            f"--host-memory {human(host_memory)} is too little", f"the compiler itself needs {human(2 * BASE_BYTES)}"
        )
    return (host_memory - BASE_BYTES) // 2


def check_host_memory(pieces: Sequence[ir.Model], footprint: Sequence[WeightFootprint], host_memory: int) -> None:
    """Refuse segments that cannot be made any smaller and that this host could not hold.

    At once there are: the weights of a segment that the runtime lays out anew, or one tensor that is being made.
    Weights that stay mapped take nothing that the kernel could not have back.
    """
    for index, (piece, weights) in enumerate(zip(pieces, footprint, strict=True)):
        held = [tensor for tensor in initializers(piece) if not isinstance(tensor, ir.ExternalTensor)]
        needed = max([weights.heap, *(tensor.nbytes for tensor in held)])
        if BASE_BYTES + needed > host_memory:
            largest = max(initializers(piece), key=lambda tensor: tensor.nbytes)
            least = -(-(BASE_BYTES + needed) // MIB)
            raise OptionError(
                f"--host-memory {human(host_memory)} leaves {human(host_memory - BASE_BYTES)} for weights; segment "
                f"{index:02} needs {human(needed)} and cannot be cut, its tensor {largest.name!r} has "
                f"{human(largest.nbytes)}",
                f"say --host-memory {least}MiB or more",
            )
