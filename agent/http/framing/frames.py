"""application/vnd.tightfit.frames: records with raw tensors, each behind its length (docs/streams.md)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from agent.http.framing.decoder import Decoder, FramingError, Message
from agent.http.framing.encoder import Encoder
from agent.http.framing.records import Record, to_json

MEDIA_TYPE = "application/vnd.tightfit.frames"
_LENGTH = struct.Struct("<I")
_PREFIX = struct.Struct("<II")
# A frame is shorter than this. Text of any kind is longer, read as a length, so it is found out at once.
_MOST = 1 << 30


def frame_head(json: bytes, tensor_bytes: int = 0) -> bytes:
    """What stands before the tensors of a frame: both lengths, and the JSON."""
    total = _LENGTH.size + len(json) + tensor_bytes
    if total >= _MOST:
        raise ValueError(f"a frame of {total} bytes, which must be fewer than {_MOST}")
    return _PREFIX.pack(total, len(json)) + json


class FrameDecoder(Decoder):
    """Frames of at most `limit` bytes of JSON and tensors; empty ones are ignored."""

    # Bytes still to come of a frame that is too large.
    _skip = 0

    def _next(self) -> Message | None:
        data = self._data
        while True:
            if self._skip:
                step = min(self._skip, self.held)
                self._skip -= step
                self._at += step
            available = self.held
            if available < _LENGTH.size:
                self._wait(available)
                return None
            (total,) = _LENGTH.unpack_from(data, self._at)
            if total:
                break
            self._at += _LENGTH.size
        start = self._at + _LENGTH.size
        if total >= _MOST:
            raise FramingError(
                f"a frame of {total} bytes, which must be fewer than {_MOST}",
                "a frame begins with its length as a little-endian u32",
                fatal=True,
            )
        if total > self.limit + _LENGTH.size:
            self._at, self._skip = start, total
            raise self._too_large("a frame")
        if available < _LENGTH.size + total:
            self._wait(available)
            return None
        self._at = end = start + total
        length = _LENGTH.unpack_from(data, start)[0] if total >= _LENGTH.size else 0
        start += _LENGTH.size
        if not 0 < length <= end - start:
            raise FramingError(
                f"a frame of {total} bytes with {length} bytes of JSON",
                "behind its length a frame has the number of bytes of its JSON as a u32, the JSON, and the tensors",
            )
        return Message(self._cut(start, end), str(length), "application/octet-stream")

    def _wait(self, available: int) -> None:
        if self._ended and available:
            raise FramingError("the stream ended within a frame", fatal=True)


class FrameEncoder(Encoder):
    """Records as frames; an empty frame is a heartbeat."""

    media_type = MEDIA_TYPE
    heartbeat = _LENGTH.pack(0)
    binary = True

    def encode(self, record: Record, tensors: Sequence[memoryview] = ()) -> bytes:
        return frame_head(to_json(record), sum(tensor.nbytes for tensor in tensors))
