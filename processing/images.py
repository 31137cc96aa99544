"""Encoded images to pixels and pixels to a tensor, with OpenCV. The one module that imports it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from processing.headers import read_header
from targets.errors import ImageError
from targets.recipe import CentreCrop, Decode, KeepHeight, Letterbox, Normalise, Recipe
from targets.tensor import DimRange, human

# The cores are the engine's; and pieces of one image on several threads would hold several pieces in memory.
cv2.setNumThreads(1)
# A damaged image is answered to whoever sent it, it is nothing for the log.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

Pixels = NDArray[np.uint8]
"""[height, width, 3]: blue, green, red."""

_INTERPOLATIONS = {
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
    "nearest": cv2.INTER_NEAREST,
}
_COLOURS = {"rgb": cv2.COLOR_BGR2RGB, "gray": cv2.COLOR_BGR2GRAY}


@dataclass(frozen=True, slots=True)
class Frame:
    """Where an image stands in the tensor: a point at (x, y) of the image is at (x scale_x + left, y scale_y + top).

    `width` and `height` are the image's, after its orientation was applied.
    """

    width: int
    height: int
    scale_x: float
    scale_y: float
    left: float
    top: float


def decode(data: bytes, limits: Decode) -> Pixels:
    """The pixels of a JPEG or PNG file; transparency is dropped. Raises ImageError.

    Size and wholeness are judged by the header first: what is too large is never decoded.
    """
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has {human(len(data))}", f"at most {human(limits.max_bytes)} are taken")
    header = read_header(data)
    if header.width * header.height > limits.max_pixels:
        raise ImageError(
            f"the image is {header.width} x {header.height} pixels", f"at most {limits.max_pixels} are taken in all"
        )
    flags = cv2.IMREAD_COLOR | (0 if limits.orientation == "exif" else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        pixels = None
    if pixels is None or pixels.shape[:2] not in ((header.height, header.width), (header.width, header.height)):
        raise ImageError(f"the {header.kind.upper()} is damaged", "it cannot be decoded")
    return np.asarray(pixels, np.uint8)


@dataclass(frozen=True, slots=True)
class Placed:
    """A resized image, and where it goes in a tensor of `height` x `width`: at (`top`, `left`), the rest is `fill`."""

    pixels: Pixels
    height: int
    width: int
    top: int
    left: int
    fill: float
    frame: Frame


def place(pixels: Pixels, recipe: Recipe, height: DimRange, width: DimRange) -> Placed:
    """Resize for a model of that size (where it is a range and proportions do not decide, its optimum)."""
    mode = recipe.resize
    rows, columns = pixels.shape[:2]
    if isinstance(mode, KeepHeight):
        wanted = max(math.ceil(columns * height.opt / rows), 1)
        new_rows, new_columns = height.opt, min(wanted, width.max)
        size, fill = (height.opt, max(new_columns, width.min)), mode.fill
        top = left = 0
    elif isinstance(mode, Letterbox):
        size, fill = (height.opt, width.opt), mode.fill
        scale = min(size[0] / rows, size[1] / columns)
        new_rows, new_columns = max(int(rows * scale), 1), max(int(columns * scale), 1)
        top, left = (size[0] - new_rows) // 2, (size[1] - new_columns) // 2
    elif isinstance(mode, CentreCrop):
        return _crop(pixels, mode, height.opt, width.opt)
    else:
        size, fill = (height.opt, width.opt), 0.0
        new_rows, new_columns = size
        top = left = 0
    resized = _resize(pixels, new_rows, new_columns, mode.interpolation)
    frame = Frame(columns, rows, new_columns / columns, new_rows / rows, left, top)
    return Placed(resized, *size, top, left, fill, frame)


def _crop(pixels: Pixels, mode: CentreCrop, height: int, width: int) -> Placed:
    """Cut the window out first, so that only what is kept is resized."""
    rows, columns = pixels.shape[:2]
    scale = max(height / rows, width / columns) / mode.share
    window_rows, window_columns = (
        max(min(round(size / scale), most), 1) for size, most in ((height, rows), (width, columns))
    )
    top, left = (rows - window_rows) // 2, (columns - window_columns) // 2
    window = pixels[top : top + window_rows, left : left + window_columns]
    resized = _resize(window, height, width, mode.interpolation)
    scale_x, scale_y = width / window_columns, height / window_rows
    return Placed(
        resized, height, width, 0, 0, 0.0, Frame(columns, rows, scale_x, scale_y, -left * scale_x, -top * scale_y)
    )


def _resize(pixels: Pixels, rows: int, columns: int, interpolation: str) -> Pixels:
    if pixels.shape[:2] == (rows, columns):
        return pixels
    resized = cv2.resize(pixels, (columns, rows), interpolation=_INTERPOLATIONS[interpolation])
    return np.asarray(resized, np.uint8)


def write(placed: Placed, recipe: Recipe, out: NDArray[Any]) -> None:
    """Colour, normalise and lay out into `out`, whose shape is `recipe.shape(height, width)`, in its element type."""
    pixels = placed.pixels
    if recipe.colour in _COLOURS:
        pixels = np.asarray(cv2.cvtColor(pixels, _COLOURS[recipe.colour]), np.uint8)
    pixels = pixels.reshape(*pixels.shape[:2], recipe.channels)
    planes = out[0] if recipe.layout == "nchw" else np.moveaxis(out[0], -1, 0)
    rows, columns = pixels.shape[:2]
    below, right = placed.top + rows, placed.left + columns
    # A pixel has 256 values, so normalising is looking it up.
    tables = table(recipe.normalise, recipe.channels, np.append(np.arange(256.0), placed.fill), out.dtype)
    for channel, (plane, values) in enumerate(zip(planes, tables, strict=True)):
        if (rows, columns) != plane.shape:
            plane[...] = values[-1]
        plane[placed.top : below, placed.left : right] = values[pixels[..., channel]]


def table(normalise: Normalise, channels: int, pixels: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """[channels, len(pixels)]: the normalised pixel values, computed in float64; integers are rounded and clipped."""
    mean, std = (np.broadcast_to(np.array(v), channels)[:, None] for v in (normalise.mean, normalise.std))
    values = (pixels * normalise.scale - mean) / std
    if dtype.kind == "u":
        values = np.clip(np.rint(values), 0, np.iinfo(dtype).max)
    return np.asarray(values, dtype)
