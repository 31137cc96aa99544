"""Passes are values: a frozen dataclass whose fields are its options. The runner checks what they promise.

A *fact* is something a graph can be held against (`sorted`, `unique_names`, ...). A pass names the facts it
requires and those it ensures; `run_passes` checks the first before and the second after each pass, and after
every pass that the model's inputs and outputs kept their names and order. A pass that mended what a person should
know of returns it in words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from compile.errors import ModelError
from compile.graph import ir, nodes_of


@dataclasses.dataclass(frozen=True)
class Pass:
    """One change to a graph, made in place."""

    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()

    def apply(self, model: ir.Model) -> Sequence[str] | None:
        """Change the model; returns what the person should know of it, a sentence each.

        Raises ModelError where the model holds something that the pass cannot treat.
        """
        raise NotImplementedError


def _no_functions(model: ir.Model) -> str | None:
    return next((f"function {f.name}" for f in model.functions.values()), None)


def _no_constant_nodes(model: ir.Model) -> str | None:
    # Sparse constants stay nodes: an initializer cannot hold one.
    return next(
        (
            f"Constant node {n.name!r}"
            for n in nodes_of(model)
            if n.op_type == "Constant" and n.domain == "" and "sparse_value" not in n.attributes
        ),
        None,
    )


def _unique_names(model: ir.Model) -> str | None:
    seen: set[str] = {v.name or "" for v in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in nodes_of(model):
        for value in node.outputs:
            if not value.name and value.uses():
                return f"a nameless output of {node.op_type} node {node.name!r}"
            if value.name and value.name in seen:
                return f"two values named {value.name!r}"
            if value.name:
                seen.add(value.name)
    return None


def _sorted(model: ir.Model) -> str | None:
    known = {id(v) for v in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph:
        for value in node.inputs:
            if value is not None and id(value) not in known:
                return f"node {node.name!r} before the producer of {value.name!r}"
        known.update(id(value) for value in node.outputs)
    return None


FACTS: dict[str, Callable[[ir.Model], str | None]] = {
    "no_functions": _no_functions,
    "no_constant_nodes": _no_constant_nodes,
    "unique_names": _unique_names,
    "sorted": _sorted,
}
"""Fact -> check that returns what contradicts it, or None."""


def run_passes(model: ir.Model, passes: Sequence[Pass], on_pass: Callable[[Pass], None] | None = None) -> list[str]:
    """Apply the passes in order, in place, holding each to its facts; returns what they have to say.

    `on_pass` hears each pass after it, when the model is as the pass left it.
    """
    interface = _interface(model)
    notes: list[str] = []
    for step in passes:
        _check(model, step, "requires", step.requires)
        notes.extend(step.apply(model) or ())
        _check(model, step, "ensures", step.ensures)
        if _interface(model) != interface:
            raise ModelError(f"pass {step} changed the model's inputs or outputs", "please report this")
        if on_pass:
            on_pass(step)
    return notes


def _check(model: ir.Model, step: Pass, role: str, facts: tuple[str, ...]) -> None:
    for fact in facts:
        found = FACTS[fact](model)
        if found:
            raise ModelError(f"pass {step} {role} {fact}, but there is {found}", "please report this")


def _interface(model: ir.Model) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    inputs = tuple(v.name for v in model.graph.inputs if v.name not in model.graph.initializers)
    return inputs, tuple(v.name for v in model.graph.outputs)
