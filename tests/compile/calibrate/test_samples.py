"""Samples: what is read, and one clear error for each file that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile.calibrate.samples import iterate, read_npz, read_samples
from compile.calibrate.synthetic import corners, random_samples
from compile.errors import DataError
from compile.graph import load_model
from compile.shapes import bind_shapes, contract_inputs, parse_shape
from targets.tensor import Contract, DimRange, DType, TensorSpec
from tests.support.models import init, model, node, normal, save, value

PAIR = Contract(
    (TensorSpec("x", DType.FLOAT32, ("n", 4), 64), TensorSpec("m", DType.INT64, ("n",), 32)),
    (),
    {"n": DimRange(1, 2, 4)},
)
ONE = Contract((TensorSpec("x", DType.FLOAT32, (2, 4), 32),), (), {})


def test_an_npz_is_one_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=normal(3, 4), m=np.arange(3))
    (sample,) = read_samples(tmp_path / "a.npz", PAIR, 8)
    np.testing.assert_array_equal(sample["x"], normal(3, 4))


def test_one_axis_more_is_several_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=normal(5, 3, 4), m=np.zeros((5, 3), np.int64))
    assert len(read_samples(tmp_path / "a.npz", PAIR, 8)) == 5
    assert len(read_samples(tmp_path / "a.npz", PAIR, 2)) == 2


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        np.save(tmp_path / f"{name}.npy", np.full((2, 4), ord(name), np.float32))
    (tmp_path / "notes.txt").write_text("x")
    assert [s["x"][0, 0] for s in read_samples(tmp_path, ONE, 2)] == [ord("a"), ord("b")]


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


X, M = normal(2, 4), np.zeros(2, np.int64)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"x": X.astype(np.int32), "m": M}, "input 'x' is int32"),
    "shape": ({"x": normal(2, 5), "m": M}, "size 5 on axis 1"),
    "range": ({"x": normal(9, 4), "m": np.zeros(9, np.int64)}, "size 9 on axis 0"),
    "disagree": ({"x": X, "m": np.zeros(3, np.int64)}, "disagree on dimension 'n'"),
    "missing": ({"x": X}, "input 'm' is missing"),
    "unknown": ({"x": X, "m": M, "z": M}, "unknown input 'z'.*available: m, x"),
    "complex": ({"x": X.astype(np.complex64), "m": M}, "element type complex64"),
    "counts": ({"x": normal(3, 2, 4), "m": np.zeros((2, 2), np.int64)}, "different numbers of samples"),
    "empty": ({"x": normal(0, 2, 4), "m": np.zeros((0, 2), np.int64)}, "holds no samples"),
    "pickled": ({"x": np.array([{}], object), "m": M}, "objects are refused"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_is_named_with_its_file(tmp_path: Path, bad: str) -> None:
    arrays, words = BAD[bad]
    with pytest.raises(DataError, match=rf"(?s)bad\.npz.*{words}"):
        read_samples(write(tmp_path / "bad.npz", **arrays), PAIR, 8)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04rest", b"text", b"\x93NUMPY\x01\x00"])
@pytest.mark.parametrize("name", ["a.npz", "a.npy"])
def test_files_that_hold_no_arrays(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="cannot read samples from"):
        read_samples(tmp_path / name, ONE, 8)


def test_a_file_under_the_other_suffix_is_read_for_what_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    (tmp_path / "a.npy").rename(tmp_path / "b.npz")
    assert list(read_npz(tmp_path / "b.npz")) == [""]
    write(tmp_path / "c.npz", x=X).rename(tmp_path / "d.npy")
    assert list(read_npz(tmp_path / "d.npy")) == ["x"]


def test_a_truncated_npz_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.npz", x=normal(100, 4)).read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[:-100])
    with pytest.raises(DataError, match="cannot read samples"):
        read_samples(tmp_path / "a.npz", ONE, 8)


def test_places_without_samples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not there"):
        read_samples(tmp_path / "no.npz", ONE, 8)
    with pytest.raises(DataError, match=r"holds no samples.*\.npz, \.npy"):
        read_samples(tmp_path, ONE, 8)


def test_random_samples_fit_the_contract_and_index_within_their_table(tmp_path: Path) -> None:
    nodes = [node("Unsqueeze", ["i", "zero"], ["u"]), node("Gather", ["t", "u"], ["y"])]
    weights = [init("t", normal(7, 4)), init("zero", np.array([0]))]
    inputs = [value("i", ["n"], 7), value("flag", [50], 9), value("text", [2], 8)]
    outputs = [value("y", None), value("flag", [50], 9), value("text", [2], 8)]
    graph = load_model(save(tmp_path, model(nodes, inputs, outputs, weights)))
    dims = bind_shapes(graph, (parse_shape("i=1..100..900"),))
    contract = Contract(contract_inputs(graph, dims), (), dims)
    assert corners(dims) == ("opt", "min", "max")
    assert corners({}) == ("opt",)
    samples = random_samples(graph, contract, corners(dims))
    assert [len(s["i"]) for s in samples] == [100, 1, 900]
    assert set(samples[2]["i"].tolist()) == set(range(7))
    again = random_samples(graph, contract, corners(dims))
    assert all((a[name] == b[name]).all() for a, b in zip(samples, again, strict=True) for name in a)


def test_raw_files_hold_samples_one_after_the_other(tmp_path: Path) -> None:
    normal(3, 2, 4).tofile(tmp_path / "a.bin")
    normal(2, 2, 4, seed=1).tofile(tmp_path / "b.raw")
    samples = read_samples(tmp_path, ONE, 9)
    np.testing.assert_array_equal([s["x"] for s in samples], [*normal(3, 2, 4), *normal(2, 2, 4, seed=1)])


@pytest.mark.parametrize("nbytes", [0, 31, 33])
def test_raw_files_that_hold_no_whole_samples(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0" * nbytes)
    with pytest.raises(DataError, match=rf"a\.bin: 'x' float32\[2, 4\] takes 32 bytes, the file has {nbytes}"):
        read_samples(tmp_path / "a.bin", ONE, 8)


def test_raw_files_hold_one_input(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0" * 64)
    with pytest.raises(DataError, match=r"a\.bin: a raw file holds one input, the model takes x, m"):
        read_samples(tmp_path / "a.bin", PAIR, 8)


def test_each_line_of_a_jsonl_file_is_a_sample(tmp_path: Path) -> None:
    lines = [{"x": normal(n, 4, seed=n).tolist(), "m": list(range(n))} for n in (1, 3)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    samples = read_samples(tmp_path / "a.jsonl", PAIR, 8)
    assert [(s["x"].shape, s["x"].dtype, s["m"].dtype) for s in samples] == [
        ((1, 4), np.float32, np.int64),
        ((3, 4), np.float32, np.int64),
    ]
    np.testing.assert_array_equal(samples[1]["x"], normal(3, 4, seed=3))


BAD_LINES = {
    "json": ('{"x": [[1, 2', "not JSON"),
    "array": ("[1, 2]", "not an object"),
    "ragged": ('{"x": [[1, 2, 3, 4], [1]], "m": [0, 1]}', "'x': .*nested lists of equal lengths"),
    "text": ('{"x": [["a", "b", "c", "d"]], "m": [0]}', "'x': .*nested lists"),
    "missing": ('{"x": [[1, 2, 3, 4]]}', "input 'm' is missing"),
    "unknown": ('{"x": [[1, 2, 3, 4]], "m": [0], "z": 1}', "unknown input 'z'"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, bad: str) -> None:
    line, words = BAD_LINES[bad]
    (tmp_path / "a.jsonl").write_text(f'{{"x": [[1, 2, 3, 4]], "m": [0]}}\n{line}\n')
    with pytest.raises(DataError, match=rf"(?s)a\.jsonl.*{words}"):
        read_samples(tmp_path / "a.jsonl", PAIR, 8)


def test_float64_is_taken_as_float32_and_said_once(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", x=normal(3, 2, 4).astype(np.float64), m=np.zeros((3, 2), np.int64))
    told: list[str] = []
    samples = read_samples(tmp_path / "a.npz", PAIR, 8, told.append)
    assert {s["x"].dtype for s in samples} == {np.dtype(np.float32)}
    assert [text.partition(": ")[2] for text in told] == [
        "'x' is float64; it is taken as the float32 that the model takes"
    ]


def test_nan_is_refused_where_ranges_are_looked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.npz", x=np.full((2, 4), np.nan, np.float32), m=M)
    assert np.isnan(read_samples(path, PAIR, 8)[0]["x"]).all()
    with pytest.raises(DataError, match=r"bad\.npz: 'x' holds NaN"):
        list(iterate(path, PAIR))
