"""Results as bodies of messages."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.mqtt.results import Origin, Tensor, body_of, chosen, digest_of, figure_of
from agent.mqtt.rules import Figure, ResultOptions, When, Withheld
from agent.strings import pack_strings
from targets.tensor import DType, TensorSpec

ORIGIN = Origin("m", "v1", "ab12", 7)


def tensor(values: NDArray[np.generic], name: str = "y") -> Tensor:
    spec = TensorSpec(name, DType(values.dtype.name), values.shape, values.nbytes)
    return Tensor(spec, values.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def strings(*texts: bytes) -> Tensor:
    data = np.frombuffer(pack_strings(texts), np.uint8)
    return Tensor(TensorSpec("s", DType.STRING, (len(texts),), 1000), (len(texts),), data)


def outputs(*tensors: Tensor, inline: int = 4096) -> list[dict[str, object]]:
    found = body_of(ORIGIN, tensors, Withheld(), inline)["outputs"]
    assert isinstance(found, list)
    return found


def test_small_tensors_are_inside() -> None:
    (output,) = outputs(tensor(np.array([[1.5, 2.0]], np.float32)))
    assert output == {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}


def test_large_ones_are_by_reference_and_the_smallest_go_first() -> None:
    large, small = tensor(np.arange(100, dtype=np.int64), "large"), tensor(np.array([1], np.int32), "small")
    first, second = outputs(large, small, inline=100)
    assert first["ref"] == {
        "bytes": 800,
        "sha256": hashlib.sha256(np.arange(100, dtype=np.int64).tobytes()).hexdigest(),
        "href": "/v2/models/m/results?since=ab12-6",
    }
    assert "data" not in first
    assert second["data"] == [1]


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_json_cannot_say_is_bytes(odd: float) -> None:
    values = np.array([odd, 1.0], np.float32)
    (output,) = outputs(tensor(values))
    assert output["raw"] == values.tobytes()


def test_texts() -> None:
    assert outputs(strings(b"a", "\u00e9".encode()))[0]["data"] == ["a", "\u00e9"]
    assert outputs(strings(b"\xff"))[0]["raw"] == pack_strings([b"\xff"])


def test_half_floats_are_numbers() -> None:
    assert outputs(tensor(np.array([0.5], np.float16)))[0]["data"] == [0.5]


def test_what_was_withheld_is_said_and_only_then() -> None:
    assert "withheld" not in body_of(ORIGIN, (), Withheld(), 0)
    assert body_of(ORIGIN, (), Withheld(1, 2, 3), 0)["withheld"] == {"rule": 1, "rate": 2, "missed": 3}


@pytest.mark.parametrize(
    ("figure", "value"),
    [(Figure.MAX, 4.0), (Figure.MIN, -1.0), (Figure.MEAN, 5 / 3), (Figure.FIRST, 2.0), (Figure.ARGMAX, 2.0)],
)
def test_figures(figure: Figure, value: float) -> None:
    options = ResultOptions("m", when=When.CHANGE, by=0.0, output="y", figure=figure)
    assert figure_of([tensor(np.array([9], np.int8), "x"), tensor(np.array([2, -1, 4], np.int8))], options) == (
        pytest.approx(value)
    )


@pytest.mark.parametrize("none", [np.array([], np.float32), np.array([np.nan], np.float32)])
def test_no_figure(none: NDArray[np.float32]) -> None:
    assert figure_of([tensor(none)], ResultOptions("m")) is None
    assert figure_of([], ResultOptions("m")) is None
    assert figure_of([strings(b"a")], ResultOptions("m")) is None


def test_digests_and_choice() -> None:
    one, other = tensor(np.array([1, 2], np.int32), "a"), tensor(np.array([1, 2], np.int32), "b")
    assert digest_of([one]) != digest_of([other])
    assert digest_of([one]) != digest_of([tensor(np.array([[1, 2]], np.int32), "a")])
    assert chosen([one, other], ResultOptions("m", outputs=("b",))) == [other]
    assert chosen([one, other], ResultOptions("m")) == [one, other]
