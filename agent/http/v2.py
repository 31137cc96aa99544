"""The Open Inference Protocol v2 over HTTP/1.1: what models are, and tensors in, tensors out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web
from msgspec import structs

from agent import log
from agent.access.access import Access
from agent.calls import Call
from agent.config import Config
from agent.errors import TABLE, Reason, RefusedError
from agent.gateway import Gateway
from agent.http.answers import SERVER, CutOffError, errors, json, judged, refusal
from agent.http.bodies import check_length, choose_encoding, decompress, read_body
from agent.http.codecs import (
    HEADER_LENGTH,
    InferRequest,
    OutputTensor,
    decode_infer,
    encode_parts,
    largest_body,
)
from agent.http.echo import echoed
from agent.http.ensembles import EnsembleApi
from agent.http.following import ResultFeeds
from agent.http.generate import GenerateApi
from agent.http.guard import client_of, guard_of, much_is_unread, why_no_longer
from agent.http.hints import priority_of, timeout_of
from agent.http.lane.lane import Lane
from agent.http.model_config import config_of
from agent.http.openapi import Described, document
from agent.http.repository_api import RepositoryApi
from agent.http.runs import Runs, outputs_in, write
from agent.http.settings import SettingsApi
from agent.http.sockets import waited_s
from agent.http.statistics import StatisticsApi
from agent.http.streams import StreamApi
from agent.http.tensors import OFF_LOOP_BYTES, all_of, answered, base64_body, describe, encode, is_quick, listed, wished
from agent.images import Images, no_images
from agent.page.api import PageApi
from agent.repository import Repository, no_version
from agent.request import Part
from agent.sequence_states import Sequences
from agent.sequences import is_long
from agent.served import Entry, Served
from agent.strings import unpack_strings
from agent.telemetry import form_of

# Those of Triton that do what its documents say (docs/protocol.md).
EXTENSIONS = (
    "binary_tensor_data", "classification", "generate", "model_configuration", "model_repository",
    "model_repository(unload_dependents)", "schedule_policy", "sequence", "statistics",
)  # fmt: skip
# An answer of raw tensors past this is sent straight out of its slot, in pieces, and never stands in memory twice.
_STREAMED_BYTES = 256 << 10
_PIECE_BYTES = 128 << 10


class V2:
    """Handlers over one gateway and its models."""

    def __init__(self, gateway: Gateway, repository: Repository, access: Access, config: Config, version: str) -> None:
        self._gateway = gateway
        self._repository = repository
        self._access = access
        self._http, self._limits, self._logs = config.http, config.limits, config.log
        self._version = version
        self._log = log.get("http")
        self.runs = Runs(gateway)
        self._ensembles = EnsembleApi(gateway, repository, config, self.runs, self._send)
        self._streams = StreamApi(gateway, repository, config, self.runs, self.body_bytes)
        access.on_reload.append(lambda: self._streams.end_those(partial(why_no_longer, access)))
        self.page = PageApi(gateway, repository, config, version)
        self._sequences = Sequences(gateway, config.requests.sequence_idle_s)
        self._texts = GenerateApi(gateway, config, self.runs, self._settled, self._receive)
        self.lane = Lane(gateway, repository, access, config, self.body_bytes, {each.name for each in config.ensembles})
        """Where connections begin."""

    @property
    def feeds(self) -> ResultFeeds:
        """Results of models, for those who follow them."""
        return self._streams.feeds

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[errors, guard_of(self._access, self._gateway)])
        app.router.add_get("/v2", self.server)
        app.router.add_get("/v2/health/live", self.live)
        app.router.add_get("/v2/health/ready", self.health_ready)
        app.router.add_get("/v2/openapi.json", self.openapi)
        app.router.add_get("/metrics", self.metrics)
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            app.router.add_get(prefix, self.metadata)
            app.router.add_get(f"{prefix}/ready", self.model_ready)
            app.router.add_get(f"{prefix}/config", self.config)
            app.router.add_post(f"{prefix}/infer", self.infer)
            app.router.add_post(f"{prefix}/image", self.image)
        RepositoryApi(self._repository).add_to(app)
        StatisticsApi(self._repository, self._ensembles).add_to(app)
        SettingsApi(self._repository, self._ensembles, self._logs).add_to(app)
        self.page.add_to(app)
        self._streams.add_to(app)
        self._texts.add_to(app)
        app.on_response_prepare.append(_echo)
        app.on_cleanup.append(self._cleanup)
        return app

    async def _cleanup(self, _: web.Application) -> None:
        self.lane.close()
        self.runs.close()

    # --- what the server and the models are

    async def server(self, _: web.Request) -> web.Response:
        return json({"name": "tightfit-agent", "version": self._version, "extensions": EXTENSIONS})

    async def live(self, _: web.Request) -> web.Response:
        return json({"live": True})

    async def health_ready(self, _: web.Request) -> web.Response:
        ready = self._repository.ready
        return json({"ready": ready}, 200 if ready else 503)

    async def model_ready(self, request: web.Request) -> web.Response:
        if ensemble := self._ensembles.find(request):
            ready = self._ensembles.ready(ensemble) and not self._gateway.draining
            return json({"name": ensemble.name, "ready": ready}, 200 if ready else 503)
        entry = self._entry(request)
        ready = entry.ready and not self._gateway.draining
        return json({"name": entry.name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: web.Request) -> web.Response:
        if ensemble := self._ensembles.find(request):
            return json(self._ensembles.metadata(request, ensemble))
        served = self._active(request)
        contract, images = served.model.contract.whole, served.images
        return json(
            {
                "name": served.name,
                "versions": self._repository.versions(served.name),
                "platform": f"{served.model.manifest.runtime}_onnx",
                "inputs": [describe(spec) for spec in contract.inputs],
                "outputs": [describe(spec) for spec in contract.outputs],
                **({"parameters": images.describe(served.name)} if images else {}),
            }
        )

    async def config(self, request: web.Request) -> web.Response:
        if ensemble := self._ensembles.find(request):
            return json(self._ensembles.config(request, ensemble))
        served = self._active(request)
        return json(config_of(served, len(self._repository.versions(served.name))))

    async def openapi(self, _: web.Request) -> web.Response:
        active = {entry.name: entry.active for entry in reversed(self._repository.entries) if entry.active}
        models = [Described(name, each.model.contract.whole, bool(each.images)) for name, each in active.items()]
        return json(document(self._version, models))

    async def metrics(self, request: web.Request) -> web.Response:
        form = form_of(request.headers.get("Accept", ""))
        text, content_type = await self.runs.off_loop(self._gateway.telemetry.text, form)
        return web.Response(body=text, headers={"Content-Type": content_type, "Vary": "Accept", **SERVER})

    # --- infer

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """Tensors in, tensors out; or an image in and an answer out, as tensors, or as `image` has it where the body is
        the image itself."""
        is_image = request.content_type.startswith("image/") and HEADER_LENGTH not in request.headers
        return await self._settled(self._image if is_image else self._infer, request)

    async def image(self, request: web.Request) -> web.StreamResponse:
        """An image file in, whatever Content-Type it has; the answer as JSON, a list for every output."""
        return await self._settled(self._image, request)

    async def _settled(
        self, handler: Callable[[Call, web.Request], Awaitable[web.StreamResponse]], request: web.Request
    ) -> web.StreamResponse:
        """One request from its head to its answer; whatever happens, its call is settled exactly once."""
        call = self._gateway.open(client_of(request))
        call.echo = echoed(request.headers)
        reason, message, failed = Reason.OK, "", None
        try:
            return await handler(call, request)
        except asyncio.CancelledError:
            reason, message = self._why_gone(request)
            raise
        except CutOffError as error:
            reason, message = error.reason, str(error)
            return error.response
        except ConnectionError:
            reason, message = self._why_gone(request)
        except Exception as error:  # noqa: BLE001 - answered, and logged where it is ours; the server goes on
            reason, message = judged(error)
            failed = error
            if reason is Reason.FAULT:
                self._log.exception("infer failed", **call.ids)
        finally:
            self._gateway.settle(call, reason, message)
        return refusal(reason, message, much_is_unread(request), failed)

    async def _infer(self, call: Call, request: web.Request) -> web.StreamResponse:
        if ensemble := self._ensembles.find(request):
            return await self._ensembles.infer(call, request, ensemble)
        body = await self._receive(call, request, self.body_bytes)
        served, slot = call.seat
        header_length = request.headers.get(HEADER_LENGTH)
        encoding = request.headers.get("Content-Encoding", "")
        quick = is_quick(served.model.contract, len(body), encoding, header_length)
        decoded, nbytes = await self.runs.in_turn(quick, self._decode, body, encoding, header_length, served, slot)
        del body  # from here on its tensors stand in the slot
        call.priority = decoded.priority or call.priority
        if decoded.timeout_s is not None:
            self._gateway.set_timeout(call, decoded.timeout_s, waited_s(request.transport))
        if decoded.part is not None:
            return await self._part(call, request, decoded, decoded.part)
        picture = None
        if decoded.is_image:
            (picture,) = unpack_strings(memoryview(decoded.payloads[0]), 1)
            images = _images_of(served)
            answer = await self.runs.image(call, images, picture)
            tensors = await self.runs.off_loop(answered, images.contract, decoded, answer)
        else:
            contract = served.model.contract
            if decoded.payloads:
                made = await self.runs.tensors(call, decoded.shapes, decoded.payloads, decoded.wanted)
            else:
                result = await self._gateway.infer(call, decoded.shapes, nbytes, decoded.wanted)
                made = outputs_in(served, slot, result)
            quick = not any(wish.classes for wish in decoded.wishes) or sum(t.nbytes for _, t in made) < OFF_LOOP_BYTES
            tensors = await self.runs.in_turn(quick, wished, contract, decoded, made, served.labels)
        await self._streams.feeds.publish(call, decoded.id, tensors, picture)
        return await self._send(request, served.name, served.version, decoded, tensors)

    async def _part(self, call: Call, request: web.Request, decoded: InferRequest, part: Part) -> web.StreamResponse:
        """A request of a sequence, whose state is kept."""
        served, _ = call.seat
        contract, kept = served.model.contract, served.model.contract.without_state
        outputs = tuple(contract.outputs.index(kept.outputs[index]) for index in decoded.wanted)
        async with self._sequences.run(call, part, decoded.shapes, decoded.payloads, outputs) as result:
            _, slot = call.seat
            made = dict(zip([each.index for each in result.outputs], outputs_in(served, slot, result), strict=True))
            tensors = wished(kept, decoded, [made[index] for index in outputs], served.labels)
            await self._streams.feeds.publish(call, decoded.id, tensors)
            return await self._send(request, served.name, served.version, decoded, tensors)

    async def _send(
        self, request: web.Request, name: str, version: str, decoded: InferRequest, tensors: list[OutputTensor]
    ) -> web.StreamResponse:
        """Answer with tensors, in the form each was asked for."""
        accept = request.headers.get("Accept-Encoding")
        size = sum(tensor.data.nbytes for tensor in tensors)
        raw = all(w.binary for w in decoded.wishes) and choose_encoding(accept, True, size) is None
        if raw and size >= _STREAMED_BYTES:
            return await self._stream(request, *encode_parts(name, version, decoded.id, tensors))
        return await self.runs.in_turn(size < OFF_LOOP_BYTES, encode, name, version, decoded, tensors, accept)

    async def _image(self, call: Call, request: web.Request) -> web.StreamResponse:
        if ensemble := self._ensembles.find(request):
            return await self._ensembles.image(call, request, ensemble)
        body = await self._receive(call, request, self._image_bytes)
        served, _ = call.seat
        images = _images_of(served)
        if encoding := request.headers.get("Content-Encoding"):
            body = await self.runs.off_loop(decompress, body, encoding, self._image_bytes(served))
        answer = await self.runs.image(call, images, body)
        await self._streams.feeds.publish(call, None, all_of(images.contract, answer), body)
        return json(
            {
                "model_name": served.name,
                "model_version": served.version,
                **{name: listed(array) for name, array in answer.items()},
            }
        )

    async def _receive(self, call: Call, request: web.Request, limit: Callable[[Served], int]) -> bytes:
        """The body, for the slot that the call then holds: who has none sends no body."""
        entry = self._entry(request)
        if "version" not in request.match_info:
            entry = self._repository.answering(entry)
        if entry.active is not None:
            check_length(request, limit(entry.active))
        call.priority = priority_of(request.headers)
        timeout_s = timeout_of(request.headers)
        if timeout_s is not None:
            self._gateway.set_timeout(call, timeout_s, waited_s(request.transport))
        served, _ = await self._gateway.admit(call, entry)
        version = request.match_info.get("version")
        if version not in (None, served.version):
            raise no_version(entry.name, str(version), self._repository.versions(entry.name))
        left_s = call.deadline - time.monotonic()
        body_s = min(self._http.body_s, max(left_s, 0.001))
        return await read_body(request, limit(served), body_s, self._limits)

    def _decode(
        self, body: bytes, encoding: str, header_length: str | None, served: Served, slot: int
    ) -> tuple[InferRequest, tuple[int, ...]]:
        """Decode the body and write its tensors into the slot: (request without them, bytes of each). An image stays
        in the request, and so do sequences that are too long for a slot."""
        images = served.images.contract if served.images else None
        contract = served.model.contract
        body = decompress(body, encoding, self.body_bytes(served))
        kept = contract.without_state if contract.states else None
        decoded = decode_infer(body, header_length, contract.whole, images, kept)
        if decoded.is_image or decoded.part or is_long(contract, decoded.shapes):
            return decoded, ()
        return structs.replace(decoded, payloads=()), write(served, slot, decoded.payloads)

    async def _stream(self, request: web.Request, head: bytes, raw: list[memoryview]) -> web.StreamResponse:
        """Send raw outputs out of the slot. Raises CutOffError when the client does not take them in time."""
        response = web.StreamResponse(
            headers={"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head)), **SERVER}
        )
        response.content_length = len(head) + sum(view.nbytes for view in raw)
        await response.prepare(request)
        try:
            await asyncio.wait_for(_write_out(response, head, raw), self._http.send_s)
        except (TimeoutError, asyncio.TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            raise CutOffError(
                Reason.SLOW_READER, f"the answer was not taken within {self._http.send_s:g} s", response
            ) from None
        return response

    # --- small parts

    def _why_gone(self, request: web.Request) -> tuple[Reason, str]:
        """Of a connection that is lost: it may have been the agent that cut it."""
        if getattr(request.protocol, "was_too_slow", False):
            return Reason.SLOW_READER, TABLE[Reason.SLOW_READER].meaning
        return Reason.DISCONNECTED, "the client went away"

    def _entry(self, request: web.Request) -> Entry:
        return self._repository.find(request.match_info["model"], request.match_info.get("version"))

    def _active(self, request: web.Request) -> Served:
        entry = self._entry(request)
        if entry.active is None:
            raise RefusedError(Reason.MODEL_NOT_READY, f"model {entry.name!r} is not loaded now")
        return entry.active

    def body_bytes(self, served: Served) -> int:
        """The most that an infer request of the model can have, before and after decompression."""
        largest = largest_body(served.model.contract.whole)
        if served.images:
            largest = max(largest, base64_body(served.images.max_bytes))
        return min(self._http.body_bytes, largest)

    def _image_bytes(self, served: Served) -> int:
        """The same of an image."""
        return min(self._http.body_bytes, _images_of(served).max_bytes)


async def _echo(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer that has a request, errors and the heads of streams too, says which request it is of."""
    response.headers.update(echoed(request.headers))


def _images_of(served: Served) -> Images:
    if served.images is None:
        raise no_images("model", served.name)
    return served.images


async def _write_out(response: web.StreamResponse, head: bytes, raw: list[memoryview]) -> None:
    """Write all of it, waiting for the client. Pieces are copied: the transport may keep the last of them until after
    the slot is another request's."""
    await response.write(head)
    for view in raw:
        for start in range(0, view.nbytes, _PIECE_BYTES):
            await response.write(bytes(view[start : start + _PIECE_BYTES]))
    await response.write_eof()
