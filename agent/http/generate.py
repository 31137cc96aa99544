"""Text in, text out, token by token: Triton's generate extension, and the generate API of the Open Inference Protocol.

Theory of operation. A text has one slot from its prompt to its end (`agent.generation.session`). Every token is a run
of its own and waits its turn like any request, so that other models, and other texts, go on meanwhile. The deadline of
the request is that of the first token; each that follows has as long from the one before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from numpy.typing import NDArray

from agent.calls import Call
from agent.config import Config
from agent.errors import Reason, RefusedError
from agent.gateway import Gateway
from agent.generation.sampling import Sampler, Sampling
from agent.generation.session import Session
from agent.generation.text import Finish, Writer
from agent.generation.tokenizer import Text
from agent.http.answers import CutOffError, json
from agent.http.bodies import decompress
from agent.http.framing.encoder import Framing
from agent.http.framing.events import MEDIA_TYPE as EVENTS
from agent.http.runs import Runs
from agent.http.sink import Sink, SlowReaderError
from agent.http.strict_json import decode
from agent.served import Served
from targets.errors import ContractError, TightfitError, did_you_mean

Handler = Callable[[Call, web.Request], Awaitable[web.StreamResponse]]
Limit = Callable[[Served], int]
Settled = Callable[[Handler, web.Request], Awaitable[web.StreamResponse]]
Receive = Callable[[Call, web.Request, Limit], Awaitable[bytes]]

# A prompt is text, and no model that fits a board reads more of it.
_BODY_BYTES = 1 << 20
# Longer text is made tokens of by a thread, so that other requests are answered meanwhile.
_ON_LOOP_CHARACTERS = 4096
_MOST_STOPS, _STOP_CHARACTERS = 16, 256
# As long as a text may be whose model has no end of what it looks back on; what is kept of it then are some 20 MB.
_MOST_TOKENS = 1 << 16
# Where nobody says, as the protocol has it.
_TOKENS, _TEMPERATURE = 20, 1.0
_MOST_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to generate."""

    prompt: str
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    timeout_s: float | None
    priority: int
    details: bool


class Token(msgspec.Struct, frozen=True):
    """A token that was generated; `logprob` is the natural logarithm of its probability."""

    id: int
    text: str
    logprob: float
    special: bool


class Details(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the end of a text: why it is there, and how long prompt and text were. `token` is that of an event, and
    `logprobs` are all of a text, where the client asked for details."""

    finish_reason: Finish | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    token: Token | None = None
    logprobs: list[Token] | None = None


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer, or, of a stream, what there is more of it."""

    model_name: str
    model_version: str
    text_output: str
    details: Details | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one token brought: the text that it shows, itself where the client wants it, and, of the last, the end."""

    shown: str
    token: Token | None
    end: Details | None


class _Events(Framing):
    media_type = f"{EVENTS}; charset=utf-8"
    heartbeat = b":\n\n"


class GenerateApi:
    """Handlers of text generation. `settled` is what every request is run in, and `receive` gives its body."""

    def __init__(self, gateway: Gateway, config: Config, runs: Runs, settled: Settled, receive: Receive) -> None:
        self._gateway, self._config, self._runs = gateway, config, runs
        self._settled, self._receive = settled, receive

    def add_to(self, app: web.Application) -> None:
        """The routes."""
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            app.router.add_post(f"{prefix}/generate", self.generate)
            app.router.add_post(f"{prefix}/generate_stream", self.generate_stream)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """The whole text at once."""
        return await self._settled(self._generate, request)

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """The text as it comes, as server-sent events."""
        return await self._settled(self._generate_stream, request)

    async def _generate(self, call: Call, request: web.Request) -> web.StreamResponse:
        pieces = [piece async for piece in self._pieces(call, request)]
        details = pieces[-1].end
        if pieces[-1].token is not None and details is not None:
            details = msgspec.structs.replace(details, logprobs=[piece.token for piece in pieces if piece.token])
        return json(self._generated(call, "".join(piece.shown for piece in pieces), details))

    async def _generate_stream(self, call: Call, request: web.Request) -> web.StreamResponse:
        sink: Sink | None = None
        async with contextlib.aclosing(self._pieces(call, request)) as pieces:
            try:
                async for piece in pieces:
                    details = piece.end
                    if piece.token is not None:
                        details = msgspec.structs.replace(details or Details(), token=piece.token)
                    if not (piece.shown or details):
                        continue
                    if sink is None:
                        # Not before there is something to say: what fails until then has a status of its own.
                        sink = self._sink(request)
                        await sink.open()
                    await sink.write(_event(self._generated(call, piece.shown, details)))
                if sink is None:
                    raise RuntimeError("a text without an end")
                await sink.close()
                return sink.response
            except SlowReaderError as error:
                if sink is None:
                    raise
                sink.abort()
                raise CutOffError(error.reason, str(error), sink.response) from None
            except TightfitError as error:
                if sink is None:
                    raise
                await sink.close(_event({"error": str(error)}))
                reason = error.reason if isinstance(error, RefusedError) else Reason.BAD_REQUEST
                raise CutOffError(reason, str(error), sink.response) from None

    def _generated(self, call: Call, text: str, details: Details | None) -> Generated:
        served, _ = call.seat
        return Generated(served.name, served.version, text, details)

    def _sink(self, request: web.Request) -> Sink:
        options = self._config.streams
        return Sink(request, _Events(), options.unread_kib << 10, options.patience_s)

    async def _pieces(self, call: Call, request: web.Request) -> AsyncGenerator[_Piece, None]:
        """What is generated for a request, token by token; the last has an end. Raises TightfitError."""
        body = await self._receive(call, request, self._body_bytes)
        served, slot = call.seat
        text = _text_of(served)
        if encoding := request.headers.get("Content-Encoding"):
            body = await self._runs.off_loop(decompress, body, encoding, self._body_bytes(served))
        wanted = parse(body)
        call.priority = wanted.priority or call.priority
        if wanted.timeout_s is not None:
            self._gateway.set_timeout(call, wanted.timeout_s)
        quick = len(wanted.prompt) <= _ON_LOOP_CHARACTERS
        prompt = await self._runs.in_turn(quick, text.encode, wanted.prompt)
        _check_prompt(prompt, text)
        session = Session(served.model.contract, text.roles, served.slab, slot)
        writer = Writer(text.decode, prompt, text.eos, wanted.stops, wanted.max_tokens)
        sampler = Sampler(wanted.sampling)
        allowed_s = call.deadline - call.arrived
        new = prompt
        while writer.finish is None:
            scores = await self._next(call, session, new)
            token = _picked(sampler, scores)
            said = Token(token, *_spelled(text, sampler, scores, token)) if wanted.details else None
            self._gateway.prolong(call, allowed_s)
            new = [token]
            shown = writer.feed(token)
            if writer.finish is None and session.full:
                shown += writer.end(Finish.LENGTH)
            yield _Piece(shown, said, writer.finish and Details(writer.finish, len(prompt), writer.count))

    async def _next(self, call: Call, session: Session, new: list[int]) -> NDArray[Any]:
        """Scores of the token behind these new ones; they stand in the slot until the next run."""
        *before, last = session.pieces(new)
        for piece in before:
            session.take(await self._gateway.step(call, *session.fill(piece, scores=False)), len(piece))
        scores = session.take(await self._gateway.step(call, *session.fill(last)), len(last))
        if scores is None:
            raise RefusedError(Reason.ENGINE_ERROR, "the model gave no scores of tokens")
        return scores

    def _body_bytes(self, served: Served) -> int:
        """The most that a request has. Raises RefusedError of a model that generates no text."""
        _text_of(served)
        return min(self._config.http.body_bytes, _BODY_BYTES)


def _text_of(served: Served) -> Text:
    if served.text is None:
        lacks = "has no tokenizer" if served.model.contract.states else "has no state pairs"
        raise RefusedError(
            Reason.BAD_REQUEST,
            f"model {served.name!r} generates no text: it {lacks}",
            "compile a language model with its past_key_values, and with --tokenizer",
        )
    return served.text


def _picked(sampler: Sampler, scores: NDArray[Any]) -> int:
    try:
        return sampler.pick(scores)
    except ValueError as error:
        raise RefusedError(Reason.ENGINE_ERROR, str(error)) from None


def _spelled(text: Text, sampler: Sampler, scores: NDArray[Any], token: int) -> tuple[str, float, bool]:
    spelled, special = text.spell(token)
    return spelled, sampler.logprob(scores, token), special


def _check_prompt(prompt: list[int], text: Text) -> None:
    if not prompt:
        raise ContractError("text_input has no tokens", "there is nothing to go on from")
    context = text.roles.context
    if context is not None and len(prompt) > context:
        raise ContractError(f"text_input has {len(prompt)} tokens, the model can look back on {context}", "shorten it")


def _event(value: Any) -> bytes:
    # JSON has no line breaks, so it is one line.
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# --- requests


def parse(body: bytes) -> Wanted:
    """Read a request. Raises ContractError that says what is wrong."""
    fields = decode(body, dict[str, Any], "generate request", 'send {"text_input": "..."} as UTF-8')
    prompt = fields.pop("text_input", None)
    parameters = fields.pop("parameters", {})
    if not isinstance(prompt, str):
        raise ContractError("text_input is missing, or is no string", 'send {"text_input": "..."}')
    if not isinstance(parameters, dict):
        raise ContractError("parameters are no object", 'send {"parameters": {"max_tokens": 20}}')
    # What stands beside text_input is a parameter too, as in Triton.
    given = {name: value for name, value in {**fields, **parameters}.items() if value is not None}
    for name, value in given.items():
        if name not in _PARAMETERS:
            raise ContractError(f"unknown parameter {name[:100]!r}", did_you_mean(name[:100], _PARAMETERS))
        what, holds = _PARAMETERS[name]
        if not holds(value):
            raise ContractError(f"parameter {name} is {str(value)[:100]!r}", f"it must be {what}")
    stop = given.get("stop", ())
    timeout_us = given.get("timeout", 0)
    return Wanted(
        prompt,
        Sampling(
            float(given.get("temperature", _TEMPERATURE)), given.get("top_k", 0), float(given.get("top_p", 1.0)),
            given.get("seed"),
        ),
        given.get("max_tokens", _TOKENS),
        (stop,) if isinstance(stop, str) else tuple(stop),
        timeout_us / 1e6 if timeout_us else None,
        given.get("priority", 0),
        given.get("details", False),
    )  # fmt: skip


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _strings(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return (
        isinstance(listed, list)
        and len(listed) <= _MOST_STOPS
        and all(isinstance(each, str) and 0 < len(each) <= _STOP_CHARACTERS for each in listed)
    )


# `stream` is of clients of Triton's: the path says it.
_PARAMETERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": (
        f"a number from 0 (always the most likely) to {_MOST_TEMPERATURE:g}",
        _number(0, _MOST_TEMPERATURE),
    ),
    "top_k": ("a whole number, 0 for all", _whole(0, 1 << 31)),
    "top_p": ("a number from 0 to 1", _number(0, 1)),
    "seed": ("a whole number from 0 to 2^63 - 1", _whole(0, (1 << 63) - 1)),
    "max_tokens": (f"a whole number from 1 to {_MOST_TOKENS}", _whole(1, _MOST_TOKENS)),
    "stop": (f"a string, or up to {_MOST_STOPS}, of 1 to {_STOP_CHARACTERS} characters", _strings),
    "timeout": ("a whole number of microseconds", _whole(0, 1 << 53)),
    "priority": ("1 (the highest) to 255, or 0", _whole(0, 255)),
    "stream": ("true or false", _flag),
    "details": ("true or false", _flag),
}
