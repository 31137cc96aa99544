"""Element types, shapes and the contract of inputs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from targets.errors import ContractError, TightfitError
from targets.tensor import FROM_OIP, TABLE, Contract, DimRange, DType, TensorSpec, human, nbytes, parse_size

IMAGE = TensorSpec("x", DType.FLOAT32, (1, 3, 48, "width"), 1_000_000)
MASK = TensorSpec("mask", DType.BOOL, ("batch", "width"), 1_000)
CONTRACT = Contract(
    inputs=(IMAGE, MASK),
    outputs=(TensorSpec("y", DType.FLOAT32, ("t", 10), 4_000),),
    dims={"width": DimRange(320, 640, 1600), "batch": DimRange(1, 1, 4)},
)
GOOD = {"x": (DType.FLOAT32, (1, 3, 48, 400)), "mask": (DType.BOOL, (2, 400))}


def test_every_dtype_has_a_row_and_the_oip_names_are_unique() -> None:
    assert set(TABLE) == set(DType)
    assert {FROM_OIP[d.oip] for d in DType if d.oip} == {d for d in DType if d.oip}
    assert DType.INT4.oip is None
    assert DType.BFLOAT16.numpy is None


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (DType.FLOAT32, (2, 3), 24),
        (DType.FLOAT32, (), 4),
        (DType.FLOAT32, (5, 0), 0),
        (DType.INT4, (3,), 2),
        (DType.UINT4, (3, 3), 5),
        (DType.INT4, (4,), 2),
        (DType.BOOL, (7,), 7),
        (DType.INT64, (1 << 20, 1 << 20), 8 << 40),
    ],
)
def test_nbytes(dtype: DType, shape: tuple[int, ...], expected: int) -> None:
    assert nbytes(dtype, shape) == expected


def test_strings_have_no_size_of_their_own() -> None:
    with pytest.raises(ValueError, match="apart from its data"):
        nbytes(DType.STRING, (1,))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5120.0 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_human(size: int, text: str) -> None:
    assert human(size) == text


def test_good_inputs_give_the_size_of_every_named_dimension() -> None:
    assert CONTRACT.check_inputs(GOOD) == {"width": 400, "batch": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": (DType.FLOAT32, (1,))}, "unknown input 'y'"),
        ({"x": (DType.FLOAT16, (1, 3, 48, 400))}, "input 'x' is float16"),
        ({"x": (DType.FLOAT32, (3, 48, 400))}, "input 'x' has 3 dimensions"),
        ({"x": (DType.FLOAT32, (1, 3, 48, 319))}, "size 319 on axis 3"),
        ({"x": (DType.FLOAT32, (1, 3, 48, 1601))}, "compiled for 320..1600"),
        ({"x": (DType.FLOAT32, (1, 3, 47, 400))}, "compiled for 48 there"),
        ({"x": (DType.FLOAT32, (1, 3, 48, -400))}, "size -400"),
        ({"mask": (DType.BOOL, (5, 400))}, "size 5 on axis 0"),
        ({"mask": (DType.BOOL, (1, 401))}, "'x' and 'mask' disagree on dimension 'width': 400 and 401"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(change: dict[str, tuple[DType, tuple[int, ...]]], message: str) -> None:
    with pytest.raises(ContractError) as caught:
        CONTRACT.check_inputs({**GOOD, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x", "mask"])
def test_a_missing_input_is_named(name: str) -> None:
    with pytest.raises(ContractError, match=f"input '{name}' is missing"):
        CONTRACT.check_inputs({other: value for other, value in GOOD.items() if other != name})


def test_an_unknown_input_names_the_closest() -> None:
    with pytest.raises(ContractError, match="did you mean 'mask'"):
        CONTRACT.input("maks")


@given(low=st.integers(0, 50), opt=st.integers(0, 50), high=st.integers(0, 50), size=st.integers(-5, 60))
def test_a_range_takes_exactly_its_sizes(low: int, opt: int, high: int, size: int) -> None:
    if not low <= opt <= high:
        with pytest.raises(ValueError, match="min <= opt <= max"):
            DimRange(low, opt, high)
        return
    contract = Contract((TensorSpec("x", DType.INT8, ("n",), 60),), (), {"n": DimRange(low, opt, high)})
    if low <= size <= high:
        assert contract.check_inputs({"x": (DType.INT8, (size,))}) == {"n": size}
    else:
        with pytest.raises(ContractError):
            contract.check_inputs({"x": (DType.INT8, (size,))})


def test_specs_and_contracts_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        TensorSpec("", DType.INT8, (1,), 1)
    with pytest.raises(ValueError, match="cannot be negative"):
        TensorSpec("x", DType.INT8, (-1,), 1)
    with pytest.raises(ValueError, match="two inputs have one name"):
        Contract((MASK, MASK), (), {})
    with pytest.raises(ValueError, match="no range for dimension 'batch'"):
        Contract((MASK,), (), {"width": DimRange(1, 1, 1)})


def test_a_contract_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(CONTRACT), type=Contract) == CONTRACT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.4GiB", 3_650_722_201),
        ("900MiB", 900 << 20),
        (" 2 GB ", 2_000_000_000),
        ("1.5 KiB", 1536),
        ("10kB", 10_000),
        ("1TiB", 1 << 40),
        ("0", 0),
        ("1048576", 1 << 20),
        ("7B", 7),
    ],
)
def test_sizes_that_people_write(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "3,4GiB", "-1GiB", "1e9", "3G", "3gib", "\u0663GiB", "1GiB/s", "9" * 19])
def test_what_is_no_size_says_what_is(text: str) -> None:
    with pytest.raises(TightfitError, match=r"is not a size \(write 3.4GiB"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_plain_bytes_are_themselves(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes
