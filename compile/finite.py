"""NaN and infinity in weights, found in what passes by while tensors are streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.errors import ModelError

Floats = npt.NDArray[Any]
"""Any element type with NaN: those of numpy, and the 16- and 8-bit ones of ml_dtypes."""

# Elements looked at together, when a tensor that is refused is counted.
_PIECE = 1 << 20


def refuse_nan(name: str, piece: Floats, whole: Floats) -> None:
    """Raise ModelError if a piece of a tensor holds NaN, which no model means. Infinities are legal, in masks."""
    if np.isnan(piece).any():
        raise _refusal(name, whole)


def refuse_nonfinite(name: str, piece: Floats, whole: Floats) -> None:
    """Raise ModelError if a piece of a weight holds NaN or infinity, which no integer code can stand for."""
    if not np.isfinite(piece).all():
        raise _refusal(name, whole)


def _refusal(name: str, whole: Floats) -> ModelError:
    nan = sum(int(np.isnan(piece).sum()) for piece in _pieces(whole))
    infinite = sum(int(np.isinf(piece).sum()) for piece in _pieces(whole))
    found = " and ".join(f"{count} {what}" for count, what in ((nan, "NaN"), (infinite, "infinite")) if count)
    hint = "repair the model" if nan else "repair the model, or compile with --scheme fp32"
    return ModelError(f"tensor {name!r} holds {found} among its {whole.size} values", hint)


def _pieces(whole: Floats) -> Iterator[Floats]:
    flat = whole.reshape(-1)
    yield from (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
