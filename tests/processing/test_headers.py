"""What image files say of themselves."""

from __future__ import annotations

import zlib

import cv2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processing.headers import MAX_SCANS, Header, read_header
from targets.errors import ImageError
from tests.support.images import chunk, jpeg, noise, plain, png, png_of, turned

JPEG, PNG = jpeg(noise(40, 30)), png(noise(40, 30))


def test_sizes() -> None:
    assert read_header(JPEG) == Header("jpeg", 40, 30)
    assert read_header(turned(JPEG, 6)) == Header("jpeg", 40, 30)
    assert read_header(jpeg(noise(40, 30), cv2.IMWRITE_JPEG_PROGRESSIVE, 1)) == Header("jpeg", 40, 30)
    assert read_header(jpeg(noise(40, 30), cv2.IMWRITE_JPEG_RST_INTERVAL, 1)) == Header("jpeg", 40, 30)
    assert read_header(PNG) == Header("png", 40, 30)
    assert read_header(JPEG + b"what cameras append") == Header("jpeg", 40, 30)


@pytest.mark.parametrize("data", [JPEG, PNG], ids=["jpeg", "png"])
def test_every_truncation_is_seen(data: bytes) -> None:
    for length in range(len(data) - 1):
        with pytest.raises(ImageError):
            read_header(data[:length])


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"GIF89a" + bytes(30), b"RIFF0000WEBP", b"BM" + bytes(60), b"--x\r\nA: b"]
)
def test_other_files(data: bytes) -> None:
    with pytest.raises(ImageError, match=r"neither JPEG nor PNG.*--data-binary"):
        read_header(data)


def test_a_changed_byte_of_a_png_is_seen() -> None:
    for at in range(8, len(PNG), 37):
        with pytest.raises(ImageError):
            read_header(PNG[:at] + bytes([PNG[at] ^ 1]) + PNG[at + 1 :])


def test_what_is_not_taken() -> None:
    packed = zlib.compress(b"\0" + bytes(3))
    with pytest.raises(ImageError, match="animated"):
        read_header(png_of(1, 1, packed, chunk(b"acTL", bytes(8))))
    with pytest.raises(ImageError, match="0 x 7"):
        read_header(png_of(0, 7, packed))
    frame = JPEG.index(b"\xff\xc0")
    with pytest.raises(ImageError, match=r"SOF9.*available: baseline"):
        read_header(JPEG.replace(b"\xff\xc0", b"\xff\xc9", 1))
    with pytest.raises(ImageError, match="12 bits"):
        read_header(JPEG[: frame + 4] + b"\x0c" + JPEG[frame + 5 :])
    with pytest.raises(ImageError, match="two frames"):
        read_header(JPEG[:frame] + JPEG[frame : frame + 19] + JPEG[frame:])
    scan = JPEG[JPEG.index(b"\xff\xda") : -2]
    with pytest.raises(ImageError, match=f"more than {MAX_SCANS} scans"):
        read_header(JPEG[:-2] + scan * MAX_SCANS + JPEG[-2:])
    with pytest.raises(ImageError, match="more than 4096 segments"):
        read_header(b"\xff\xd8" + b"\xff" * 10_000)
    with pytest.raises(ImageError, match="more than 65536 chunks"):
        read_header(png_of(1, 1, packed, chunk(b"tEXt", b"") * 70_000))
    with pytest.raises(ImageError, match="no image in it"):
        read_header(b"\xff\xd8\xff\xd9")


@settings(max_examples=300)
@given(st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"]), st.binary(max_size=200))
def test_random_bytes_are_an_image_error(start: bytes, rest: bytes) -> None:
    with pytest.raises(ImageError):
        read_header(start + rest)


def test_the_size_is_the_first_thing_known_of_a_bomb() -> None:
    bomb = png_of(100_000, 100_000, zlib.compress(bytes(10_000)))
    assert read_header(bomb) == Header("png", 100_000, 100_000)
    assert len(bomb) < 1000
    assert read_header(png(plain(1, 1))) == Header("png", 1, 1)
