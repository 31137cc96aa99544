"""Values that a split graph has and its source has not: each is a range of one that the source makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy.typing as npt

from compile.backends.base import Tensors
from compile.graph import ir
from compile.passes.split.columns import parts_of
from compile.verify import Link


@dataclasses.dataclass(frozen=True)
class Piece:
    """Indices [start, stop) of value `whole`, which has `size` of them, along an axis."""

    whole: str
    axis: int
    start: int
    stop: int
    size: int


def pieces_of(model: ir.Model, known: Collection[str]) -> dict[str, Piece]:
    """Every value, by name, that Concat joins to one of the `known` values and that is none of them."""
    found: dict[str, Piece] = {}
    for node in model.graph:
        whole = node.outputs[0].name if node.outputs else None
        if whole is None or whole not in known:
            continue
        parts = list(parts_of(node))
        for value, axis, start, stop in parts:
            if value.name and value.name not in known and value.producer() is not None:
                found[value.name] = Piece(whole, axis, start, stop, parts[-1][3])
    return found


def wholes(names: Iterable[str], pieces: Mapping[str, Piece]) -> tuple[str, ...]:
    """The same values by the source model's names, each once."""
    return tuple(dict.fromkeys(pieces[name].whole if name in pieces else name for name in names))


@dataclasses.dataclass(frozen=True)
class Cutter:
    """A model whose outputs are pieces of its inputs."""

    pieces: Mapping[str, Piece]

    def run(self, inputs: Tensors) -> dict[str, npt.NDArray[Any]]:
        return {name: _range(inputs[piece.whole], piece) for name, piece in self.pieces.items()}


def _range(whole: npt.NDArray[Any], piece: Piece) -> npt.NDArray[Any]:
    index: list[slice] = [slice(None)] * whole.ndim
    index[piece.axis] = slice(piece.start, piece.stop)
    return whole[tuple(index)]


def cutting_links(names: Iterable[str], pieces: Mapping[str, Piece]) -> list[Link]:
    """Links behind the source's own that make those of `names` which are pieces."""
    wanted = {name: pieces[name] for name in dict.fromkeys(names) if name in pieces}
    if not wanted:
        return []
    return [Link("pieces", wholes(wanted, pieces), tuple(wanted), lambda: Cutter(wanted))]
