"""What the encoders of all framings have in common: a record in, bytes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from agent.errors import Reason, RefusedError
from agent.http.framing.records import Record


class Framing:
    """What there is around records. `media_type` is the stream's Content-Type. `opening` comes before the first record,
    `closing` after the last, and `heartbeat` whenever nothing else came for a while."""

    media_type: str
    heartbeat: bytes
    opening = b""
    closing = b""


class Encoder(Framing, ABC):
    """`binary`: whether outputs may be raw bytes."""

    binary = False

    @abstractmethod
    def encode(self, record: Record, tensors: Sequence[memoryview] = ()) -> bytes:
        """The record up to its raw tensors, which follow as they are. Raises RefusedError where there can be none."""

    def check(self, binary: bool) -> None:
        """Raise RefusedError for outputs that are raw bytes, where there can be none."""
        if binary and not self.binary:
            raise RefusedError(
                Reason.BAD_REQUEST,
                f"{self.media_type} has no place for binary outputs",
                "ask for JSON outputs, or for application/vnd.tightfit.frames or multipart/mixed",
            )
