"""Decoding, sizing and laying out images."""

from __future__ import annotations

import contextlib
import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processing.images import decode
from processing.preprocess import Preprocessor
from targets.errors import ImageError
from targets.recipe import Decode, parse_recipe
from targets.tensor import Contract, DimRange, DType, TensorSpec
from tests.support.images import BLUE, GREEN, RED, jpeg, noise, plain, png, png_of, turned

LIMITS = Decode(max_pixels=10_000, max_bytes=100_000)


def preprocessor(resize: str, *shape: int | str, more: str = "", dtype: DType = DType.FLOAT32) -> Preprocessor:
    text = f'schema = 1\n{more}\n[resize]\n{resize}\n[post]\nop = "classify"\n'
    spec = TensorSpec("x", dtype, shape, 0)
    return Preprocessor(parse_recipe(text, "test"), Contract((spec,), (), {"w": DimRange(20, 40, 100)}))


def test_decode_gives_blue_green_red() -> None:
    pixels = noise(40, 30)
    assert np.array_equal(decode(png(pixels), LIMITS), pixels[..., ::-1])
    blue = decode(jpeg(plain(8, 8, BLUE)), LIMITS)[0, 0]
    assert blue[0] > 250
    assert blue[2] < 5


def test_exif_orientation_is_applied_or_ignored() -> None:
    # The left half red, the right half green; orientation 6 says: turn it clockwise, so that red comes to the top.
    stored = jpeg(np.concatenate([plain(32, 16, RED), plain(32, 16, GREEN)], axis=1))
    upright = decode(turned(stored, 6), LIMITS)
    assert upright.shape == (64, 16, 3)
    assert (upright[5, 8] > 200).tolist() == [False, False, True]
    assert (upright[-5, 8] > 200).tolist() == [False, True, False]
    as_stored = decode(turned(stored, 6), Decode(orientation="stored"))
    assert np.array_equal(as_stored, decode(stored, LIMITS))


def test_limits_hold_before_decoding() -> None:
    assert decode(png(plain(100, 100)), LIMITS).shape == (100, 100, 3)
    with pytest.raises(ImageError, match=r"101 x 100 pixels.*at most 10000"):
        decode(png(plain(101, 100)), LIMITS)
    with pytest.raises(ImageError, match="100000 x 100000"):
        decode(png_of(100_000, 100_000, zlib.compress(bytes(1000))), Decode())
    with pytest.raises(ImageError, match="at most 64 B"):
        decode(png(plain(8, 8)), Decode(max_bytes=64))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([jpeg(noise(24, 16)), png(noise(24, 16))]), st.data())
def test_damaged_files_are_an_error_or_an_image(data: bytes, draw: st.DataObject) -> None:
    broken = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        broken[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(ImageError):
        pixels = decode(bytes(broken), LIMITS)
        assert math.prod(pixels.shape[:2]) <= LIMITS.max_pixels


def test_a_png_without_all_of_its_rows_is_damaged() -> None:
    with pytest.raises(ImageError, match="PNG is damaged"):
        decode(png_of(10, 10, zlib.compress((b"\0" + bytes(30)) * 5)), LIMITS)


def test_stretch() -> None:
    tensor, frame = preprocessor('mode = "stretch"', 1, 3, 10, 20).tensor(png(plain(40, 60, (10, 20, 30))))
    assert tensor.shape == (1, 3, 10, 20)
    assert tensor.dtype == np.float32
    assert [np.unique(plane).tolist() for plane in tensor[0]] == [[10], [20], [30]]
    assert (frame.scale_x, frame.scale_y, frame.left, frame.top) == (0.5, 10 / 60, 0, 0)


def test_letterbox_puts_the_image_in_the_middle() -> None:
    made = preprocessor('mode = "letterbox"\nfill = 114.0', 1, 32, 64, 3, more='layout = "nhwc"')
    tensor, frame = made.tensor(png(plain(50, 50, (1, 2, 3))))
    assert tensor.shape == (1, 32, 64, 3)
    assert np.all(tensor[0, :, :16] == 114)
    assert np.all(tensor[0, :, 48:] == 114)
    assert np.all(tensor[0, :, 16:48] == (1, 2, 3))
    assert (frame.scale_x, frame.scale_y, frame.left, frame.top) == (0.64, 0.64, 16, 0)


@pytest.mark.parametrize(
    ("width", "height", "expected", "filled"),
    [(60, 10, 60, 0), (120, 20, 60, 0), (5, 10, 20, 15), (61, 20, 31, 0), (1000, 10, 100, 0), (1, 1000, 20, 19)],
)
def test_keep_height(width: int, height: int, expected: int, filled: int) -> None:
    made = preprocessor('mode = "height"\nfill = 127.5', 1, 3, 10, "w", more="normalise = {mean=[127.5], std=[127.5]}")
    tensor, _ = made.tensor(png(plain(width, height, (255, 255, 0))))
    assert tensor.shape == (1, 3, 10, expected)
    assert np.all(tensor[0, :2, :, : expected - filled] == 1)
    assert np.all(tensor[0, 2, :, : expected - filled] == -1)
    assert np.all(tensor[..., expected - filled :] == 0)


def test_centre_crop() -> None:
    pixels = plain(80, 40, RED)
    pixels[5:35, 25:55] = GREEN
    tensor, frame = preprocessor('mode = "centre-crop"\nshare = 0.75', 1, 3, 15, 15).tensor(png(pixels))
    assert [np.unique(plane).tolist() for plane in tensor[0]] == [[0], [255], [0]]
    assert (frame.scale_x, frame.scale_y, frame.left, frame.top) == (0.5, 0.5, -12.5, -2.5)


def test_colour_and_element_type() -> None:
    image = png(plain(4, 4, (10, 20, 30)))
    bgr, _ = preprocessor('mode = "stretch"', 1, 3, 4, 4, more='colour = "bgr"', dtype=DType.UINT8).tensor(image)
    assert bgr.dtype == np.uint8
    assert bgr[0, :, 0, 0].tolist() == [30, 20, 10]
    gray, _ = preprocessor('mode = "stretch"', 1, 1, 4, 4, more='colour = "gray"', dtype=DType.FLOAT16).tensor(image)
    assert gray.dtype == np.float16
    assert gray[0, 0, 0, 0] == 18  # 0.299 x 10 + 0.587 x 20 + 0.114 x 30


def test_normalising_is_what_it_says() -> None:
    normalise = "normalise = {scale=0.5, mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0]}"
    tensor, _ = preprocessor('mode = "stretch"', 1, 3, 16, 16, more=normalise).tensor(png(noise(16, 16)))
    values = noise(16, 16).astype(np.float64)
    expected = (values * 0.5 - (1, 2, 3)) / (4, 5, 6)
    assert np.array_equal(tensor[0].transpose(1, 2, 0), expected.astype(np.float32))


def test_the_tensor_is_written_into_a_buffer_that_is_larger() -> None:
    made = preprocessor('mode = "height"', 1, 3, 10, "w")
    buffer = np.full(3 * 10 * 100 * 4, 7, np.uint8)
    placed = made.place(png(noise(30, 10)))
    nbytes = made.write(placed, buffer)
    assert nbytes == 3 * 10 * 30 * 4
    assert np.array_equal(
        buffer[:nbytes].view(np.float32).reshape(made.shape(placed)), made.tensor(png(noise(30, 10)))[0]
    )
    assert np.all(buffer[nbytes:] == 7)
