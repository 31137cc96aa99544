"""multipart/mixed and multipart/x-mixed-replace (RFC 2046, section 5.1): a record per part, as cameras send images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from agent.http.codecs import HEADER_LENGTH
from agent.http.framing.decoder import Decoder, FramingError, Message
from agent.http.framing.encoder import Encoder
from agent.http.framing.records import Record, to_json
from targets.errors import ContractError

MEDIA_TYPES = ("multipart/mixed", "multipart/x-mixed-replace")
# What a part's headers, or what stands before the first part, may have; cameras write some hundred bytes.
_HEAD_BYTES = 4 << 10
# White space that a gateway may leave behind a delimiter.
_PADDING_BYTES = 64
# RFC 2046, section 5.1.1: `bchars`, the last of them no space.
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_PARAMETER = re.compile(r';\s*boundary\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
# RFC 9110, sections 5.6.2 and 5.5.
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[^\x00\n\r]*")
_AS_IT_IS = ("", "7bit", "8bit", "binary")


def boundary_of(content_type: str) -> str:
    """The parameter `boundary` of a Content-Type. Raises ContractError."""
    found = _PARAMETER.search(content_type)
    boundary = re.sub(r"\\(.)", r"\1", found[1]) if found and found[1] is not None else found[2] if found else ""
    if not _BOUNDARY.fullmatch(boundary):
        raise ContractError(
            f"Content-Type {content_type[:100]!r} has no valid boundary",
            "1 to 70 characters, as in multipart/x-mixed-replace; boundary=frame (RFC 2046, section 5.1.1)",
        )
    return boundary


class _Head(NamedTuple):
    """What a part's headers say; `length` is its Content-Length."""

    media_type: str
    length: int | None
    header_length: str | None
    id: str | None


class _State(Enum):
    PREAMBLE = "before the first delimiter"
    HEAD = "behind a delimiter"
    BODY = "behind the headers of a part"
    FOLLOWED = "behind a part of known length, where a delimiter must follow"
    LOST = "behind an error, looking for the next delimiter"
    EPILOGUE = "behind the last delimiter"


class PartDecoder(Decoder):
    """Parts of at most `limit` bytes; those without any are ignored.

    Theory of operation. The line break before a delimiter belongs to it, and the one after it to the headers, which so
    always end at an empty line, also where there are none. A part with a Content-Length is complete with its last byte;
    one without is complete when the next delimiter has come. After an error the next delimiter is looked for.
    """

    def __init__(self, limit: int, boundary: str) -> None:
        super().__init__(limit)
        self._delimiter = b"\r\n--" + boundary.encode("ascii")
        self._rest = re.compile(rb"(--)|[ \t]{0,%d}(?=\r\n)" % _PADDING_BYTES)
        self._state = _State.PREAMBLE
        self._head = _Head("", None, None, None)
        # The first delimiter may be the first line.
        self._data += b"\r\n"

    @property
    def begun(self) -> bool:
        # The line break behind a part, or the one before the first, begins none.
        return self._state is _State.BODY or self.held > 2

    def _next(self) -> Message | None:
        while True:
            before = self._state, self._at
            message = self._step()
            if message is not None and message.body:
                return message
            if message is None and before == (self._state, self._at):
                self._wait()
                return None

    def _step(self) -> Message | None:
        """Go on by one element of the syntax, if all of it is there."""
        if self._state is _State.BODY:
            return self._read_body()
        if self._state is _State.HEAD:
            self._read_head()
        elif self._state is _State.EPILOGUE:
            self._at = len(self._data)
        else:
            self._seek()
        return None

    def _wait(self) -> None:
        if not self._ended:
            return
        # There may be the line break before the first delimiter, or behind one that was sent ahead.
        more = self.held > 2
        if self._state is _State.PREAMBLE and more:
            raise self._no_delimiter()
        if self._state is _State.BODY or (self._state is _State.HEAD and more):
            raise FramingError("the stream ended within a part", "the last one ends with --boundary--", fatal=True)

    def _no_delimiter(self) -> FramingError:
        wanted = self._delimiter[2:].decode()
        return FramingError(
            "no part begins where the first should",
            f"parts begin with a line {wanted!r}, as Content-Type says",
            fatal=True,
        )

    # --- delimiters

    def _find(self, start: int) -> tuple[int, re.Match[bytes] | None]:
        """(where the first delimiter is from `start` on, what follows it), or (where one may begin at the earliest that
        has not all come, None)."""
        data, delimiter = self._data, self._delimiter
        at = max(start, self._searched)
        while True:
            at = data.find(delimiter, at)
            if at < 0:
                self._searched = max(start, len(data) - len(delimiter) + 1)
                return self._searched, None
            behind = at + len(delimiter)
            rest = self._rest.match(data, behind)
            if rest is not None:
                return at, rest
            if len(data) - behind < _PADDING_BYTES + 2 and not data[behind:].strip(b" \t-\r"):
                self._searched = at
                return at, None
            # It only begins like the boundary.
            at += 1

    def _seek(self) -> None:
        """Go behind the next delimiter, or as far as none begins."""
        state, start = self._state, self._at
        at, rest = self._find(start)
        if state is _State.PREAMBLE:
            if at > _HEAD_BYTES:
                raise self._no_delimiter()
            if rest is None:
                return
        if state is _State.FOLLOWED and at > start:
            self._at, self._state = at, _State.LOST
            raise FramingError("a part goes on behind its Content-Length", "it counts the bytes of the part's body")
        self._at = at
        if rest is not None:
            self._pass(rest)

    def _pass(self, rest: re.Match[bytes]) -> None:
        """Go behind a delimiter that was found."""
        self._at = rest.end()
        self._state = _State.EPILOGUE if rest[1] else _State.HEAD

    # --- parts

    def _read_head(self) -> None:
        data, start = self._data, self._at
        end = data.find(b"\r\n\r\n", start, start + _HEAD_BYTES + 4)
        if end < 0 and self.held < _HEAD_BYTES + 4:
            return
        self._state = _State.LOST
        if end < 0:
            raise FramingError(f"a part has headers of more than {_HEAD_BYTES} bytes", "end them with an empty line")
        self._head = _parse(self._cut(start, end))
        # The empty line may be the line break of the next delimiter.
        self._at, self._state = end + 2, _State.BODY

    def _read_body(self) -> Message | None:
        start, length = self._at + 2, self._head.length
        if length is None:
            return self._read_until_delimiter(start)
        if length > self.limit:
            self._state = _State.LOST
            raise self._too_large("a part")
        if len(self._data) - start < length:
            return None
        self._at, self._state = start + length, _State.FOLLOWED
        return self._message(start, self._at)

    def _read_until_delimiter(self, start: int) -> Message | None:
        at, rest = self._find(self._at)
        if at - start > self.limit:
            self._at, self._state = at, _State.LOST
            raise self._too_large("a part")
        if rest is None:
            return None
        self._pass(rest)
        return self._message(start, max(at, start))

    def _message(self, start: int, end: int) -> Message:
        head = self._head
        return Message(self._cut(start, end), head.header_length, head.media_type, head.id)


def _parse(head: bytes) -> _Head:
    """Headers of a part, from the line break before the first to before the one behind the last."""
    fields: dict[str, str] = {}
    for line in head.split(b"\r\n")[1:]:
        before, colon, behind = line.partition(b":")
        if not (colon and _NAME.fullmatch(before) and _VALUE.fullmatch(behind)):
            raise FramingError(f"a part has the header line {line[:40]!r}", "headers are lines of `name: value`")
        name, value = before.decode().lower(), behind.strip(b" \t").decode("latin-1")
        if fields.setdefault(name, value) != value:
            raise FramingError(f"a part has two headers {name[:40]!r} that differ", "give each once")
    encoding = fields.get("content-transfer-encoding", "")
    if encoding.lower() not in _AS_IT_IS:
        raise FramingError(f"a part has Content-Transfer-Encoding {encoding[:40]!r}", "send bytes as they are")
    length = fields.get("content-length")
    if length is not None and not (length.isascii() and length.isdecimal() and len(length) <= 18):
        raise FramingError(f"a part has Content-Length {length[:40]!r}", "it must be the number of bytes of the part")
    return _Head(
        fields.get("content-type", "").partition(";")[0].strip().lower(),
        None if length is None else int(length),
        fields.get(HEADER_LENGTH.lower()),
        fields.get("content-id", "").strip("<>") or None,
    )


class PartEncoder(Encoder):
    """Records as parts, their tensors behind them as the binary extension has it; a part without bytes is a heartbeat.

    `boundary` must be one that no record contains, so a random one: tensors can be any bytes.
    """

    binary = True

    def __init__(self, media_type: str, boundary: str) -> None:
        self.media_type = f'{media_type}; boundary="{boundary}"'
        self._delimiter = b"\r\n--" + boundary.encode("ascii")
        self.closing = self._delimiter + b"--\r\n"
        self.heartbeat = self._delimiter + b"\r\nContent-Length: 0\r\n\r\n"

    def encode(self, record: Record, tensors: Sequence[memoryview] = ()) -> bytes:
        json = to_json(record)
        if not tensors:
            return b"%b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
                self._delimiter, len(json), json
            )  # fmt: skip
        return b"%b\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n%b: %d\r\n\r\n%b" % (
            self._delimiter,
            len(json) + sum(tensor.nbytes for tensor in tensors),
            HEADER_LENGTH.encode(),
            len(json),
            json,
        )
