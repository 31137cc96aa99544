"""application/x-ndjson: a JSON text per line."""

from __future__ import annotations

from collections.abc import Sequence

from agent.http.framing.decoder import Decoder, FramingError, Message
from agent.http.framing.encoder import Encoder
from agent.http.framing.records import Record, to_json

MEDIA_TYPE = "application/x-ndjson"
_BOM = b"\xef\xbb\xbf"


class LineDecoder(Decoder):
    r"""Records end with \n or \r\n, the last one with the stream; lines of white space are ignored."""

    _skipping = False

    def _next(self) -> Message | None:
        data = self._data
        while True:
            end = data.find(b"\n", max(self._searched, self._at))
            if end < 0 and self._ended and self._at < len(data):
                end = len(data)
            if end < 0:
                self._wait()
                return None
            start, self._at = self._at, min(end + 1, len(data))
            if self._skipping:
                self._skipping = False
                continue
            if end - start > self.limit:
                raise self._too_large("a line")
            line = self._cut(start, end)
            if line.startswith(_BOM):
                raise FramingError("a line begins with a byte order mark", "send UTF-8 without one")
            if line and not line.isspace():
                return Message(line)

    def _wait(self) -> None:
        self._searched = len(self._data)
        if self._skipping:
            self._at = len(self._data)
        elif self.held > self.limit:
            self._skipping = True
            self._at = len(self._data)
            raise self._too_large("a line")


class LineEncoder(Encoder):
    """Records as lines; an empty line is a heartbeat."""

    media_type = MEDIA_TYPE
    heartbeat = b"\n"

    def encode(self, record: Record, tensors: Sequence[memoryview] = ()) -> bytes:
        self.check(binary=bool(tensors))
        return to_json(record) + b"\n"
