"""What members' contracts give together, and who is asked what."""

from __future__ import annotations

import pytest

from agent.ensemble import Ensemble, Part
from targets.errors import ContractError
from targets.tensor import Contract, Dim, DimRange, DType, TensorSpec


def spec(name: str, *shape: Dim, dtype: DType = DType.FLOAT32, max_nbytes: int = 1000) -> TensorSpec:
    return TensorSpec(name, dtype, shape, max_nbytes)


def contract(inputs: list[TensorSpec], outputs: list[str], **dims: DimRange) -> Contract:
    return Contract(tuple(inputs), tuple(spec(name, "n") for name in outputs), dims)


DETECT = contract([spec("x", "n", 3, max_nbytes=500), spec("threshold", 1)], ["boxes", "scores"], n=DimRange(1, 4, 8))
CLASSIFY = contract([spec("x", "rows", 3)], ["scores"], rows=DimRange(2, 2, 16))


def test_inputs_once_by_name_and_outputs_by_member() -> None:
    merged = Ensemble({"detect": DETECT, "classify": CLASSIFY}).contract
    assert [each.name for each in merged.inputs] == ["x", "threshold"]
    assert [each.name for each in merged.outputs] == ["detect.boxes", "detect.scores", "classify.scores"]
    assert merged.input("x") == spec("x", "x.0", 3)
    assert (merged.dims["x.0"].min, merged.dims["x.0"].max) == (1, 16)


def test_sizes_that_all_members_fix_stay_numbers() -> None:
    merged = Ensemble({"one": contract([spec("x", 1, 3)], ["y"]), "two": contract([spec("x", 1, 4)], ["y"])}).contract
    assert merged.inputs[0].shape == (1, "x.1")


def test_each_member_gets_its_inputs_in_its_own_order() -> None:
    one = contract([spec("a", 1), spec("b", 2)], ["y"])
    two = contract([spec("c", 3), spec("b", 2)], ["y", "z"])
    ensemble = Ensemble({"one": one, "two": two})
    assert [each.name for each in ensemble.contract.inputs] == ["a", "b", "c"]
    assert ensemble.parts([[1], [2], [3]], [2, 0, 1]) == (Part("one", (0, 1), (0,)), Part("two", (2, 1), (1, 0)))
    assert [ensemble.owner(output) for output in (0, 1, 2)] == [("one", 0), ("two", 0), ("two", 1)]


def test_who_is_not_wished_for_is_not_asked() -> None:
    parts = Ensemble({"detect": DETECT, "classify": CLASSIFY}).parts([[4, 3], [1]], [2])
    assert parts == (Part("classify", (0,), (0,)),)


@pytest.mark.parametrize(("rows", "member"), [(1, "classify"), (9, "detect")])
def test_what_a_member_refuses_is_refused_in_its_name(rows: int, member: str) -> None:
    ensemble = Ensemble({"detect": DETECT, "classify": CLASSIFY})
    with pytest.raises(ContractError, match=rf"^member '{member}': input 'x' has size {rows} on axis 0"):
        ensemble.parts([[rows, 3], [1]], [0, 1, 2])


def test_dimensions_of_one_name_are_each_member_s_own() -> None:
    """`n` binds x and y of one member together, and says nothing of the other's."""
    one = contract([spec("x", "n"), spec("y", "n")], ["o"], n=DimRange(1, 4, 4))
    two = contract([spec("z", "n")], ["o"], n=DimRange(1, 4, 4))
    ensemble = Ensemble({"one": one, "two": two})
    assert len(ensemble.parts([[2], [2], [3]], [0, 1])) == 2
    with pytest.raises(ContractError, match=r"^member 'one': inputs 'x' and 'y' disagree on dimension 'n': 2 and 3"):
        ensemble.parts([[2], [3], [3]], [0, 1])


@pytest.mark.parametrize("other", [spec("x", 1, dtype=DType.INT64), spec("x", 1, 1)])
def test_inputs_of_one_name_that_are_not_one_tensor(other: TensorSpec) -> None:
    members = {"one": contract([spec("x", 1)], ["y"]), "two": contract([other], ["y"])}
    with pytest.raises(ContractError, match=r"'one' takes x float32\[1\], 'two' takes x "):
        Ensemble(members)


def test_names_that_meet() -> None:
    members = {"a": contract([spec("x", 1)], ["b.y"]), "a.b": contract([spec("x", 1)], ["y"])}
    with pytest.raises(ContractError, match=r"cannot be told apart: two outputs have one name"):
        Ensemble(members)
