"""Heads of requests that no two readers of HTTP/1.1 read differently. Pure.

A head is *plain* when it is a POST to a model's infer whose every byte is where RFC 9112 has it: nothing is folded,
repeated, decoded, normalised or guessed, and the body's length is one decimal number. What is not plain is nobody's
fault: another reader, which knows the whole of HTTP, judges it.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from multidict import CIMultiDict, CIMultiDictProxy

from agent.errors import RefusedError
from agent.http.codecs import HEADER_LENGTH
from agent.http.echo import echoed
from agent.http.hints import priority_of, timeout_of

_START = b"POST /v2/models/"
# A name as bundles have it, and so a version, which is a number; nothing to decode or to normalise.
_NAME = rb"([A-Za-z0-9][A-Za-z0-9._-]{0,99})"
_LINE = re.compile(_START + _NAME + rb"(?:/versions/" + _NAME + rb")?/infer HTTP/1\.1")
# Token, and visible ASCII with blanks within: RFC 9110, section 5.5, without what is obsolete there.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*((?:[!-~](?:[ \t!-~]*[!-~])?)?)[ \t]*")
_LENGTH = re.compile(r"0|[1-9][0-9]{0,17}")
_CONNECTIONS = {None: False, "keep-alive": False, "close": True}
# What curl, tritonclient and perf_analyzer say of an infer request; images say something else.
_MEDIA_TYPES = frozenset({"", "application/json", "application/octet-stream", "application/x-www-form-urlencoded"})
# What frames, encodes, delays or hands over a message, and what browsers add: `agent.http.guard` judges that.
_ODD = frozenset(
    {"transfer-encoding", "te", "trailer", "content-encoding", "content-range", "expect", "upgrade", "http2-settings",
     "proxy-connection", "keep-alive", "origin"}
)  # fmt: skip

# A client repeats its head, byte for byte. So many different ones are remembered, each of some KiB at most.
_REMEMBERED = 256


class Sign(enum.Enum):
    """What there is instead of a plain head."""

    MORE = "it may become one with more bytes"
    ODD = "it is none"


@dataclass(frozen=True, slots=True)
class Head:
    """What a plain head says. `raw` ends with the empty line; `length` is the body's in bytes, `json_length` that of
    its JSON part: all of it, or what `header_length` says where that can be, else -1. After `close` the client asks no
    more. `priority` and `timeout_s` are those of `agent.http.hints`, `echo` what comes back.
    `authorization` holds a secret: a head is shown nowhere."""

    raw: bytes
    model: str
    version: str | None
    length: int
    close: bool
    header_length: str | None
    json_length: int
    accept_encoding: str | None
    priority: int
    timeout_s: float | None
    echo: dict[str, str]
    authorization: str | None


class Heads:
    """Reads heads of at most `most_bytes` and `most_fields`, and remembers those that come again."""

    def __init__(self, most_bytes: int, most_fields: int) -> None:
        self._most_bytes, self._most_fields = most_bytes, most_fields
        self._remembered: dict[bytes, Head] = {}

    def read(self, data: bytes) -> Head | Sign:
        """The head that `data` begins with."""
        end = data.find(b"\r\n\r\n", 0, self._most_bytes) + 4
        if end < 4:
            begun = data.startswith(_START) if len(data) >= len(_START) else _START.startswith(data)
            # A line that ends with LF alone never becomes one: whoever waits for its end waits for ever.
            lines = data.count(b"\n") == data.count(b"\r\n")
            return Sign.MORE if begun and lines and len(data) < self._most_bytes else Sign.ODD
        raw = data[:end]
        head = self._remembered.get(raw)
        if head is None:
            head = parse(raw, self._most_fields)
            if head is None:
                return Sign.ODD
            if not head.echo:  # else the next request has another id
                if len(self._remembered) >= _REMEMBERED:
                    self._remembered.clear()
                self._remembered[raw] = head
        return head


def parse(raw: bytes, most_fields: int) -> Head | None:
    """What a head says that ends with its empty line; None where it is not plain."""
    line, *fields = raw[:-4].split(b"\r\n")
    asked = _LINE.fullmatch(line)
    if asked is None or len(fields) > most_fields:
        return None
    headers: CIMultiDict[str] = CIMultiDict()
    for field in fields:
        found = _FIELD.fullmatch(field)
        if found is None:
            return None
        name = found[1].decode("ascii").lower()
        if name in headers or name in _ODD:
            return None
        headers[name] = found[2].decode("ascii")
    length = headers.get("Content-Length", "")
    connection = headers.get("Connection")
    connection = connection.lower() if connection is not None else None
    media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if not (
        headers.get("Host") and _LENGTH.fullmatch(length) and connection in _CONNECTIONS and media_type in _MEDIA_TYPES
    ):
        return None
    try:
        timeout_s = timeout_of(headers)
    except RefusedError:
        return None
    return Head(
        raw,
        asked[1].decode("ascii"),
        asked[2].decode("ascii") if asked[2] else None,
        int(length),
        _CONNECTIONS[connection],
        headers.get(HEADER_LENGTH),
        _json_length(headers.get(HEADER_LENGTH), int(length)),
        headers.get("Accept-Encoding"),
        priority_of(CIMultiDictProxy(headers)),
        timeout_s,
        echoed(headers),
        headers.get("Authorization"),
    )


def _json_length(header_length: str | None, length: int) -> int:
    if header_length is None:
        return length
    return int(header_length) if _LENGTH.fullmatch(header_length) and int(header_length) <= length else -1
