"""What a contract may say of state, and what a slot has room for then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from targets.errors import ContractError
from targets.generation import roles
from targets.states import State, Sum
from targets.tensor import Contract, DimRange, DType, TensorSpec

IDS = TensorSpec("input_ids", DType.INT64, (1, "t"), 32)
MASK = TensorSpec("attention_mask", DType.INT64, (1, "all"), 96)
PAST = TensorSpec("past.0.k", DType.FLOAT32, (1, 2, "past", 4), 256)
LOGITS = TensorSpec("logits", DType.FLOAT32, (1, "t", 10), 160)
PRESENT = TensorSpec("present.0.k", DType.FLOAT32, (1, 2, "all", 4), 384)
CONTRACT = Contract(
    (IDS, MASK, PAST),
    (LOGITS, PRESENT),
    {"t": DimRange(1, 4, 4), "past": DimRange(0, 8, 8), "all": DimRange(1, 12, 12)},
    states=(State("past.0.k", "present.0.k", 2),),
    sums=(Sum("all", ("past", "t")),),
)


def given(ids: int, past: int, mask: int) -> dict[str, tuple[DType, tuple[int, ...]]]:
    return {
        "input_ids": (DType.INT64, (1, ids)),
        "attention_mask": (DType.INT64, (1, mask)),
        "past.0.k": (DType.FLOAT32, (1, 2, past, 4)),
    }


def test_both_places_of_a_pair_are_as_large_as_the_larger() -> None:
    assert CONTRACT.places == ((32, 96, 384), (160, 384))
    assert CONTRACT.pairs == {2: 1}


def test_the_past_is_empty_at_first_and_a_sum_follows_from_its_terms() -> None:
    assert CONTRACT.check_inputs(given(4, 0, 4)) == {"t": 4, "all": 4, "past": 0}
    assert CONTRACT.check_inputs(given(1, 8, 9)) == {"t": 1, "all": 9, "past": 8}
    with pytest.raises(ContractError, match=r"dimension 'all' of input 'attention_mask' is 5, not 6 .*past \+ t"):
        CONTRACT.check_inputs(given(2, 4, 5))


def test_runs_with_equally_much_that_is_new_are_alike() -> None:
    assert CONTRACT.alike(((1, 1), (1, 5), (1, 2, 4, 4))) == CONTRACT.alike(((1, 1), (1, 8), (1, 2, 7, 4)))
    assert CONTRACT.alike(((1, 1), (1, 5), (1, 2, 4, 4))) != CONTRACT.alike(((1, 2), (1, 6), (1, 2, 4, 4)))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: replace(CONTRACT, states=(State("past.0.v", "present.0.k", 2),)), "'past.0.v' and 'present.0.k' are"),
        (lambda: replace(CONTRACT, states=(State("past.0.k", "logits", 3),)), "cannot grow from nothing along axis 3"),
        (lambda: replace(CONTRACT, states=(State("past.0.k", "present.0.k", 4),)), "grow from nothing along axis 4"),
        (lambda: replace(CONTRACT, states=(State("past.0.k", "present.0.k"),)), "can have more than one shape"),
        (lambda: replace(CONTRACT, states=CONTRACT.states * 2), "part of two pairs"),
        (lambda: replace(CONTRACT, states=()), "there is no batch"),
        (lambda: replace(CONTRACT, sums=(Sum("all", ("past", "s")),)), "no sum of dimensions"),
    ],
)  # fmt: skip
def test_a_contract_that_cannot_be(wrong: Callable[[], Contract], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        wrong()


def test_what_generates_text() -> None:
    found = roles(CONTRACT)
    assert (found.tokens, found.mask, found.positions, found.logits) == (0, 1, None, 0)
    assert (found.piece, found.context, found.vocabulary) == (4, 8, 10)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (Contract((IDS,), (LOGITS,), {"t": DimRange(1, 4, 4)}), "no state pairs"),
        (replace(CONTRACT, inputs=(IDS, replace(MASK, name="flags"), PAST)), "nothing for input 'flags'"),
        (replace(CONTRACT, dims={**CONTRACT.dims, "t": DimRange(2, 4, 4)}), "does not take 1 token"),
        (replace(CONTRACT, outputs=(replace(LOGITS, shape=(1, "t", "v")), PRESENT)), "not scores"),
    ],
)
def test_what_does_not_generate_text(changed: Contract, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        roles(changed)
