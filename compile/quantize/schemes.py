"""The schemes a person can ask for, what each does to an operator, and what can be chosen of its blocks."""

from __future__ import annotations

import dataclasses

from compile.errors import OptionError
from targets.board import Board
from targets.errors import did_you_mean
from targets.tensor import DType


@dataclasses.dataclass(frozen=True)
class Scheme:
    """`matmul_bits`/`block`/`zero_point`: block-quantized matrices and tables, weights only; block and zero point are
    what it does unless asked otherwise. `dynamic`: INT8 matrices whose activations are quantized as they come.
    `conv_bits`: convolution weights, per output channel. `static`: INT8 weights and activations, whose ranges are
    found by calibration; `largest_code` of its weights. `half`: FP16 where
    calibration shows that it holds every value."""

    name: str
    summary: str
    matmul_bits: int = 0
    block: int = 0
    zero_point: bool = False
    dynamic: bool = False
    conv_bits: int = 0
    static: bool = False
    half: bool = False
    largest_code: int = 127
    needs: tuple[DType, ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether it needs the ranges of activations."""
        return self.static or self.half

    def recorded(self) -> dict[str, str]:
        """What was chosen of its blocks, as the manifest keeps it; nothing where it has none."""
        return {"block": str(self.block), "symmetric": str(not self.zero_point).lower()} if self.block else {}


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp32", "weights as they are"),
        Scheme(
            "fp16",
            "FP16 where calibration shows that it holds every value, for boards that compute in it",
            half=True,
            needs=(DType.FLOAT16,),
        ),
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
            "INT8 matrices in symmetric blocks of 64, convolutions INT8 per channel",
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

# Weights that share a scale, along the reduced axis. onnxruntime's kernels take powers of two from 16 on, with and
# without zero points; below 32 scales weigh as much as codes do, beyond 128 they weigh nothing.
BLOCKS = (32, 64, 128)

# Without VNNI, x86-64 adds two products of a uint8 and an int8 in 16 bits: 2 * 255 * 64 still fits.
SATURATING = "x86_64"
CODE_THAT_FITS = 64


def choose_scheme(name: str, board: Board, block: int | None = None, symmetric: bool | None = None) -> Scheme:
    """The scheme of that name as the board executes it, with other blocks than its own where they are asked for.

    `symmetric`: whether blocks do without zero points. Raises OptionError where the board's runtime cannot execute the
    scheme, where it has no blocks to choose, and for a block length that is not in BLOCKS.
    """
    if name not in SCHEMES:
        raise OptionError(f"unknown scheme {name!r}", did_you_mean(name, SCHEMES))
    scheme = SCHEMES[name]
    missing = _missing(scheme, board)
    if missing:
        legal = [each.name for each in SCHEMES.values() if not _missing(each, board)]
        raise OptionError(
            f"scheme {name!r} needs {' and '.join(missing)}, which {board.name} ({board.runtime.name} "
            f"{board.runtime.version}) cannot execute",
            f"available there: {', '.join(legal)}",
        )
    scheme = _with_blocks(scheme, block, symmetric)
    return dataclasses.replace(scheme, largest_code=CODE_THAT_FITS) if board.arch == SATURATING else scheme


def _missing(scheme: Scheme, board: Board) -> list[str]:
    """Types that the board would have to compute with."""
    # A runtime may take FP16 and compute in FP32: that would cost Casts and win nothing.
    halves = (DType.FLOAT16,) if scheme.half and DType.FLOAT16.value not in board.compute else ()
    return [dtype.value for dtype in scheme.needs if dtype not in board.runtime.dtypes or dtype in halves]


def _with_blocks(scheme: Scheme, block: int | None, symmetric: bool | None) -> Scheme:
    given = [f"--block {block}"] * (block is not None) + _ZERO_POINT_OPTIONS[symmetric]
    if given and not scheme.block:
        blocked = ", ".join(each.name for each in SCHEMES.values() if each.block)
        raise OptionError(
            f"{' and '.join(given)}: scheme {scheme.name!r} does not quantize in blocks", f"those that do: {blocked}"
        )
    if block is not None and block not in BLOCKS:
        raise OptionError(f"--block {block} is no block length", f"available: {', '.join(map(str, BLOCKS))}")
    return dataclasses.replace(
        scheme,
        block=scheme.block if block is None else block,
        zero_point=scheme.zero_point if symmetric is None else not symmetric,
    )


_ZERO_POINT_OPTIONS: dict[bool | None, list[str]] = {None: [], True: ["--symmetric"], False: ["--zero-points"]}
