"""Element types, shapes and the contract of inputs."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from targets.errors import ContractError, TightfitError
from targets.tensor import (
    FROM_OIP,
    MAX_BUCKETS,
    TABLE,
    Contract,
    DimRange,
    DType,
    TensorSpec,
    human,
    ladder,
    nbytes,
    parse_size,
)

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


# -- buckets -----------------------------------------------------------------------------------------------------


@st.composite
def ranges(draw: st.DrawFn, largest: int = 5000) -> tuple[int, int, int]:
    low, opt, high = sorted(draw(st.tuples(*[st.integers(0, largest)] * 3)))
    return low, opt, high


@pytest.mark.parametrize(
    ("given", "buckets"),
    [
        ((1, 8, 8), (1, 2, 4, 8)),
        ((1, 3, 6), (1, 2, 3, 4, 6)),
        ((0, 64, 64), (1, 2, 4, 8, 16, 32, 64)),
        ((0, 0, 0), (0,)),
        ((0, 0, 1), (0, 1)),
        ((48, 48, 48), (48,)),
        ((320, 640, 1280), (320, 448, 640, 912, 1280)),
        ((320, 320, 1600), (320, 480, 720, 1072, 1600)),
        ((320, 640, 1600), (320, 448, 640, 864, 1184, 1600)),
        ((1, 1, 2048), (1, 3, 9, 24, 80, 224, 688, 2048)),
    ],
)
def test_the_default_buckets(given: tuple[int, int, int], buckets: tuple[int, ...]) -> None:
    assert ladder(*given) == buckets
    assert DimRange(*given).buckets == buckets


@given(ranges())
def test_default_buckets_are_few_and_near_each_other(given_: tuple[int, int, int]) -> None:
    low, opt, high = given_
    buckets = DimRange(low, opt, high).buckets
    first = min(max(low, 1), high)
    assert list(buckets) == sorted(set(buckets))
    assert {first, opt, high} <= set(buckets) <= {0, *range(first, high + 1)}
    assert len(buckets) <= MAX_BUCKETS
    # Ratios between equal steps are off by what rounding to 8 or 16 moves; with too wide a range they must grow.
    fewest = (high / first) ** (1 / (MAX_BUCKETS - 3)) if high else 1
    step = 2 if first < 16 else 1.5
    for smaller, larger in itertools.pairwise(buckets):
        assert larger <= max(step, fewest) * smaller * 1.3 or smaller == 0


@given(ranges(), st.data())
def test_a_size_goes_into_the_smallest_bucket_that_holds_it(given_: tuple[int, int, int], data: st.DataObject) -> None:
    low, opt, high = given_
    own = data.draw(st.sets(st.integers(low, high), max_size=6)) | {opt, high}
    for dim in (DimRange(low, opt, high), DimRange(low, opt, high, tuple(sorted(own)))):
        size = data.draw(st.integers(low, high))
        assert dim.bucket(size) == min(bucket for bucket in dim.buckets if bucket >= size)
        assert all(dim.bucket(bucket) == bucket for bucket in dim.buckets)
        assert msgspec.json.decode(msgspec.json.encode(dim), type=DimRange) == dim
        for outside in (low - 1, high + 1):
            with pytest.raises(ContractError, match=f"size {outside} is outside"):
                dim.bucket(outside)


@pytest.mark.parametrize(
    "buckets", [(4, 2, 8), (2, 2, 4, 8), (1, 4, 8), (2, 4), (2, 4, 8, 16), (2, 8), (2, 4, 8, 8)], ids=str
)
def test_buckets_that_do_not_cover_their_range_are_refused(buckets: tuple[int, ...]) -> None:
    """Over 2..8 with 4 as the size to be fastest at; from a manifest too."""
    assert DimRange(2, 4, 8, (2, 4, 8)).buckets == (2, 4, 8)
    with pytest.raises(ValueError, match="buckets must rise from 2 or more to 8 and hold 4"):
        DimRange(2, 4, 8, buckets)
    with pytest.raises(msgspec.ValidationError, match="buckets must rise"):
        msgspec.json.decode(msgspec.json.encode({"min": 2, "opt": 4, "max": 8, "buckets": buckets}), type=DimRange)


def test_a_contract_names_the_bucket_of_every_dimension() -> None:
    assert CONTRACT.bucket(CONTRACT.check_inputs(GOOD)) == {"width": 448, "batch": 2}
    assert CONTRACT.bucket({}) == {}
    with pytest.raises(ContractError, match=r"unknown dimension 'widht' \(did you mean 'width'"):
        CONTRACT.bucket({"widht": 400})
    with pytest.raises(ContractError, match=r"size 5 is outside 1\.\.4"):
        CONTRACT.bucket({"batch": 5})


# -- what contradicts itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (4,), (4, "n"), ("n", "n"), ("m",)], ids=str)
@pytest.mark.parametrize("side", ["input", "output"])
def test_the_batch_is_axis_0_of_everything(side: str, shape: tuple[int | str, ...]) -> None:
    good, bad = TensorSpec("g", DType.INT8, ("n", 4), 16), TensorSpec("b", DType.INT8, shape, 16)
    dims = {"n": DimRange(1, 4, 4), "m": DimRange(1, 4, 4)}
    assert Contract((good,), (good,), dims, "n").batch == "n"
    with pytest.raises(ValueError, match="the batch 'n' must be axis 0, and no other, of b int8"):
        Contract((good, bad) if side == "input" else (good,), (good, bad) if side == "output" else (good,), dims, "n")


def test_the_batch_needs_a_range() -> None:
    with pytest.raises(ValueError, match="no range for the batch 'n'"):
        Contract((), (TensorSpec("y", DType.INT8, ("n",), 4),), {}, "n")


def test_rows_of_strings_are_not_put_together() -> None:
    words, codes = TensorSpec("w", DType.STRING, ("n",), 16), TensorSpec("c", DType.INT8, ("n",), 4)
    dims = {"n": DimRange(1, 4, 4)}
    assert Contract((codes,), (codes,), dims, "n").batch_rows == 4
    assert Contract((codes,), (codes,), dims).batch_rows == 0
    assert Contract((words,), (codes,), dims, "n").batch_rows == Contract((codes,), (words,), dims, "n").batch_rows == 0


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
