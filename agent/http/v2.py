"""The Open Inference Protocol v2 over HTTP/1.1.

Every error is `{"error": "..."}` with a status from the reason table; clients index that key and fail without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from agent import log
from agent.config import Config
from agent.errors import TABLE, Reason, RefusedError
from agent.gateway import Call, Gateway
from agent.http.bodies import check_length, choose_encoding, compress, decompress, read_body
from agent.http.codecs import (
    HEADER_LENGTH,
    InferRequest,
    OutputTensor,
    decode_infer,
    encode_infer,
    encode_parts,
    largest_body,
)
from agent.images import Images
from agent.request import Result
from agent.strings import pack_strings, unpack_strings
from agent.telemetry import CONTENT_TYPE
from targets.errors import TightfitError, did_you_mean
from targets.tensor import Contract, DType, TensorSpec

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

EXTENSIONS = ("binary_tensor_data",)
# JSON past this is parsed and written by a thread, so that health checks are answered meanwhile. Raw tensors are only
# copied, at gigabytes per second, and a hop to a thread costs more than a copy of some megabytes.
_OFF_LOOP_BYTES = 64 << 10
_OFF_LOOP_RAW_BYTES = 4 << 20
# Parsing is Python work under one interpreter lock: more threads would only take turns.
_THREADS = 2
_MAX_ERROR_CHARACTERS = 2000
# The JSON around an image.
_HEAD_BYTES = 64 << 10
# An answer of raw tensors past this is sent straight out of its slot, in pieces, and never stands in memory twice.
_STREAMED_BYTES = 256 << 10
_PIECE_BYTES = 128 << 10
# Instead of aiohttp's, which tells the versions of Python and of itself.
_SERVER = {"Server": "tightfit-agent"}


class V2:
    """Handlers over one gateway. `images`: how the model takes encoded images, if it does."""

    def __init__(self, gateway: Gateway, images: Images | None, config: Config, version: str) -> None:
        self._gateway = gateway
        self._images = images
        self._model = gateway.model
        self._version = version
        self._log = log.get("http")
        self._image_bytes = min(config.http.body_bytes, images.max_bytes) if images else 0
        largest = largest_body(self._model.contract)
        if images:
            largest = max(largest, _base64_body(images.max_bytes))
        self._body_bytes = min(config.http.body_bytes, largest)
        self._body_s = config.http.body_s
        self._send_s = config.http.send_s
        self._has_strings = any(spec.dtype is DType.STRING for spec in self._model.contract.inputs)
        self._threads = ThreadPoolExecutor(_THREADS, "codec")

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_errors])
        app.router.add_get("/v2", self.server)
        app.router.add_get("/v2/health/live", self.live)
        app.router.add_get("/v2/health/ready", self.health_ready)
        app.router.add_get("/metrics", self.metrics)
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            app.router.add_get(prefix, self.metadata)
            app.router.add_get(f"{prefix}/ready", self.model_ready)
            app.router.add_post(f"{prefix}/infer", self.infer, expect_handler=partial(self._expect, self._body_bytes))
            if self._images:
                expect = partial(self._expect, self._image_bytes)
                app.router.add_post(f"{prefix}/image", self.image, expect_handler=expect)
        app.on_cleanup.append(self._cleanup)
        return app

    async def _cleanup(self, _: web.Application) -> None:
        self._threads.shutdown(wait=False)
        if self._images:
            self._images.thread.shutdown(wait=False)

    # --- what the server and the model are

    async def server(self, _: web.Request) -> web.Response:
        return _json({"name": "tightfit-agent", "version": self._version, "extensions": EXTENSIONS})

    async def live(self, _: web.Request) -> web.Response:
        return _json({"live": True})

    async def health_ready(self, _: web.Request) -> web.Response:
        return _json({"ready": self._gateway.ready}, 200 if self._gateway.ready else 503)

    async def model_ready(self, request: web.Request) -> web.Response:
        self._check_model(request)
        ready = self._gateway.ready
        return _json({"name": self._model.name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: web.Request) -> web.Response:
        self._check_model(request)
        contract = self._model.contract
        return _json(
            {
                "name": self._model.name,
                "versions": [self._model.version],
                "platform": f"{self._model.manifest.runtime}_onnx",
                "inputs": [_describe(spec) for spec in contract.inputs],
                "outputs": [_describe(spec) for spec in contract.outputs],
                **({"parameters": self._images.describe()} if self._images else {}),
            }
        )

    async def metrics(self, _: web.Request) -> web.Response:
        text = await self._off_loop(self._gateway.telemetry.text)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE, **_SERVER})

    # --- infer

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """Tensors in, tensors out; or an image in and an answer out, as tensors."""
        return await self._settled(self._infer, request)

    async def image(self, request: web.Request) -> web.StreamResponse:
        """An image file in, whatever Content-Type it has; the answer as JSON, a list for every output."""
        return await self._settled(self._image, request)

    async def _settled(
        self, handler: Callable[[Call, web.Request], Awaitable[web.StreamResponse]], request: web.Request
    ) -> web.StreamResponse:
        """One request from its head to its answer; whatever happens, its call is settled exactly once."""
        call = self._gateway.open()
        reason, message = Reason.OK, ""
        try:
            return await handler(call, request)
        except asyncio.CancelledError:
            reason = Reason.DISCONNECTED
            raise
        except _CutOffError as error:
            reason, message = error.reason, str(error)
            return error.response
        except RefusedError as error:
            reason, message = error.reason, str(error)
        except TightfitError as error:
            reason, message = Reason.BAD_REQUEST, str(error)
        except ConnectionError:
            reason, message = Reason.DISCONNECTED, "the client went away"
        except Exception as error:  # noqa: BLE001 - answered and logged; the server goes on
            reason, message = Reason.FAULT, f"the server failed: {type(error).__name__}"
            self._log.exception("infer failed", id=call.id)
        finally:
            self._gateway.settle(call, reason, message)
        return _refusal(reason, message, unread=not request.content.is_eof())

    async def _infer(self, call: Call, request: web.Request) -> web.StreamResponse:
        slot, body = await self._receive(call, request, self._body_bytes)
        header_length = request.headers.get(HEADER_LENGTH)
        encoding = request.headers.get("Content-Encoding", "")
        quick = not encoding and self._quick(len(body), header_length)
        decoded, nbytes = await self._in_turn(quick, self._decode, body, encoding, header_length, slot)
        del body  # from here on its tensors stand in the slot
        if decoded.timeout_s is not None:
            self._gateway.set_timeout(call, decoded.timeout_s)
        accept = request.headers.get("Accept-Encoding")
        images = self._images
        if images and decoded.is_image:
            (image,) = unpack_strings(memoryview(decoded.payloads[0]), 1)
            answer = await self._ask(call, slot, image)
            return await self._off_loop(self._encode, decoded, _tensors_of(decoded, answer, images.contract), accept)
        result = await self._gateway.infer(call, decoded.shapes, nbytes, tuple(w.index for w in decoded.wishes))
        size = sum(output.nbytes for output in result.outputs)
        raw = all(w.binary for w in decoded.wishes) and choose_encoding(accept, True, size) is None
        if raw and size >= _STREAMED_BYTES:
            return await self._stream(request, decoded, result, slot)
        tensors = self._tensors(decoded, result, slot)
        return await self._in_turn(size < _OFF_LOOP_BYTES, self._encode, decoded, tensors, accept)

    async def _image(self, call: Call, request: web.Request) -> web.StreamResponse:
        slot, body = await self._receive(call, request, self._image_bytes)
        if encoding := request.headers.get("Content-Encoding"):
            body = await self._off_loop(decompress, body, encoding, self._image_bytes)
        answer = await self._ask(call, slot, body)
        return _json(
            {
                "model_name": self._model.name,
                "model_version": self._model.version,
                **{name: _listed(array) for name, array in answer.items()},
            }
        )

    async def _receive(self, call: Call, request: web.Request, limit: int) -> tuple[int, bytes]:
        """(slot, body): who has no slot sends no body."""
        self._check_model(request)
        check_length(request, limit)
        slot = await self._gateway.admit(call)
        left_s = call.deadline - time.monotonic()
        return slot, await read_body(request, limit, min(self._body_s, max(left_s, 0.001)))

    async def _ask(self, call: Call, slot: int, image: bytes) -> dict[str, NDArray[Any]]:
        """The answer to an encoded image."""
        images, slab = self._images, self._gateway.slab
        assert images is not None  # noqa: S101 - for the type checker: only then images are taken
        filled = await self._off_loop(images.fill, image, slab, slot, threads=images.thread)
        result = await self._gateway.infer(call, (filled.shape,), (filled.nbytes,), images.outputs)
        return await self._off_loop(images.answer, result, slab, slot, filled, threads=images.thread)

    def _quick(self, nbytes: int, header_length: str | None) -> bool:
        """Whether a body takes no time to decode: little JSON, and not too much to copy."""
        if header_length is None or not header_length.isdecimal() or self._has_strings:
            return nbytes < _OFF_LOOP_BYTES
        return nbytes < _OFF_LOOP_RAW_BYTES and int(header_length[:18]) < _OFF_LOOP_BYTES

    def _decode(
        self, body: bytes, encoding: str, header_length: str | None, slot: int
    ) -> tuple[InferRequest, tuple[int, ...]]:
        """Decode the body and write its tensors into the slot: (request without them, bytes of each). An image stays
        in the request."""
        images = self._images.contract if self._images else None
        body = decompress(body, encoding, self._body_bytes)
        decoded = decode_infer(body, header_length, self._model.contract, images)
        if decoded.is_image:
            return decoded, ()
        for index, payload in enumerate(decoded.payloads):
            self._gateway.slab.input(slot, index)[: len(payload)] = np.frombuffer(payload, np.uint8)
        return replace(decoded, payloads=()), tuple(len(payload) for payload in decoded.payloads)

    def _encode(self, decoded: InferRequest, tensors: list[OutputTensor], accept: str | None) -> web.Response:
        """Copy the outputs, in the form each was asked for."""
        body, json_length = encode_infer(self._model.name, self._model.version, decoded.id, tensors)
        kind = "application/json" if json_length is None else "application/octet-stream"
        headers = {"Content-Type": kind, **_SERVER}
        if json_length is not None:
            headers[HEADER_LENGTH] = str(json_length)
        encoding = choose_encoding(accept, json_length is not None, len(body))
        if encoding:
            body = compress(body, encoding)
            headers["Content-Encoding"] = encoding
        return web.Response(body=body, headers=headers)

    def _tensors(self, decoded: InferRequest, result: Result, slot: int) -> list[OutputTensor]:
        """The wanted outputs, as they stand in the slot."""
        return [
            OutputTensor(
                self._model.contract.outputs[output.index],
                output.shape,
                self._gateway.slab.output(slot, output.index)[: output.nbytes],
                wish.binary,
            )
            for output, wish in zip(result.outputs, decoded.wishes, strict=True)
        ]

    async def _stream(
        self, request: web.Request, decoded: InferRequest, result: Result, slot: int
    ) -> web.StreamResponse:
        """Send raw outputs out of the slot. Raises _CutOffError when the client does not take them in time."""
        tensors = self._tensors(decoded, result, slot)
        head, raw = encode_parts(self._model.name, self._model.version, decoded.id, tensors)
        response = web.StreamResponse(
            headers={"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head)), **_SERVER}
        )
        response.content_length = len(head) + sum(view.nbytes for view in raw)
        await response.prepare(request)
        try:
            await asyncio.wait_for(_send(response, head, raw), self._send_s)
        except (TimeoutError, asyncio.TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            raise _CutOffError(
                Reason.SLOW_READER, f"the answer was not taken within {self._send_s:g} s", response
            ) from None
        return response

    # --- small parts

    def _check_model(self, request: web.Request) -> None:
        name, version = request.match_info["model"], request.match_info.get("version")
        if name != self._model.name:
            name = name[:100]
            raise RefusedError(Reason.UNKNOWN_MODEL, f"unknown model {name!r}", did_you_mean(name, [self._model.name]))
        if version not in (None, self._model.version):
            raise RefusedError(
                Reason.UNKNOWN_MODEL,
                f"model {name!r} has no version {version[:100]!r}",
                f"available: {self._model.version}",
            )

    async def _expect(self, limit: int, request: web.Request) -> web.StreamResponse | None:
        """Answer `Expect: 100-continue`: a body that would be refused is refused before it is sent."""
        try:
            check_length(request, limit)
        except RefusedError as error:
            return _refusal(error.reason, str(error), unread=True)
        if request.headers.get("Expect", "").lower() != "100-continue":
            raise web.HTTPExpectationFailed(text="available: 100-continue")
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # What counts as output is the final answer only.
        request.writer.output_size = 0
        return None

    async def _in_turn(self, quick: bool, function: Callable[..., T], *arguments: Any) -> T:
        """Call it: here when that takes no time, in a thread otherwise."""
        if quick:
            return function(*arguments)
        return await self._off_loop(function, *arguments)

    async def _off_loop(self, function: Callable[..., T], *arguments: Any, threads: Executor | None = None) -> T:
        future = asyncio.get_running_loop().run_in_executor(threads or self._threads, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # A thread cannot be stopped, and the slot must not be released while one works in it.
            await asyncio.wait([future])
            raise


def _base64_body(nbytes: int) -> int:
    """No request with an image of that size in base64 needs more."""
    return nbytes * 4 // 3 + _HEAD_BYTES


def _tensors_of(decoded: InferRequest, answer: dict[str, NDArray[Any]], contract: Contract) -> list[OutputTensor]:
    """The wanted outputs of an answer."""
    wanted = [(contract.outputs[wish.index], wish.binary) for wish in decoded.wishes]
    return [OutputTensor(spec, answer[spec.name].shape, _raw(answer[spec.name]), binary) for spec, binary in wanted]


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """An output's bytes as they are on the wire."""
    return np.frombuffer(pack_strings(array) if array.dtype == object else array.tobytes(), np.uint8)


def _listed(array: NDArray[Any]) -> list[Any]:
    return [text.decode() for text in array] if array.dtype == object else array.tolist()


class _CutOffError(RefusedError):
    """The answer had begun when it failed: the connection is closed, and nothing more can be said on it."""

    def __init__(self, reason: Reason, message: str, response: web.StreamResponse) -> None:
        super().__init__(reason, message)
        self.response = response


async def _send(response: web.StreamResponse, head: bytes, raw: list[memoryview]) -> None:
    """Write all of it, waiting for the client. Pieces are copied: the transport may keep the last of them until after
    the slot is another request's."""
    await response.write(head)
    for view in raw:
        for start in range(0, view.nbytes, _PIECE_BYTES):
            await response.write(bytes(view[start : start + _PIECE_BYTES]))
    await response.write_eof()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what handlers and the router raise into the protocol's error body."""
    try:
        return await handler(request)
    except RefusedError as error:
        return _refusal(error.reason, str(error))
    except web.HTTPException as error:
        allow = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        hint = f"; allowed here: {allow['Allow']}" if allow else ""
        return _json({"error": f"{error.reason}: {request.method} {request.path[:200]}{hint}"}, error.status, allow)
    except Exception as error:  # noqa: BLE001 - answered and logged; the server goes on
        log.get("http").exception("request failed", path=request.path[:200])
        return _json({"error": f"the server failed: {type(error).__name__}"}, 500)


def _refusal(reason: Reason, message: str, unread: bool = False) -> web.Response:
    answer = TABLE[reason]
    headers = {} if answer.retry_after_s is None else {"Retry-After": str(answer.retry_after_s)}
    response = _json({"error": message[:_MAX_ERROR_CHARACTERS]}, answer.status, headers)
    if unread or reason is Reason.DRAINING:
        # The rest of an unread body would be taken for the next request, or be waited for.
        response.force_close()
    return response


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        headers={"Content-Type": "application/json", **_SERVER, **(headers or {})},
    )


def _describe(spec: TensorSpec) -> dict[str, Any]:
    shape = [dim if isinstance(dim, int) else -1 for dim in spec.shape]
    return {"name": spec.name, "datatype": spec.dtype.oip, "shape": shape}
