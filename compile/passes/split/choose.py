"""What a model has to be split by, so that its operators fit the host and the board. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compile.graph import constant, ir
from compile.partition.graph import reads
from compile.passes.split.columns import matrix_of
from compile.passes.split.plan import NODE_BYTES, Splits, Stuck, peak_bytes, split_columns, split_rows
from targets.board import Board
from targets.budget import budget_bytes
from targets.errors import BudgetError
from targets.tensor import human

# Of an arena so much is what lives in it at a time; the rest is fragments. 82 to 100 % measured of split models.
_USED = 0.8


def choose_splits(
    model: ir.Model,
    sizes: Mapping[str, int],
    board: Board,
    others: int,
    limit: int,
    host: int,
    lowered: Callable[[], ir.Model],
) -> Splits:
    """The passes, in their order.

    `sizes` are bytes of every value at the largest shapes; `others` what the board's budget has to hold beside weights
    and activations (bytes); `limit` the most weights of a segment that the host can load, `host` the largest value that
    it can compute. `lowered` gives the model as it would be written, were nothing split; it is asked only when needed.
    Raises BudgetError for an operator that no split makes fit, with the least budget that would do.
    """
    left = budget_bytes(board) - others - len(model.graph) * NODE_BYTES
    peak = round(peak_bytes(model, sizes) / _USED)
    matrices = [matrix.tensor.nbytes for node in model.graph if (matrix := matrix_of(node)) is not None]
    total = _weight_bytes(model)
    if total + peak <= left and max(matrices, default=0) <= limit:
        return Splits()
    written = lowered()
    stored = _weights_by_result(written)
    total = _weight_bytes(written)
    # Weights that would leave activations less than half are streamed: two segments at a time, stored and laid out.
    room = left - min(total, left // 2)
    rows = split_rows(model, sizes, int(room * _USED), host) if 0 < room < peak else Splits()
    _check_stuck(rows.stuck, board, left, room)
    if total > left - min(peak, room):
        limit = min(limit, max(left - min(peak, room), 0) // 4)
    columns = split_columns(model, stored, limit)
    return Splits(rows.passes + columns.passes, rows.notes + columns.notes, columns.stuck)


def _weight_bytes(model: ir.Model) -> int:
    """All weights but tables, of which a run reads a few rows."""
    found: dict[str | None, int] = {}
    for node in model.graph:
        tables = node.inputs[:1] if node.op_type in ("Gather", "GatherBlockQuantized") else ()
        for value in reads(node):
            tensor = constant(value)
            if tensor is not None and value not in tables:
                found[value.name] = tensor.nbytes
    return sum(found.values())


def _weights_by_result(model: ir.Model) -> dict[str, int]:
    """Bytes of the constants that each node reads, turned or cast ones too, by the name of its result."""
    found: dict[str, int] = {}
    for node in model.graph:
        tensors = {value.name: constant(value) for value in map(_behind, reads(node))}
        found[node.outputs[0].name or ""] = sum(tensor.nbytes for tensor in tensors.values() if tensor is not None)
    return found


def _behind(value: ir.Value) -> ir.Value:
    producer = value.producer()
    while producer is not None and producer.op_type in ("Cast", "Transpose") and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def _check_stuck(stuck: tuple[Stuck, ...], board: Board, left: int, room: int) -> None:
    """Refuse an operator whose own operands and results exceed all that is left; where less is too much, what it needs
    is an estimate, and the plan will tell."""
    for each in stuck:
        if each.nbytes > left:
            budget = budget_bytes(board)
            raise BudgetError(
                f"{each.operator} needs {human(each.nbytes)} of activations; of the budget of {board.name} "
                f"{human(max(left, 0))} are left for them, and it cannot be split far enough: {each.reason}",
                f"a budget of about {human(budget + max(round(each.least / _USED) - room, 0))} would do "
                f"(now {human(budget)}), or smaller shapes",
            )
