"""A result as the body of a message: small tensors in it, large ones by reference; and what rules look at. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.mqtt.rules import Figure, ResultOptions, Withheld
from agent.strings import unpack_strings
from targets.tensor import DType, TensorSpec

_NUMPY = {each.value: np.dtype(each.numpy) for each in DType if each.numpy and each is not DType.STRING}


class Tensor(NamedTuple):
    """An output: `data` are its bytes, little-endian, in C order."""

    spec: TensorSpec
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class Origin(NamedTuple):
    """Which result it is: the `number`-th of the model since the start that `epoch` names."""

    model: str
    version: str
    epoch: str
    number: int
    id: str | None = None
    timing: Mapping[str, int] | None = None

    @property
    def href(self) -> str:
        """Where the agent gives it over HTTP, as long as it keeps it."""
        return f"/v2/models/{self.model}/results?since={self.epoch}-{self.number - 1}"


def digest_of(tensors: Sequence[Tensor]) -> bytes:
    """Tells results from others."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.spec.name} {tensor.spec.dtype.value} {tensor.shape}".encode())
        digest.update(tensor.data.data)
    return digest.digest()


def chosen(tensors: Sequence[Tensor], options: ResultOptions) -> list[Tensor]:
    """Those of the outputs that are told of."""
    return [each for each in tensors if not options.outputs or each.spec.name in options.outputs]


def figure_of(tensors: Sequence[Tensor], options: ResultOptions) -> float | None:
    """The number that the rule's output comes down to; None where there is none: it is empty, or no numbers."""
    found = next((each for each in tensors if not options.output or each.spec.name == options.output), None)
    values = None if found is None else _values(found)
    if values is None or not values.size or values.dtype.kind not in "fiub":
        return None
    number = float(_FIGURES[options.figure](values.ravel()))
    return None if np.isnan(number) else number


_FIGURES: dict[Figure, Any] = {
    Figure.MAX: np.max,
    Figure.MIN: np.min,
    Figure.MEAN: lambda values: np.mean(values, dtype=np.float64),
    Figure.FIRST: lambda values: values[0],
    Figure.ARGMAX: np.argmax,
}


def body_of(
    origin: Origin, tensors: Sequence[Tensor], withheld: Withheld, inline_bytes: int, figure: float | None = None
) -> dict[str, object]:
    """The body of `result/1`. The smallest tensors are in it, as long as they are no more than `inline_bytes`."""
    left, inside = inline_bytes, set()
    for index in sorted(range(len(tensors)), key=lambda each: tensors[each].data.nbytes):
        left -= tensors[index].data.nbytes
        if left < 0:
            break
        inside.add(index)
    body: dict[str, object] = {
        "model": origin.model,
        "version": origin.version,
        "number": origin.number,
        "epoch": origin.epoch,
        "outputs": [_output(origin, each, index in inside) for index, each in enumerate(tensors)],
    }
    if origin.id is not None:
        body["id"] = origin.id[:256]
    if origin.timing is not None:
        body["timing"] = dict(origin.timing)
    if figure is not None and np.isfinite(figure):
        body["figure"] = figure
    if withheld.count:
        body["withheld"] = {"rule": withheld.rule, "rate": withheld.rate, "missed": withheld.missed}
    return body


def _output(origin: Origin, tensor: Tensor, inline: bool) -> dict[str, object]:
    head: dict[str, object] = {
        "name": tensor.spec.name,
        "datatype": tensor.spec.dtype.oip,
        "shape": list(tensor.shape),
    }
    if not inline:
        nbytes, sha256 = tensor.data.nbytes, hashlib.sha256(tensor.data.data).hexdigest()
        return {**head, "ref": {"bytes": nbytes, "sha256": sha256, "href": origin.href}}
    values = _values(tensor)
    if tensor.spec.dtype is DType.STRING:
        texts = _texts(tensor)
        return {**head, "raw": bytes(tensor.data)} if texts is None else {**head, "data": texts}
    # What has no number in JSON (NaN, infinity) goes as bytes, whole.
    if values is None or (values.dtype.kind == "f" and not np.isfinite(values).all()):
        return {**head, "raw": bytes(tensor.data)}
    return {**head, "data": values.ravel().tolist()}


def _values(tensor: Tensor) -> NDArray[Any] | None:
    dtype = _NUMPY.get(tensor.spec.dtype.value)
    return None if dtype is None else tensor.data.view(dtype)


def _texts(tensor: Tensor) -> list[str] | None:
    try:
        count = int(np.prod(tensor.shape, dtype=np.int64))
        return [bytes(each).decode("utf-8") for each in unpack_strings(tensor.data.data, count)]
    except UnicodeDecodeError:
        return None
