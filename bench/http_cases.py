"""Requests that are wrong in one way or another, for `bench.fuzz_http`: damaged bytes,
and a grammar that slips. Pure.

A case is known by a seed and its number. Of the kinds in `RAW` the bytes of valid requests are changed anywhere, so
nobody can say what they still mean. Those in `GRAMMAR` are framed as they should be, whatever stands in them: such a
case has exactly one answer, and what follows it on the connection is not touched by it.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.http_mutants import BODY, PIECES, SEEDS, request

MODELS = {"adding": ("FP32", (1, 2)), "words": ("BYTES", (2,)), "half": ("FP16", (1, 8)), "whole": ("INT64", (2, 3))}
"""Each has an input `x` of that type and shape, and an output `y`."""
SMUGGLED = "smuggled"
"""The id of requests that stand where no request may be seen: within bodies, chunks and fields."""
CHAIN = 8
"""So many cases go out on one connection."""


class Case(NamedTuple):
    """One request, if it is one. It is sent with a pause at each of `cuts`. `framed`: it has exactly one answer."""

    number: int
    kind: str
    data: bytes
    framed: bool = False
    cuts: tuple[int, ...] = ()

    @property
    def may_be_late(self) -> bool:
        """Whether it has a deadline, and so may be refused for that."""
        return b"imeout" in self.data


def case_of(seed: int, number: int) -> Case:
    """The case of that number."""
    rng = random.Random(seed << 40 | number)
    # After damaged bytes the connection is mostly closed: of every three chains one is without.
    grammar = rng.random() < (1.0, 0.0, 0.5)[number // CHAIN % 3]
    kinds = GRAMMAR if grammar else RAW
    kind = rng.choice(tuple(kinds))
    data = kinds[kind](rng)
    cuts: tuple[int, ...] = ()
    if kind == "split" or rng.random() < 0.05:
        cuts = tuple(sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 4))))
    return Case(number, kind, data, grammar or kind == "split", cuts)


def good(number: int, last: bool = False) -> bytes:
    """A request whose answer is that of no other: its sum is `number` % 9000 + 1000. `last` closes the connection."""
    body = b'{"id":"g%08d","inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[%d,1]}]}' % (
        number,
        number % 9000 + 999,
    )
    return request(*([b"Connection: close"] if last else []), body=body)


def smuggled() -> bytes:
    """A whole request."""
    return request(body=BODY.replace(b"{", b'{"id":"%b",' % SMUGGLED.encode(), 1))


# --- damaged bytes


def _whole(rng: random.Random) -> bytes:
    """A valid request or several."""
    if rng.random() < 0.5:
        return b"".join(rng.choice(SEEDS))
    return _Writer(rng, slips=0).infer()


def _spot(rng: random.Random, data: bytes | bytearray) -> int:
    """Most bytes are those of bodies, and most of what is interesting is in heads."""
    return rng.randrange((len(data) if rng.random() < 0.3 else min(len(data), 200)) + 1)


def _spans(rng: random.Random) -> bytes:
    """Bytes taken out, put in, replaced or repeated."""
    data = _whole(rng)
    for _ in range(rng.randint(1, 3)):
        at, size = _spot(rng, data), rng.choice((0, 0, 1, 1, 2, rng.randrange(1, 40)))
        put = rng.choice((b"", rng.randbytes(1), rng.choice(PIECES), data[at : at + size] * 2))
        data = data[:at] + put + data[at + size :]
    return data


def _flips(rng: random.Random) -> bytes:
    """Bits turned over."""
    data = bytearray(_whole(rng))
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[min(_spot(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(data)


def _cut_off(rng: random.Random) -> bytes:
    data = _whole(rng)
    return data[: rng.randrange(len(data) + 1)]


_LENGTHS = (
    b"-1", b"+5", b"0", b"00", b"0x10", b"1e1", b"1_0", b" ", b"5,5", b"5, 6", b"18446744073709551616", b"5;a=b",
    b"\xb2",
    b"9223372036854775807", b"99999999999999999999999999", b"4294967296", b"1073741824", b"68719476736", b"71.0",
    b"NaN",
)  # fmt: skip


def _lengths(rng: random.Random) -> bytes:
    """Another Content-Length, chunk size or length of the JSON part than there is."""
    data = _whole(rng)
    found = list(re.finditer(rb"(?:Content-Length: |\r\n)([0-9a-f]+)(?=[;\r])", data))
    if not found:
        return data
    length = rng.choice(found)
    near = b"%d" % max(int(length[1], 16 if length[0][:1] == b"\r" else 10) + rng.choice((-70, -2, -1, 1, 2, 60)), 0)
    return data[: length.start(1)] + (near if rng.random() < 0.5 else rng.choice(_LENGTHS)) + data[length.end(1) :]


_INJECTED = (
    *(piece for piece in PIECES if piece.endswith(b"\r\n") and len(piece) > 4),
    b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n", b"Transfer-encoding: cow\r\n", b"Content-Length : 5\r\n",
    b"Content-Length: 5\n",
    b"Content-Encoding: br\r\n", b"Content-Encoding: gzip, gzip\r\n", b"Connection: close, keep-alive\r\n",
    b"TE: trailers\r\n",
    b"Connection: Content-Length\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Expect: 100-Continue\r\n", b"Cookie: a\r\n",
    b"Inference-Header-Content-Length: 5\r\n", b"Inference-Header-Content-Length: -1\r\n", b"Range: bytes=0-1\r\n",
    b"Via: x\r\n",
    b"Request-Timeout-Ms: 0.001\r\n", b"Priority: u=99\r\n", b"X-Request-Id: \x00\r\n", b"X-Request-Id: a\rb\r\n",
    b"Host: \r\n",
    b"X: " + b"a" * 9000 + b"\r\n", b"X: a\r\n" * 100, b"X-HTTP-Method-Override: DELETE\r\n",
    b"Content-Type: image/png\r\n",
    b"Content-Type: multipart/mixed\r\n", b"Authorization: Basic \r\n", b"Forwarded: for=x\r\n",
    b"HTTP2-Settings: AAMAAABk\r\n",
)  # fmt: skip


def _fields(rng: random.Random) -> bytes:
    """Fields put in, among them a whole request behind the blank line that ends the head early."""
    data = _whole(rng)
    for _ in range(rng.choice((1, 1, 2))):
        lines = [match.end() for match in re.finditer(b"\r\n", data[: data.find(b"\r\n\r\n") + 2])]
        at = rng.choice(lines or [0])
        data = data[:at] + (b"\r\n" + smuggled() if rng.random() < 0.05 else rng.choice(_INJECTED)) + data[at:]
    return data


_NUMBERS = (
    b"-1", b"0", b"256", b"65536", b"2147483648", b"4294967296", b"-9223372036854775809", b"18446744073709551616",
    b"1e999",
    b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"1" * 400, b"1" * 5000, b"0." + b"1" * 400, b"1e-400", b"01",
    b"1.", b".1", b"0x1",
    b"1e", b"--1", b"null", b"true", b"[]", b"{}", b'"1"',
)  # fmt: skip


def _numbers(rng: random.Random) -> bytes:
    """Numbers in the body replaced, with the length of the body as it then is."""
    writer = _Writer(rng, slips=0)
    body, fields = writer.tensors()
    found = list(re.finditer(rb"-?\d+(?:\.\d+)?", body))
    if found:
        number = rng.choice(found)
        body = body[: number.start()] + rng.choice(_NUMBERS) + body[number.end() :]
    return request(*fields, line=writer.line, body=body)


def _spliced(rng: random.Random) -> bytes:
    """The beginning of one and the end of another."""
    first, second = _whole(rng), _whole(rng)
    return first[: rng.randrange(len(first) + 1)] + second[rng.randrange(len(second) + 1) :]


_LINES = (
    b"CONNECT / HTTP/1.1", b"CONNECT ecu:80 HTTP/1.1", b"PRI * HTTP/2.0", b"POST %b HTTP/2.0", b"POST %b HTTP/0.9",
    b"POST %b HTTP/1.2", b"POST %b HTTP/1.0", b"POST %b", b"POST  %b HTTP/1.1", b"POST %b HTTP/1.1 ",
    b"POST\t%b HTTP/1.1",
    b"post %b HTTP/1.1", b"POST %b http/1.1", b"POST %b HTTP/1.10", b"POST %b HTTP/+1.1",
    b"POST http://a@ecu%b HTTP/1.1",
    b"HEAD %b HTTP/1.1", b"POST %b\r HTTP/1.1", b"POST %b\0 HTTP/1.1", b"\r\n\r\nPOST %b HTTP/1.1",
    b"\nPOST %b HTTP/1.1",
    b"%b HTTP/1.1", b"GET %b", b"POST //%b HTTP/1.1", b"POST /../..%b HTTP/1.1", b"POST /%%2e%%2e%b HTTP/1.1",
)  # fmt: skip


def _lines(rng: random.Random) -> bytes:
    """Other request lines, of which some are allowed."""
    data, line = _whole(rng), rng.choice(_LINES)
    path = data.split(b" ", 2)[1]
    return (line.replace(b"%b", path) if b"%%" not in line else line % path) + data[data.find(b"\r\n") :]


RAW: dict[str, Callable[[random.Random], bytes]] = {
    "spans": _spans, "flips": _flips, "cut off": _cut_off, "lengths": _lengths, "fields": _fields,
    "numbers": _numbers,
    "spliced": _spliced, "lines": _lines, "split": lambda rng: _Writer(rng, slips=0).infer(),
}  # fmt: skip


# --- a grammar that slips

_SHAPES = (
    "[]", "[0]", "[-1]", "[1,-1]", "[1.0,2]", "[9223372036854775807,2]", "[4294967296,4294967296]", "null", "[[1,2]]",
    "[18446744073709551616]", '"[1,2]"', "[1,1,1,2]", "[2]", "[1,3]", f"[{'1,' * 200}2]",
)  # fmt: skip
_SIZES = (
    "-1", "0", "31", "33", "9223372036854775807", "18446744073709551616", "1.5", "null", '"8"', "[8]", "true",
)  # fmt: skip


def _text(value: str) -> str:
    return json.dumps(value)


class _Writer:
    """Writes one request. At each place there is something wrong to write, which it does one time in `slips`."""

    def __init__(self, rng: random.Random, slips: int = 14, model: str = "") -> None:
        self._rng, self._slips = rng, slips
        self._model = model or rng.choice(tuple(MODELS))
        self._type, self._shape = MODELS[self._model]
        self._count = self._shape[0] * (self._shape[1] if len(self._shape) > 1 else 1)

    def _slip(self) -> bool:
        return self._slips > 0 and self._rng.randrange(self._slips) == 0

    def _or(self, right: str, *wrong: str) -> str:
        return self._rng.choice(wrong) if self._slip() else right

    @property
    def line(self) -> bytes:
        """The request line of an infer request."""
        return f"POST {self._path('infer')} HTTP/1.1".encode("latin-1")

    def _path(self, verb: str) -> str:
        name = self._or(
            self._model, "nothing", "..%2f..%2fetc", "%00", "a" * 300, "%ff", "a%20b", "x/y", "", ".", "%2e%2e"
        )
        version = self._or("", "/versions/1", "/versions/0", "/versions/-1", "/versions/" + "9" * 30, "/versions/%31")
        return f"/v2/models/{name}{version}/{verb}{self._or('', '?', '?a=b', '#x', '/', '//', '%2f')}"

    # --- bodies

    def tensors(self) -> tuple[bytes, tuple[bytes, ...]]:
        """(body, fields) of an infer request."""
        binary = self._type == "FP16" or self._rng.random() < 0.4
        payload = self._payload() if binary else b""
        text = self._document(len(payload) if binary else None)
        if self._slip():
            text = self._encoded_badly(text)
        if not binary:
            return text, ()
        length = str(len(text))
        length = self._or(
            length, "0", "-1", "5", str(len(text) + 1), str(len(text) - 1), "99999999999", "x", f"+{length}"
        )
        return text + payload, (f"Inference-Header-Content-Length: {length}".encode(),)

    def _encoded_badly(self, text: bytes) -> bytes:
        return self._rng.choice((
            b"\xef\xbb\xbf" + text, text.decode("latin-1").encode("utf-16"),
            text.decode("latin-1").encode("utf-32-le"), text + b"\xff",
            text.replace(b'"', b'"\xff', 1), text + text, text + smuggled(), b"[" * 20_000, b'{"a":' * 20_000,
            text[:-1], b"", b"null",
            text.replace(b"{", b'{"inputs":[],', 1), b"\x00" + text, text.replace(b":", b" :\t", 3),
            b"\r\n" + text + b"\r\n" * 3,
            text[:-1] + b',"' + b"k" * 9000 + b'":1}', b"1" * 5000, b"// a\n" + text, text.replace(b'"', b"'"),
            b'"\\ud800"',
        ))  # fmt: skip

    def _payload(self) -> bytes:
        if self._type == "BYTES":
            return b"".join(
                self._element() for _ in range(self._count + (self._rng.choice((-1, 1)) if self._slip() else 0))
            )
        item = {"FP32": 4, "FP16": 2, "INT64": 8}[self._type]
        size = self._count * item + (self._rng.choice((-item, -1, 1, item, 4096)) if self._slip() else 0)
        return self._rng.randbytes(size) if self._slip() else bytes(size)

    def _element(self) -> bytes:
        word = self._rng.choice((b"", b"word", b"\xff\xfe", "wörd".encode(), b"a" * 50))
        wrong = (len(word) + 1, 0xFFFFFFFF, 0x7FFFFFFF, 5)
        return struct.pack("<I", self._rng.choice(wrong) if self._slip() else len(word)) + word

    def _document(self, binary: int | None) -> bytes:
        count = self._rng.choice((0, 2, 9)) if self._slip() else 1
        members = ['"inputs":[' + ",".join(self._tensor(binary) for _ in range(count)) + "]"]
        if self._rng.random() < 0.4:
            right = json.dumps(f"r{self._rng.randrange(99)}")
            members.append(f'"id":{self._or(right, "7", "null", "{}", _text("i" * 5000))}')
        if self._rng.random() < 0.4:
            members.append(f'"outputs":[{self._output()}]')
        if self._rng.random() < 0.5:
            members.append(f'"parameters":{self._parameters()}')
        if self._slip():
            more = (members[0], '"x":1', '"model_name":"other"', '"inputs":null', '"":""', '"a":[[[[[[]]]]]]')
            members.append(self._rng.choice(more))
        if self._rng.random() < 0.2:
            self._rng.shuffle(members)
        return ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")

    def _tensor(self, binary: int | None) -> str:
        name = self._or(_text("x"), "1", "null", _text(""), _text("n" * 3000), _text("y"))
        kinds = map(_text, ("FP64", "fp32", "BF16", "BYTES", "", "INT8", "null"))
        members = [f'"name":{name}', f'"datatype":{self._or(_text(self._type), "7", "null", *kinds)}']
        members.append(f'"shape":{self._or(json.dumps(self._shape), *_SHAPES)}')
        if binary is None:
            members.append(f'"data":{self._data()}')
        if binary is not None or self._slip():
            members.append(f'"parameters":{{"binary_data_size":{self._or(str(binary or 0), *_SIZES)}}}')
        if self._slip():
            more = (members[0], members[-1], '"data":[1]', '"parameters":{"shared_memory_region":"r"}', '"z":{}')
            members.append(self._rng.choice(more))
        return "{" + ",".join(members) + "}"

    def _data(self) -> str:
        count = self._count + (self._rng.choice((-1, 1, 100)) if self._slip() else 0)
        values = [self._value() for _ in range(max(count, 0))]
        if len(self._shape) > 1 and self._rng.random() < 0.3:
            row = self._shape[1] + (1 if self._slip() else 0)
            return "[" + ",".join(f"[{','.join(values[at : at + row])}]" for at in range(0, len(values), row)) + "]"
        flat = f"[{','.join(values)}]"
        return self._or(
            flat,
            "null",
            "{}",
            "1",
            '"1,2"',
            "[[" * 5000,
            "[" * 40_000,
            f"[{flat}]",
            flat[:-1],
            "[[1],[2,3]]",
            "[1,]",
            "[,1]",
        )

    def _value(self) -> str:
        if self._type == "BYTES":
            right = json.dumps(self._rng.choice(("", "word", "wörd", "\\", "a" * 60, "\x00")))
        elif self._type == "INT64":
            right = str(self._rng.randrange(-(1 << 63), 1 << 63))
        else:
            right = self._rng.choice(("0", "1", "-2.5", "1e3", "3.4e38", "1e-40", "-0.0"))
        wrong = (
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            "-1e999",
            "9" * 5000,
            "null",
            "true",
            '"x"',
            "[]",
            "{}",
            "01",
            "+1",
            ".5",
            "1e400",
        )
        return self._or(right, *wrong, '"\\ud800"', '"\\u0000"', "18446744073709551616", "0x10", "1_000")

    def _output(self) -> str:
        name = self._or('"y"', '"z"', "null", '""', "1")
        asked = self._or("true", "false", "1", "null", '"true"')
        more = self._or(
            "", ',"classification":2', ',"classification":-1', ',"classification":1e9', ',"shared_memory_region":"r"'
        )
        return f'{{"name":{name},"parameters":{{"binary_data":{asked}{more}}}}}'

    def _parameters(self) -> str:
        one = self._rng.choice((
            f'"binary_data_output":{self._or("true", "false", "1", "null")}',
            f'"priority":{self._or("3", "0", "-1", "256", "1e3", "null", "18446744073709551616")}',
            f'"timeout":{self._or("20000000", "1", "0", "-1", "1e30", "null", "18446744073709551615")}',
            f'"sequence_id":{self._or("0", "1", "-1", chr(34) + "s" + chr(34), "18446744073709551616")}',
            '"sequence_start":true,"sequence_end":true', '"unheard_of":[1]', f'"{"p" * 3000}":1', '"triton_x":1', "",
        ))  # fmt: skip
        return "{" + one + "}"

    # --- heads

    def message(self, line: str, body: bytes, fields: Sequence[bytes] = ()) -> bytes:
        """The request of that line, its body framed by its length or in chunks."""
        rng, more = self._rng, list(fields)
        if rng.random() < 0.5:
            more.append(rng.choice((
                b"Content-Type: application/json", b"Content-Type: application/octet-stream", b"X-Request-Id: a-1",
                b"Priority: u=1",
                b"Accept: */*", b"Accept-Encoding: gzip", b"Accept-Encoding: gzip, deflate, br",
                b"Connection: keep-alive",
                b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", b"Request-Timeout-Ms: 20000",
                b"User-Agent: ecu/1",
            )))  # fmt: skip
        if self._slip():
            more.append(rng.choice((
                b"Content-Type: text/plain", b"Content-Type: image/jpeg",
                b"Content-Type: application/xml; charset=utf-16", b"Priority: u=x",
                b"Request-Timeout-Ms: soon", b"Request-Timeout-Ms: -1", b"Request-Timeout-Ms: 0.001",
                b"X-Request-Id: a b", b"X-Request-Id: ",
                b"Inference-Header-Content-Length: 3", b"Accept-Encoding: " + b"gzip, " * 100,
                b"Connection: close", b"Accept: text/nothing",
                b"traceparent: 00-0", b"X: " + smuggled().replace(b"\r\n", b"  "), b"Expect: 100-continue",
                b"Expect: miracles",
            )))  # fmt: skip
        if self._slip() or (self._slips and rng.random() < 0.05):
            body, coding = self._coded(body)
            more.append(b"Content-Encoding: " + coding)
        rng.shuffle(more)
        if body and rng.random() < 0.15:
            framing, body = b"Transfer-Encoding: chunked", self._chunked(body)
        else:
            framing = b"Content-Length: %d" % len(body)
        return b"\r\n".join([line.encode("latin-1"), b"Host: ecu", framing, *more, b"", body])

    def _coded(self, body: bytes) -> tuple[bytes, bytes]:
        packed = gzip.compress(body, 1, mtime=0)
        return self._rng.choice((
            (packed, b"gzip"), (zlib.compress(body), b"deflate"), (packed[:-9], b"gzip"), (packed + b"x", b"gzip"),
            (body, b"gzip"),
            (body, b"br"), (body, b"identity"), (_BOMB, b"gzip"), (packed + packed, b"gzip"),
            (gzip.compress(packed, mtime=0), b"gzip"),
            (packed, b"deflate"), (b"", b"gzip"), (packed, b"gzip, gzip"), (packed, b"x-gzip"),
            (self._rng.randbytes(40), b"gzip"),
        ))  # fmt: skip

    def _chunked(self, body: bytes) -> bytes:
        rng, parts, at = self._rng, [], 0
        while at < len(body):
            piece = body[at : at + rng.choice((1, 7, 100, 5000)) if len(body) < 2000 else at + 5000]
            extension = rng.choice((b"", b"", b"", b";a=b", b';q="' + b"x" * 20 + b'"'))
            parts.append(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece))
            at += len(piece)
        trailer = rng.choice((b"", b"", b"X-Sum: 17\r\n"))
        return b"".join((*parts, b"0\r\n", trailer, b"\r\n"))

    def infer(self) -> bytes:
        """Tensors in, tensors out."""
        body, fields = self.tensors()
        return self.message(self.line.decode("latin-1"), body, fields)

    def records(self) -> bytes:
        """A stream of several, all sent at once."""
        frames, parts = self._rng.random() < 0.5, []
        for _ in range(self._rng.randint(1, 4)):
            if frames:
                payload = self._payload()
                text = self._document(len(payload))
                size = len(text) + (self._rng.choice((-1, 1, 1 << 20)) if self._slip() else 0)
                total = (
                    4 + len(text) + len(payload) + (self._rng.choice((-1, 1, 1 << 29, 1 << 31)) if self._slip() else 0)
                )
                parts.append(struct.pack("<II", total & 0xFFFFFFFF, size & 0xFFFFFFFF) + text + payload)
            else:
                parts.append(self._document(None) + self._or("\n", "\r\n", "\n\n\n", "", "\r", "\x00\n").encode())
        kind = "application/vnd.tightfit.frames" if frames else "application/x-ndjson"
        kind = self._or(kind, "application/json", "text/plain", "", "multipart/mixed", "multipart/mixed; boundary=b")
        accept = self._or(
            "*/*", "application/x-ndjson", "text/event-stream", "application/vnd.tightfit.frames", "text/x"
        )
        fields = (f"Content-Type: {kind}".encode(), f"Accept: {accept}".encode())
        line = f"POST {self._path('stream')} HTTP/1.1"
        return b"\r\n".join([line.encode(), b"Host: ecu", *fields, self._framed(b"".join(parts))])

    def _framed(self, body: bytes) -> bytes:
        if self._rng.random() < 0.5:
            return b"Transfer-Encoding: chunked\r\n\r\n" + self._chunked(body)
        return b"Content-Length: %d\r\n\r\n" % len(body) + body

    def other(self) -> bytes:
        """What is not an infer request."""
        rng = self._rng
        method, path = rng.choice(_OTHERS)
        path = path.replace("MODEL", self._model)
        path = self._or(
            path, path + "?a=%00", path + "/", "/" + path, path + "%", "http://ecu" + path, path.upper(), path + ";x"
        )
        body = rng.choice(_BODIES) if method in ("POST", "PUT") else b""
        return self.message(f"{method} {path} HTTP/1.1", body)


_OTHERS = (
    ("GET", "/v2"), ("GET", "/v2/health/live"), ("GET", "/v2/health/ready"), ("GET", "/v2/models/MODEL"),
    ("GET", "/v2/models/MODEL/config"), ("GET", "/v2/models/MODEL/ready"), ("HEAD", "/v2/models/MODEL"),
    ("HEAD", "/v2/health/live"), ("OPTIONS", "*"), ("OPTIONS", "/v2/models/MODEL/infer"),
    ("GET", "/v2/models/MODEL/versions/7"), ("POST", "/v2/repository/index"), ("GET", "/v2/logging"),
    ("POST", "/v2/repository/models/MODEL/load"), ("POST", "/v2/repository/models/MODEL/unload"),
    ("POST", "/v2/trace/setting"), ("GET", "/v2/models/MODEL/trace/setting"), ("POST", "/v2/logging"),
    ("GET", "/v2/systemsharedmemory/status"), ("POST", "/v2/cudasharedmemory/region/a/register"),
    ("POST", "/v2/models/MODEL/image"), ("POST", "/v2/models/MODEL/generate"), ("PUT", "/v2/models/MODEL/infer"),
    ("POST", "/v2/models/MODEL/generate_stream"), ("DELETE", "/v2/models/MODEL"), ("GET", "/v2/models/MODEL/results"),
    ("GET", "/v2/nothing"), ("TRACE", "/v2"), ("PATCH", "/"),
)  # fmt: skip
_BODIES = (
    b"", b"{}", b"[]", b"{", b'{"text_input":"a"}', b'{"log_info":false,"log_verbose_level":-1}', b"\xff\xd8\xff\xe0",
    b'{"parameters":{"unload_dependents":true}}', b'{"ready":true}', b"null", b"1" * 5000, b"[" * 20_000,
)  # fmt: skip
_BOMB = gzip.compress(bytes(4 << 20), 9, mtime=0)

GRAMMAR: dict[str, Callable[[random.Random], bytes]] = {
    "tensors": lambda rng: _Writer(rng).infer(),
    "numbers and text": lambda rng: _Writer(rng, 8, rng.choice(("adding", "words", "whole"))).infer(),
    "raw tensors": lambda rng: _Writer(rng, 10, rng.choice(("half", "words"))).infer(),
    "records": lambda rng: _Writer(rng).records(),
    "other requests": lambda rng: _Writer(rng).other(),
}
