"""--shape: its grammar, what it binds, and the contract that follows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from compile.errors import OptionError
from compile.graph import load_model
from compile.shapes import STRING_RESERVE_BYTES, bind_shapes, build_contract, find_batch, parse_shape
from targets.errors import ContractError
from targets.tensor import Contract, DimRange, DType
from tests.support.models import model, node, save, value

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


def contract_of(
    folder: Path, inputs: dict[str, list[int | str | None]], *shapes: str, element: int = FLOAT
) -> Contract:
    nodes = [node("Identity", [name], [f"{name}_out"]) for name in inputs]
    outputs = [value(f"{name}_out", None, element) for name in inputs]
    path = save(folder, model(nodes, [value(n, s, element) for n, s in inputs.items()], outputs))
    graph = load_model(path)
    dims = bind_shapes(graph, tuple(map(parse_shape, shapes)))
    return build_contract(graph, dims, {output.name: 0 for output in outputs})


@st.composite
def ranges(draw: st.DrawFn) -> DimRange:
    low, opt, high = sorted(draw(st.tuples(*[st.integers(0, 2000)] * 3)))
    own = draw(st.sets(st.integers(low, high), max_size=5)) | {opt, high}
    return DimRange(low, opt, high, tuple(sorted(own)) if len(own) > 1 and draw(st.booleans()) else ())


@given(st.lists(ranges(), min_size=1, max_size=5))
def test_the_grammar_reads_what_it_spells(dims: list[DimRange]) -> None:
    text = ",".join(dim.spelled() for dim in dims)
    assert parse_shape(f"a=b={text}") == ("a=b", tuple(dims))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", DimRange(5, 5, 5)),
        ("1..8", DimRange(1, 8, 8)),
        ("1..4..8", DimRange(1, 4, 8)),
        ("320/640/1280", DimRange(320, 1280, 1280, (320, 640, 1280))),
        ("100..320/640", DimRange(100, 640, 640, (320, 640))),
        ("100..320..320/640", DimRange(100, 320, 640, (320, 640))),
    ],
)
def test_what_a_dimension_can_be(text: str, expected: DimRange) -> None:
    assert parse_shape(f"x={text}") == ("x", (expected,))


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "=1",
        "x=a",
        "x=-1",
        "x=1..",
        "x=1..2..3..4",
        "x=5..1",
        "x=1..9..4",
        "x=1,,3",
        "x=1.5",
        "x=8/4",
        "x=1/1",
        "x=5..4/8",
        "x=1..5..4/8",
        "x=4/",
        "x=1/2..4",
        f"x={'9' * 5000}",
        "x=\u0664",
    ],
    ids=lambda text: text[:12],
)
def test_bad_grammar_shows_the_grammar(text: str) -> None:
    with pytest.raises(OptionError, match=r"MIN\.\.MAX"):
        parse_shape(text)


def test_a_symbol_that_inputs_share_is_bound_once(tmp_path: Path) -> None:
    inputs = {"ids": ["batch", "len"], "mask": ["batch", "len"]}
    contract = contract_of(tmp_path, inputs, "ids=1,1..16..128")
    assert contract.dims == {"len": DimRange(1, 16, 128)}
    assert [spec.shape for spec in contract.inputs] == [(1, "len"), (1, "len")]
    assert contract.inputs[1].max_nbytes == 4 * 128


def test_a_pattern_binds_every_input_it_matches(tmp_path: Path) -> None:
    inputs = {f"past.{i}": [1, None, 8] for i in range(3)}
    contract = contract_of(tmp_path, inputs, "past.*=1,0..64,8")
    assert list(contract.dims.values()) == [DimRange(0, 64, 64)] * 3
    assert len({spec.shape for spec in contract.inputs}) == 3


def test_an_exact_name_beats_a_pattern(tmp_path: Path) -> None:
    inputs = {"p[0]": [None], "p0": [None]}
    contract = contract_of(tmp_path, inputs, "p[0]=3", "p0=4")
    assert [spec.shape for spec in contract.inputs] == [(3,), (4,)]


def test_exporter_symbols_get_readable_names_that_differ(tmp_path: Path) -> None:
    inputs = {"x": ["DynamicDimension.0", "x_0"], "y": ["DynamicDimension.0", "a+b"]}
    contract = contract_of(tmp_path, inputs, "x=1..2,3..4", "y=1..2,5..6")
    assert contract.inputs[0].shape[1] == "x_0"
    first, second = contract.inputs[0].shape
    assert first != second
    assert contract.inputs[1].shape[0] == first
    assert contract.dims[str(first)] == DimRange(1, 2, 2)
    assert contract.dims["x_0"] == DimRange(3, 4, 4)
    assert all(name.isidentifier() for name in contract.dims)


def test_minus_one_is_an_open_dimension(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, {"x": [-1, 8]}, "x=1..4,8")
    assert contract.inputs[0].shape == ("x_0", 8)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ((), r"say --shape 'x=\?,3,\?'"),
        (("z=1,3,5",), r"no input or dimension 'z'.*available: n, w, x"),
        (("x=1,3",), r"gives 2 dimensions for x\[n,3,w\], which has 3"),
        (("x=1,4,5",), r"gives 4 for axis 1 of x\[n,3,w\], which is always 3"),
        (("x=1,3,5", "x=2,3,5"), r"binds dimension 'n' twice: 1 and 2"),
    ],
)
def test_requests_that_do_not_fit_say_what_does(tmp_path: Path, shapes: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        contract_of(tmp_path, {"x": ["n", 3, "w"]}, *shapes)


def test_the_contract_takes_what_was_compiled_and_nothing_else(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, {"x": ["n", 8], "y": ["n"]}, "x=1..4,8")
    for rows in (1, 4):
        assert contract.check_inputs({"x": (DType.FLOAT32, (rows, 8)), "y": (DType.FLOAT32, (rows,))}) == {"n": rows}
    refused = [
        {"x": (DType.FLOAT32, (5, 8)), "y": (DType.FLOAT32, (5,))},
        {"x": (DType.FLOAT32, (0, 8)), "y": (DType.FLOAT32, (0,))},
        {"x": (DType.FLOAT32, (2, 8)), "y": (DType.FLOAT32, (3,))},
        {"x": (DType.FLOAT32, (2, 9)), "y": (DType.FLOAT32, (2,))},
        {"x": (DType.FLOAT64, (2, 8)), "y": (DType.FLOAT32, (2,))},
        {"x": (DType.FLOAT32, (2, 8))},
    ]
    for given_ in refused:
        with pytest.raises(ContractError):
            contract.check_inputs(given_)


def test_strings_reserve_a_bound_for_each_element(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, {"s": ["n"]}, "s=1..3", element=STRING)
    assert contract.inputs[0].max_nbytes == 3 * STRING_RESERVE_BYTES


def test_a_dimension_is_bound_by_its_own_name_for_all_inputs(tmp_path: Path) -> None:
    inputs = {"ids": ["batch", "len"], "mask": ["batch", "len"], "len": [4]}
    contract = contract_of(tmp_path, inputs, "batch=1..2..8", "len=4", "mask=1..2..8,1..64")
    assert contract.dims == {"batch": DimRange(1, 2, 8), "len": DimRange(1, 64, 64)}
    with pytest.raises(OptionError, match="binds dimension 'batch' twice: 2 and 3"):
        contract_of(tmp_path, inputs, "batch=2", "ids=3,4")


def test_what_is_missing_comes_with_an_example_that_binds_it(tmp_path: Path) -> None:
    inputs: dict[str, list[int | str | None]] = {
        "x": ["n", 3, None, "w"], "y": ["n", "t"], "z": [4, "w"], "k": [None], "s": ["size"],
    }  # fmt: skip
    with pytest.raises(OptionError, match="for example") as caught:
        contract_of(tmp_path, inputs, "size=2..4..8")
    example = str(caught.value).rpartition("for example ")[2].rstrip(")")
    assert example == "--shape 'x=1..8,3,32..640,32..640' --shape 'y=1..8,1..256' --shape 'k=1..256'"
    given_ = [text for text in shlex.split(example) if text != "--shape"]
    contract = contract_of(tmp_path, inputs, "size=2..4..8", *given_)
    assert contract.dims == {
        "n": DimRange(1, 8, 8), "x_2": DimRange(32, 640, 640), "w": DimRange(32, 640, 640), "t": DimRange(1, 256, 256),
        "k_0": DimRange(1, 256, 256), "size": DimRange(2, 4, 8),
    }  # fmt: skip


BATCHES: dict[str, tuple[dict[str, list[int | str | None]], tuple[str, ...], str | None]] = {
    "one input": ({"x": ["n", 8]}, ("n=1..4",), "n"),
    "all inputs": ({"x": ["n", 8], "y": ["n"]}, ("n=1..4",), "n"),
    "the first of two": ({"x": ["n", "t"], "y": ["n", "t"]}, ("n=1..4", "t=1..9"), "n"),
    "unnamed": ({"x": [None, 8]}, ("x=1..4,8",), "x_0"),
    "fixed": ({"x": ["n", 8]}, ("n=4",), None),
    "not in all inputs": ({"x": ["n", 8], "y": [8]}, ("n=1..4",), None),
    "not of one name": ({"x": ["n", 8], "y": ["m", 8]}, ("n=1..4", "m=1..4"), None),
    "on two axes": ({"x": ["n", 8], "y": ["n", "n"]}, ("n=1..4",), None),
    "not the first axis": ({"x": [8, "n"]}, ("n=1..4",), None),
    "no room for two": ({"x": ["n", 8]}, ("n=3..5",), None),
    "a scalar": ({"x": ["n", 8], "y": []}, ("n=1..4",), None),
}


@pytest.mark.parametrize("case", BATCHES)
def test_the_batch_is_found_by_its_place(tmp_path: Path, case: str) -> None:
    inputs, shapes, expected = BATCHES[case]
    contract = contract_of(tmp_path, inputs, *shapes)
    assert find_batch(contract) == expected
    for name in contract.dims:
        if name == expected:
            assert find_batch(contract, name) == name
        else:
            with pytest.raises(OptionError, match=rf"'{name}' = \d\.\.\d is not the batch.*the model takes x float32"):
                find_batch(contract, name)


def test_a_batch_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no dimension 'bach' has a range \(did you mean 'batch'"):
        find_batch(contract_of(tmp_path, {"x": ["batch", 8]}, "batch=1..4"), "bach")


def test_what_is_missing_is_named_with_what_is_known(tmp_path: Path) -> None:
    words = r"'w', axis 3 of x; axis 0 of y, usually the batch; say --shape 'x=1\.\.8,3,48,\?' --shape 'y=\?,1\.\.8'"
    with pytest.raises(OptionError, match=words):
        contract_of(tmp_path, {"x": ["n", 3, 48, "w"], "y": [None, "n"]}, "n=1..8")
