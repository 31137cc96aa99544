"""--shape: its grammar, what it binds, and the contract that follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from compile.errors import OptionError
from compile.graph import load_model
from compile.shapes import STRING_RESERVE_BYTES, bind_shapes, build_contract, parse_shape
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


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_the_grammar_reads_what_it_prints(rows: list[tuple[int, int, int]]) -> None:
    ranges = tuple(DimRange(a, a + b, a + b + c) for a, b, c in rows)
    text = ",".join(f"{r.min}..{r.opt}..{r.max}" for r in ranges)
    assert parse_shape(f"a=b={text}") == ("a=b", ranges)
    assert parse_shape("x=" + ",".join(str(r) for r in ranges))[1] == tuple(
        DimRange(r.min, r.max, r.max) for r in ranges
    )


@pytest.mark.parametrize(
    "text", ["x", "=1", "x=a", "x=-1", "x=1..", "x=1..2..3..4", "x=5..1", "x=1..9..4", "x=1,,3", "x=1.5"]
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


def test_what_is_missing_is_named_with_what_is_known(tmp_path: Path) -> None:
    words = r"'w', axis 3 of x; axis 0 of y, usually the batch; say --shape 'x=1\.\.8,3,48,\?' --shape 'y=\?,1\.\.8'"
    with pytest.raises(OptionError, match=words):
        contract_of(tmp_path, {"x": ["n", 3, 48, "w"], "y": [None, "n"]}, "n=1..8")
