"""The runner holds every pass to its facts; passes that lie are written here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest

from compile.errors import ModelError
from compile.graph import ir, load_model
from compile.passes.base import FACTS, Pass, run_passes
from compile.passes.normalize import InlineFunctions, SortNodes
from tests.support.models import mlp, model, node, save, value


@dataclasses.dataclass(frozen=True)
class Honest(Pass):
    level: int = 3

    def apply(self, model: ir.Model) -> None:  # noqa: ARG002 - the Pass protocol
        return


@dataclasses.dataclass(frozen=True)
class Unsorts(Pass):
    ensures: ClassVar = ("sorted",)

    def apply(self, model: ir.Model) -> None:
        first = model.graph[0]
        model.graph.remove(first)
        model.graph.append(first)


@dataclasses.dataclass(frozen=True)
class Doubles(Pass):
    ensures: ClassVar = ("unique_names",)

    def apply(self, model: ir.Model) -> None:
        model.graph[0].outputs[0].name = "w"


@dataclasses.dataclass(frozen=True)
class Renames(Pass):
    def apply(self, model: ir.Model) -> None:
        model.graph.outputs[0].name = "other"


@dataclasses.dataclass(frozen=True)
class NeedsConstantsLifted(Pass):
    requires: ClassVar = ("no_constant_nodes",)

    def apply(self, model: ir.Model) -> None:
        raise AssertionError(f"must not run on {model.graph.name}")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Unsorts(), r"Unsorts\(\) ensures sorted, but there is node 'relu' before the producer of 'a'"),
        (Doubles(), r"Doubles\(\) ensures unique_names, but there is two values named 'w'"),
        (Renames(), r"Renames\(\) changed the model's inputs or outputs"),
    ],
)
def test_a_pass_that_lies_is_found(tmp_path: Path, step: Pass, words: str) -> None:
    graph = load_model(mlp(tmp_path))
    with pytest.raises(ModelError, match=words):
        run_passes(graph, [SortNodes(), step])


def test_what_a_pass_requires_is_checked_before_it_runs(tmp_path: Path) -> None:
    constant = node("Constant", [], ["c"], value_float=1.0)
    proto = model([constant, node("Add", ["x", "c"], ["y"])], [value("x", [2])], [value("y", [2])])
    with pytest.raises(ModelError, match="requires no_constant_nodes"):
        run_passes(load_model(save(tmp_path, proto)), [NeedsConstantsLifted()])


def test_passes_are_values_and_are_announced_in_order(tmp_path: Path) -> None:
    heard: list[Pass] = []
    run_passes(load_model(mlp(tmp_path)), [Honest(), InlineFunctions(), Honest(5)], heard.append)
    assert heard == [Honest(3), InlineFunctions(), Honest(5)]
    assert str(heard[2]) == "Honest(level=5)"


def test_every_promised_fact_has_a_check() -> None:
    def below(kind: type[Pass]) -> list[type[Pass]]:
        return [kind, *(deeper for child in kind.__subclasses__() for deeper in below(child))]

    assert {fact for kind in below(Pass) for fact in (*kind.requires, *kind.ensures)} <= set(FACTS)
