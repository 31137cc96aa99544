"""Size of an encoded image, and whether all of it is there, without decoding it. Pure.

Sources: ITU-T T.81 annex B (JPEG markers); PNG specification, third edition, section 5 (chunks).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from targets.errors import ImageError

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
# A marker in entropy-coded data: neither a stuffed zero, nor a restart, nor fill.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SOF = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive"}
_OTHER_SOF = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_EOI, _SOS = 0xD9, 0xDA
# Every scan of a progressive JPEG goes over all of its blocks; encoders make about ten.
MAX_SCANS = 64
# Cameras write some dozens of segments, encoders a chunk every few KiB; a file of nothing but markers takes seconds.
_MAX_SEGMENTS = 1 << 12
_MAX_CHUNKS = 1 << 16
_DAMAGED = "it may have been cut short on its way"
_WHOLE_BODY = "over HTTP the file itself is the body, not a form: curl --data-binary @FILE"


@dataclass(frozen=True, slots=True)
class Header:
    """`width` and `height` as stored, before any EXIF orientation."""

    kind: str
    width: int
    height: int


def read_header(data: bytes) -> Header:
    """What an image file says of itself. Raises ImageError unless it is a whole JPEG or PNG."""
    try:
        if data.startswith(_JPEG):
            return _jpeg(data)
        if data.startswith(_PNG):
            return _png(data)
    except (IndexError, struct.error):
        raise ImageError("the image ends too early", _DAMAGED) from None
    begins = f"it begins with {data[:8].hex(' ')}" if data else "it is empty"
    raise ImageError(f"the image is neither JPEG nor PNG: {begins}", _WHOLE_BODY)


def _jpeg(data: bytes) -> Header:
    header: Header | None = None
    scans = 0
    for code, at in _segments(data):
        if code in _OTHER_SOF:
            raise ImageError(f"the JPEG is of kind SOF{code - 0xC0}", f"available: {', '.join(_SOF.values())}")
        if code in _SOF and header:
            raise ImageError("the JPEG has two frames", "send one image")
        if code in _SOF:
            header = _frame(data, at)
        scans += code == _SOS
        if scans > MAX_SCANS:
            raise ImageError(f"the JPEG has more than {MAX_SCANS} scans", "save it as baseline JPEG")
    if not header or not scans:
        raise ImageError("the JPEG has no image in it", _DAMAGED)
    return header


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """(marker, where its parameters begin), up to the end of the image; entropy-coded data is passed over."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            raise ImageError(f"the JPEG has no marker at byte {at}", _DAMAGED)
        code = data[at + 1]
        if code == _EOI:
            return
        if code == 0xFF:
            at += 1
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if length < 2:
            raise ImageError(f"the JPEG has an empty segment at byte {at}", _DAMAGED)
        yield code, at + 4
        at += 2 + length
        if code == _SOS:
            marker = _MARKER.search(data, at)
            if not marker:
                raise ImageError("the JPEG ends too early", _DAMAGED)
            at = marker.start()
    raise ImageError(f"the JPEG has more than {_MAX_SEGMENTS} segments", "save it again without metadata")


def _frame(data: bytes, at: int) -> Header:
    precision, height, width, components = struct.unpack_from(">BHHB", data, at)
    if precision != 8 or components not in (1, 3):
        raise ImageError(
            f"the JPEG has {components} components of {precision} bits", "save it as gray or RGB with 8 bits"
        )
    return _sized("jpeg", width, height)


def _png(data: bytes) -> Header:
    """Walks the chunks and compares their checksums."""
    width, height = struct.unpack_from(">II", data, 16)
    if data[12:16] != b"IHDR":
        raise ImageError("the PNG does not begin with its header", _DAMAGED)
    at = len(_PNG)
    view = memoryview(data)
    for _ in range(_MAX_CHUNKS):
        length, kind = struct.unpack_from(">I4s", data, at)
        (checksum,) = struct.unpack_from(">I", data, at + 8 + length)
        if zlib.crc32(view[at + 4 : at + 8 + length]) != checksum:
            raise ImageError(f"the PNG is damaged: chunk {kind!r} has another checksum", _DAMAGED)
        if kind == b"acTL":
            raise ImageError("the PNG is animated", "send one image")
        if kind == b"IEND":
            return _sized("png", width, height)
        at += 12 + length
    raise ImageError(f"the PNG has more than {_MAX_CHUNKS} chunks", "save it again")


def _sized(kind: str, width: int, height: int) -> Header:
    if not width or not height:
        raise ImageError(f"the image is {width} x {height} pixels")
    return Header(kind, width, height)
