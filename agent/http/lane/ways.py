"""What the lane does with the body of a request, and how it says the answer: the functions of `agent.http.codecs`, with
what is equal from request to request remembered.

A client sends the same JSON in front of its tensors again and again: what it says is checked once, and from then on a
request costs no more than its tensors. So do answers of raw tensors, whose heads differ in nothing but the date.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus

from msgspec import UNSET, structs

from agent.calls import Call
from agent.http.answers import SERVER
from agent.http.codecs import HEADER_LENGTH, Head, InferRequest, encode_parts, read_head, split_body
from agent.http.json_data import pack_json
from agent.http.lane.heads import Head as PlainHead
from agent.http.runs import outputs_in, write
from agent.http.tensors import OFF_LOOP_BYTES, encoded, is_quick, wished
from agent.request import Result
from agent.served import Served
from targets.errors import ContractError
from targets.tensor import DType, TensorSpec

# How many are remembered of a version, and how long the JSON of each may be.
_REMEMBERED, _REMEMBERED_BYTES = 64, 4096
# Below this nothing is compressed (`choose_encoding`), whatever the client accepts.
_PLAIN_BYTES = 1024
_DATA = b'"data"'

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Asked:
    """A request whose tensors stand in its slot, and not here. `sizes` are the bytes of each input, `wanted` indices of
    outputs.

    One that may come again has `places` of its tensors, as (input, start, bytes) in the binary part of `nbytes`, and
    `answer`, the one to outputs of `shapes`, up to the date and behind it.
    """

    request: InferRequest
    sizes: tuple[int, ...]
    wanted: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...] = ()
    nbytes: int = -1
    shapes: Shapes = ()
    answer: tuple[bytes, bytes] | None = None


@dataclass(frozen=True, slots=True)
class _Text:
    """A request in JSON alone that came before. `inputs` are (index, spec, shape) in the order of the text; `behind` is
    what stands behind the data of each, up to that of the next."""

    asked: Asked
    inputs: tuple[tuple[int, TensorSpec, list[int]], ...]
    behind: tuple[bytes, ...]


@dataclass
class Way:
    """One version, where the lane can answer for it. `limit` is the most bytes that a body of it can have."""

    served: Served
    limit: int
    _known: dict[bytes, Asked] = field(default_factory=dict)
    _texts: dict[bytes, _Text] = field(default_factory=dict)
    _quick: dict[tuple[int, str | None], bool] = field(default_factory=dict)

    def takes(self, length: int, header_length: str | None) -> bool:
        """Whether a body of that length takes no time to decode."""
        quick = self._quick.get((length, header_length))
        if quick is None:
            if len(self._quick) >= _REMEMBERED:
                self._quick.clear()
            quick = length <= self.limit and is_quick(self.served.model.contract, length, "", header_length)
            self._quick[length, header_length] = quick
        return quick

    def decode(self, body: bytes, plain: PlainHead, slot: int) -> Asked:
        """Check a body and write its tensors into the slot. Raises ContractError or RefusedError."""
        at = plain.json_length
        known = self._known.get(body[:at]) if 0 <= at < len(body) else None
        if known is not None and known.nbytes == len(body) - at:
            slab, binary = self.served.slab, memoryview(body)[at:]
            for index, start, nbytes in known.places:
                slab.put(slot, index, binary[start : start + nbytes])
            return known
        if plain.header_length is None and (again := self._with_other_data(body, slot)) is not None:
            return again
        json, binary = split_body(body, plain.header_length)
        head = read_head(json, self.served.model.contract.whole, nbytes=len(binary))
        request = head.request(binary)
        sizes = write(self.served, slot, request.payloads)
        asked = Asked(structs.replace(request, payloads=()), sizes, request.wanted)
        if len(json) <= _REMEMBERED_BYTES and _is_fixed(head) and sum(sizes) == len(binary):
            self._remember(json, head, asked)
        elif not binary and not request.id and _is_fixed(head):
            self._remember_text(json, head, asked)
        return asked

    def _with_other_data(self, body: bytes, slot: int) -> Asked | None:
        """A request that differs in nothing but numbers from one that came before, its tensors written into the slot.
        None where it is another, or its data is not valid: then it is read as one that never came."""
        start = body.find(b"[", body.find(_DATA))
        text = self._texts.get(body[:start]) if start > 0 else None
        if text is None:
            return None
        payloads = [b""] * len(text.inputs)
        for (index, spec, shape), behind in zip(text.inputs, text.behind, strict=True):
            # No list of numbers holds what stands between two.
            end = len(body) - len(behind) if behind is text.behind[-1] else body.find(behind, start)
            data = body[start:end]
            if end <= start or data[:1] != b"[" or data[-1:] != b"]" or not body.startswith(behind, end):
                return None
            try:
                payloads[index] = pack_json(data, spec, shape)
            except ContractError:
                return None
            start = end + len(behind)
        write(self.served, slot, payloads)
        return text.asked

    def _remember_text(self, json: bytes, head: Head, asked: Asked) -> None:
        places = head.data_in(json)
        ends = [*[start for start, _ in places[1:]], len(json)]
        # In the order of the text, in one piece, and found again where it begins.
        if not places or places != sorted(places) or places[0][0] != json.find(b"[", json.find(_DATA)):
            return
        behind = tuple([json[end:following] for (_, end), following in zip(places, ends, strict=True)])
        if places[0][0] + sum(map(len, behind)) > _REMEMBERED_BYTES:
            return
        inputs = list(head.contract.inputs)
        if len(self._texts) >= _REMEMBERED:
            self._texts.clear()
        self._texts[json[: places[0][0]]] = _Text(
            asked, tuple([(inputs.index(spec), spec, item.shape) for item, spec in head.inputs]), behind
        )

    def _remember(self, json: bytes, head: Head, asked: Asked) -> None:
        inputs, start = list(head.contract.inputs), 0
        places = []
        for _, spec in head.inputs:
            index = inputs.index(spec)
            places.append((index, start, asked.sizes[index]))
            start += asked.sizes[index]
        asked.places, asked.nbytes = tuple(places), start
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[json] = asked

    def encode(self, call: Call, asked: Asked, result: Result, accept: str | None, close: bool) -> bytes:
        """The answer as it is sent. Raises RefusedError where an output cannot be said in the form asked for."""
        served, slot = call.seat
        shapes = tuple([output.shape for output in result.outputs])
        if asked.answer is not None and asked.shapes == shapes and not call.echo and not close:
            before, behind = asked.answer
            slab = served.slab
            raw = [slab.seen(slot, output.index, output.nbytes) for output in result.outputs]
            return b"".join((before, date(), behind, *raw))
        made = outputs_in(served, slot, result)
        tensors = wished(served.model.contract, asked.request, made)
        fixed = all(
            wish.binary and tensor.spec.dtype is not DType.STRING
            for wish, tensor in zip(asked.request.wishes, tensors, strict=True)
        )
        if asked.nbytes >= 0 and asked.answer is None and fixed:
            self._remember_answer(asked, shapes, *encode_parts(served.name, served.version, asked.request.id, tensors))
        body, headers = encoded(served.name, served.version, asked.request, tensors, accept)
        return answer(200, headers, body, call.echo, close)

    def _remember_answer(self, asked: Asked, shapes: Shapes, json: bytes, raw: Sequence[memoryview]) -> None:
        nbytes = len(json) + sum(view.nbytes for view in raw)
        if nbytes < _PLAIN_BYTES:
            headers = {"Content-Type": "application/octet-stream", **SERVER, HEADER_LENGTH: str(len(json))}
            asked.shapes = shapes
            asked.answer = before_date(200, headers, nbytes), b"\r\n\r\n" + json


def _is_fixed(head: Head) -> bool:
    """Whether tensors of such a request are as long as the JSON says, and valid whatever they hold."""
    return not any(spec.dtype in (DType.STRING, DType.BOOL) for _, spec in head.inputs)


def way_of(served: Served, limit: int) -> Way | None:
    """The lane's way with a version; None where only the other one can answer for it: what is asked with images, kept,
    run in windows or with a state, or so large that it is written by a thread or in pieces."""
    contract = served.model.contract
    if served.images or served.cached or contract.split is not UNSET or contract.states is not UNSET:
        return None
    if sum(spec.max_nbytes for spec in contract.outputs) >= OFF_LOOP_BYTES:
        return None
    return Way(served, limit)


# --- bytes of answers, in aiohttp's order


def answer(status: int, headers: Mapping[str, str], body: bytes, echo: Mapping[str, str], close: bool) -> bytes:
    """An answer as it is sent."""
    more = "".join([f"\r\n{name}: {value}" for name, value in echo.items()])
    connection = b"\r\nConnection: close" if close else b""
    return b"".join(
        (before_date(status, headers, len(body)), date(), connection, more.encode("ascii"), b"\r\n\r\n", body)
    )


def before_date(status: int, headers: Mapping[str, str], nbytes: int) -> bytes:
    """The head of an answer, up to the value of Date."""
    lines = [f"HTTP/1.1 {status} {_phrase(status)}", *[f"{name}: {value}" for name, value in headers.items()]]
    return "\r\n".join([*lines, f"Content-Length: {nbytes}", "Date: "]).encode("ascii")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


_date: tuple[int, bytes] = (0, b"")


def date() -> bytes:
    """Now, as in the field Date."""
    global _date  # noqa: PLW0603 - made once a second
    now = int(time.time())
    if now != _date[0]:
        _date = now, formatdate(now, usegmt=True).encode("ascii")
    return _date[1]
