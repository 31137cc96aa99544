"""Encoded images for tests, and bundles that take them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
from numpy.typing import NDArray
from onnx import helper

from targets.budget import Term
from targets.bundle import read_manifest
from targets.recipe import Recipe, memory_bytes, parse_recipe
from targets.tensor import Contract, DType
from tests.support.bundles import dense, model_of, rewrite, write_bundle

Pixels = NDArray[np.uint8]
"""[height, width, 3]: red, green, blue."""

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
COLOURS = "red\ngreen\nblue\n"
UNIT = "[normalise]\nscale = 0.00392156862745098\n"
CLASSIFIER = 'schema = 1\n[resize]\nmode = "stretch"\n[post]\nop = "classify"\nlabels = "labels.txt"\n' + UNIT
DETECTOR = (
    """
schema = 1
[resize]
mode = "letterbox"
[post]
op = "nanodet"
labels = "labels.txt"
strides = [8, 16]
scores = ["scores8", "scores16"]
distances = ["distances8", "distances16"]
"""
    + UNIT
)


def plain(width: int, height: int, colour: tuple[int, int, int] = RED) -> Pixels:
    return np.full((height, width, 3), colour, np.uint8)


def noise(width: int, height: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def jpeg(pixels: Pixels, *flags: int) -> bytes:
    return cv2.imencode(".jpg", pixels[..., ::-1], list(flags))[1].tobytes()


def png(pixels: Pixels) -> bytes:
    return cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, packed: bytes, *between: bytes) -> bytes:
    """A PNG of 8-bit RGB whose header may say anything."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"".join((chunk(b"IHDR", header), *between, chunk(b"IDAT", packed), chunk(b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + body


def turned(data: bytes, orientation: int) -> bytes:
    """A JPEG with that EXIF orientation (1 to 8)."""
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    tiff = b"MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4)
    segment = b"Exif\0\0" + tiff
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


def classifier(folder: Path, recipe: str = CLASSIFIER) -> Path:
    """`y` [1,3]: the mean of each channel of `x` [1,3,8,8]."""
    x, y = dense("x", DType.FLOAT32, 1, 3, 8, 8), dense("y", DType.FLOAT32, 1, 3)
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["m"]), helper.make_node("Flatten", ["m"], ["y"])]
    return with_recipe(write_bundle(folder, [model_of(nodes, [x], [y])], Contract((x,), (y,), {})), recipe)


def detector(folder: Path, recipe: str = DETECTOR) -> Path:
    """A head of two strides over `x` [1,3,64,64]: a cell's scores are the mean colours of its pixels (stride 8) or zero
    (stride 16); every distance is one stride to the left and up, two to the right and down."""
    x = dense("x", DType.FLOAT32, 1, 3, 64, 64)
    bins = np.full((4, 4), -20, np.float32)
    bins[[0, 1, 2, 3], [1, 1, 2, 2]] = 20
    nodes: list[Any] = []
    weights: dict[str, NDArray[Any]] = {}
    outputs = []
    for stride in (8, 16):
        cells = (64 // stride) ** 2
        scores, distances = f"scores{stride}", f"distances{stride}"
        outputs += [dense(scores, DType.FLOAT32, 1, cells, 3), dense(distances, DType.FLOAT32, 1, cells, 16)]
        weights[f"shape{stride}"] = np.array([1, cells, 3], np.int64)
        weights[f"gain{stride}"] = np.array(stride == 8, np.float32)
        weights[f"bins{stride}"] = np.tile(bins.reshape(-1), (1, cells, 1))
        nodes += [
            helper.make_node("AveragePool", ["x"], [f"p{stride}"], kernel_shape=[stride] * 2, strides=[stride] * 2),
            helper.make_node("Transpose", [f"p{stride}"], [f"t{stride}"], perm=[0, 2, 3, 1]),
            helper.make_node("Reshape", [f"t{stride}", f"shape{stride}"], [f"r{stride}"]),
            helper.make_node("Mul", [f"r{stride}", f"gain{stride}"], [scores]),
            helper.make_node("Identity", [f"bins{stride}"], [distances]),
        ]
    model = model_of(nodes, [x], outputs, weights)
    return with_recipe(write_bundle(folder, [model], Contract((x,), tuple(outputs), {})), recipe)


def with_recipe(folder: Path, text: str) -> Path:
    """Give a bundle a recipe, the colours as labels, and a plan that counts what images take."""
    recipe: Recipe = parse_recipe(text, "test")
    (folder / "assets").mkdir()
    (folder / "assets" / "labels.txt").write_text(COLOURS)
    manifest = read_manifest(folder)
    load, run = manifest.plan.phases
    bodies = manifest.plan.slots * 2 * recipe.decode.max_bytes
    images = Term("recipe", "anonymous", memory_bytes(recipe, manifest.contract))
    terms = tuple(Term("bodies", "anonymous", bodies) if t.name == "bodies" else t for t in run.terms)
    phases = (load, msgspec.structs.replace(run, terms=(*terms, images)))
    plan = msgspec.structs.replace(manifest.plan, phases=phases)
    return rewrite(folder, manifest, plan=plan, recipe=recipe, assets=("assets/labels.txt",))
