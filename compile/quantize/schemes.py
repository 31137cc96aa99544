"""The schemes a person can ask for, and what each does to an operator."""

from __future__ import annotations

import dataclasses

from compile.errors import OptionError
from targets.board import Board
from targets.errors import did_you_mean
from targets.tensor import DType


@dataclasses.dataclass(frozen=True)
class Scheme:
    """`matmul_bits`/`block`: block-quantized matrices and tables, weights only. `dynamic`: INT8 matrices whose
    activations are quantized as they come. `conv_bits`: convolution weights, per output channel. `static`: INT8
    weights and activations, whose ranges are found by calibration; `largest_code` of its weights."""

    name: str
    summary: str
    matmul_bits: int = 0
    block: int = 0
    zero_point: bool = False
    dynamic: bool = False
    conv_bits: int = 0
    static: bool = False
    largest_code: int = 127
    needs: tuple[DType, ...] = ()


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp32", "weights as they are"),
        Scheme(
            "int8-dynamic",
            "INT8 matrices, activations quantized as they come: fastest where many rows pass",
            dynamic=True,
            needs=(DType.INT8,),
        ),
        Scheme(
            "int8-static",
            "INT8 weights and calibrated activations: fastest where convolutions dominate",
            static=True,
            needs=(DType.INT8, DType.UINT8),
        ),
        Scheme(
            "int8-weights",
            "INT8 weights in blocks of 64, convolutions per channel; activations stay float",
            matmul_bits=8,
            block=64,
            conv_bits=8,
            needs=(DType.INT8,),
        ),
        Scheme(
            "int4",
            "INT4 matrices in blocks of 32 with zero points, convolutions INT8 per channel",
            matmul_bits=4,
            block=32,
            zero_point=True,
            conv_bits=8,
            needs=(DType.INT4, DType.INT8),
        ),
    )
}


# Without VNNI, x86-64 adds two products of a uint8 and an int8 in 16 bits: 2 * 255 * 64 still fits.
SATURATING = "x86_64"
CODE_THAT_FITS = 64


def choose_scheme(name: str, board: Board) -> Scheme:
    """The scheme of that name as the board executes it; OptionError where its runtime cannot."""
    if name not in SCHEMES:
        raise OptionError(f"unknown scheme {name!r}", did_you_mean(name, SCHEMES))
    scheme = SCHEMES[name]
    missing = [dtype.value for dtype in scheme.needs if dtype not in board.runtime.dtypes]
    if missing:
        legal = [s.name for s in SCHEMES.values() if all(dtype in board.runtime.dtypes for dtype in s.needs)]
        raise OptionError(
            f"scheme {name!r} needs {' and '.join(missing)}, which {board.name} ({board.runtime.name} "
            f"{board.runtime.version}) cannot execute",
            f"available there: {', '.join(legal)}",
        )
    return dataclasses.replace(scheme, largest_code=CODE_THAT_FITS) if board.arch == SATURATING else scheme
