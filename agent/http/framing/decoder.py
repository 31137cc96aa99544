"""What the decoders of all framings have in common: bytes in, messages out."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import NamedTuple

from agent.errors import Reason, RefusedError
from targets.tensor import human


class Message(NamedTuple):
    """One record as it came: what would be the body of a request of its own, and what its headers would say.

    `header_length` is the text of Inference-Header-Content-Length, None where all of the body is JSON or an image.
    `media_type` is empty where the sender gave none. `id` stands outside of the body, as a part's Content-ID does.
    """

    body: bytes
    header_length: str | None = None
    media_type: str = "application/json"
    id: str | None = None


class FramingError(RefusedError):
    """What came is no record of the framing. `fatal`: where the next one would begin is not known, so none follows."""

    def __init__(
        self, message: str, hint: str = "", *, reason: Reason = Reason.BAD_REQUEST, fatal: bool = False
    ) -> None:
        super().__init__(reason, message, hint)
        self.fatal = fatal


class Decoder(ABC):
    """Bytes of any split in, messages out, none of them larger than `limit` bytes.

    `feed` what came, then take `next` until it gives None. A FramingError stands in the place of one record; `next`
    goes on behind it, unless it was fatal: then whatever is fed is dropped. After `end`, what is left is a last record
    or an error. Between feeds at most `limit` bytes and a small constant are held; what is longer is skipped, not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.failed = False
        self._data = bytearray()
        # What is before `_at` was read. Only as much as was looked through before is behind `_searched`.
        self._at = 0
        self._searched = 0
        self._ended = False

    @property
    def held(self) -> int:
        """Bytes that came and were not read yet."""
        return len(self._data) - self._at

    @property
    def begun(self) -> bool:
        """Whether a part of a record came, of which the rest is still to come."""
        return self.held > 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take what came."""
        if self.failed:
            return
        if self._at:
            # Once per feed, not per record: cutting off the front is cheap, but not free.
            del self._data[: self._at]
            self._searched = max(self._searched - self._at, 0)
            self._at = 0
        self._data += data

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True

    def next(self) -> Message | None:
        """The next record, or None: more has to come first. Raises FramingError."""
        if self.failed:
            return None
        try:
            return self._next()
        except FramingError as error:
            if error.fatal:
                self.failed = True
                self._data.clear()
                self._at = 0
            raise

    def skip(self) -> None:
        """Leave out the record that has begun, and is not small: what is still to come of it is dropped."""
        limit, self.limit = self.limit, 0
        with contextlib.suppress(FramingError):
            self.next()
        self.limit = limit

    @abstractmethod
    def _next(self) -> Message | None: ...

    def _cut(self, start: int, end: int) -> bytes:
        """A copy: one that looked into the buffer would keep it from growing."""
        return bytes(memoryview(self._data)[start:end])

    def _too_large(self, what: str) -> FramingError:
        return FramingError(
            f"{what} has more than {human(self.limit)}", "this stream takes no larger ones", reason=Reason.TOO_LARGE
        )
