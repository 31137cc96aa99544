"""Ensembles over the Open Inference Protocol: one request is decoded once, goes to every member, and has one answer.

Each member runs it as a call of its own, in a slot of its own, with one deadline and one priority for all. Slots are
taken in one order, so that no two ensembles wait for each other; other calls hold one slot and wait for none. When a
member fails the whole fails in its name, and what the others would have answered is not waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aiohttp import web

from agent.calls import Call
from agent.config import Config, EnsembleOptions
from agent.ensemble import Ensemble
from agent.errors import ConfigError, Reason, RefusedError
from agent.gateway import Gateway
from agent.http.answers import json
from agent.http.bodies import check_length, decompress, read_body
from agent.http.codecs import HEADER_LENGTH, InferRequest, OutputTensor, decode_infer, largest_body
from agent.http.hints import priority_of, timeout_of
from agent.http.model_config import ensemble_config
from agent.http.runs import Runs
from agent.http.tensors import NO_LABELS, base64_body, describe, is_quick, listed, output_of, raw_of
from agent.images import Images, no_images
from agent.repository import Repository, no_version
from agent.served import Served
from agent.statistics import Statistics
from agent.strings import unpack_strings
from targets.bundle import version_of
from targets.errors import ContractError, TightfitError, did_you_mean

T = TypeVar("T")
Send = Callable[[web.Request, str, str, InferRequest, list[OutputTensor]], Awaitable[web.StreamResponse]]
"""Answer a request with the tensors of the model of that name and version."""


@dataclass(frozen=True)
class _Group:
    """The versions that members have now, and what they are together. `images` is what they make of an image, where
    all take one."""

    served: Mapping[str, Served]
    version: str
    tensors: Ensemble
    images: Ensemble | None

    @property
    def takes(self) -> dict[str, Images]:
        """How each member takes images. Raises RefusedError where one does not."""
        for name, served in self.served.items():
            if served.images is None:
                raise no_images("member", name)
        return {name: served.images for name, served in self.served.items() if served.images}


class EnsembleApi:
    """What handlers do with a request for an ensemble."""

    def __init__(
        self,
        gateway: Gateway,
        repository: Repository,
        config: Config,
        runs: Runs,
        send: Send,
    ) -> None:
        self._gateway, self._repository, self._runs, self._send = gateway, repository, runs, send
        self._http, self._limits = config.http, config.limits
        self._ensembles = {each.name: each for each in config.ensembles}
        self._groups: dict[str, _Group] = {}
        self._statistics: dict[str, Statistics] = {}
        for name in self._ensembles:
            gateway.telemetry.add(name)

    def find(self, request: web.Request) -> EnsembleOptions | None:
        """The ensemble that the path names, if it is one."""
        return self._ensembles.get(request.match_info["model"])

    def ready(self, options: EnsembleOptions) -> bool:
        """Whether every member can run requests."""
        return all(self._repository.find(name).ready for name in options.models)

    def metadata(self, request: web.Request, options: EnsembleOptions) -> dict[str, Any]:
        """What the members are together. Raises RefusedError where one is not loaded."""
        group = self._checked_group(request, options)
        return {
            "name": options.name,
            "versions": [group.version],
            "platform": "ensemble",
            "inputs": [describe(spec) for spec in group.tensors.contract.inputs],
            "outputs": [describe(spec) for spec in group.tensors.contract.outputs],
            **({"parameters": _describe_images(options.name, group.images)} if group.images else {}),
        }

    def config(self, request: web.Request, options: EnsembleOptions) -> dict[str, Any]:
        """The same in Triton's words."""
        group = self._checked_group(request, options)
        members = {name: each.model.contract.whole for name, each in group.served.items()}
        if group.tensors is group.images:
            members = {name: images.contract for name, images in group.takes.items()}
        return ensemble_config(options.name, group.tensors.contract, members)

    def statistics(self) -> list[tuple[str, str, Statistics]]:
        """(name, version, what it has done) of every ensemble of which all members are loaded."""
        counted = []
        for name, options in self._ensembles.items():
            with suppress(RefusedError):
                group = self._group_of(options, _active(self._repository, options))
                counted.append((name, group.version, self._statistics[name]))
        return counted

    async def infer(self, call: Call, request: web.Request, options: EnsembleOptions) -> web.StreamResponse:
        """Tensors in, tensors of all members out; or an image in, and what each makes of it."""
        async with self._seats(call, request, options) as (group, members):
            limit = self._body_bytes(group)
            body = await self._body(call, request, limit)
            header_length, encoding = request.headers.get(HEADER_LENGTH), request.headers.get("Content-Encoding", "")
            quick = is_quick(group.tensors.contract, len(body), encoding, header_length)
            decoded = await self._runs.in_turn(quick, _decode, body, encoding, limit, header_length, group)
            del body
            for each in (call, *members.values()):
                each.priority = decoded.priority or each.priority
                if decoded.timeout_s is not None:
                    self._gateway.set_timeout(each, decoded.timeout_s)
            ask = self._ask_images if decoded.is_image else self._ask_tensors
            return await self._send(request, options.name, group.version, decoded, await ask(group, members, decoded))

    async def image(self, call: Call, request: web.Request, options: EnsembleOptions) -> web.StreamResponse:
        """An image file in, and what each member makes of it, as JSON."""
        async with self._seats(call, request, options) as (group, members):
            limit = min(self._http.body_bytes, max(images.max_bytes for images in group.takes.values()))
            body = await self._body(call, request, limit)
            if encoding := request.headers.get("Content-Encoding"):
                body = await self._runs.off_loop(decompress, body, encoding, limit)
            answers = await _together(
                {name: self._runs.image(members[name], images, body) for name, images in group.takes.items()}
            )
            outputs = {f"{name}.{key}": listed(array) for name, each in answers.items() for key, array in each.items()}
            return json({"model_name": options.name, "model_version": group.version, **outputs})

    async def _ask_tensors(
        self, group: _Group, members: Mapping[str, Call], decoded: InferRequest
    ) -> list[OutputTensor]:
        parts = {part.member: part for part in group.tensors.parts(decoded.shapes, decoded.wanted)}
        made = await _together(
            {
                name: self._runs.tensors(
                    members[name],
                    tuple(decoded.shapes[at] for at in part.inputs),
                    [decoded.payloads[at] for at in part.inputs],
                    part.outputs,
                )
                for name, part in parts.items()
            }
        )
        tensors = []
        for wish in decoded.wishes:
            member, output = group.tensors.owner(wish.index)
            found = made[member][parts[member].outputs.index(output)]
            spec, served = group.tensors.contract.outputs[wish.index], group.served[member]
            own = replace(wish, index=output)
            tensors.append(output_of(served.model.contract.whole, own, found, spec, served.labels))
        return tensors

    async def _ask_images(
        self, group: _Group, members: Mapping[str, Call], decoded: InferRequest
    ) -> list[OutputTensor]:
        takes = group.takes
        assert group.images is not None  # noqa: S101 - for the type checker: only then is an image decoded
        (image,) = unpack_strings(memoryview(decoded.payloads[0]), 1)
        wanted = {group.images.owner(index)[0] for index in decoded.wanted}
        answers = await _together(
            {name: self._runs.image(members[name], takes[name], image) for name in group.served if name in wanted}
        )
        tensors = []
        for wish in decoded.wishes:
            member, output = group.images.owner(wish.index)
            array = answers[member][takes[member].contract.outputs[output].name]
            spec, own = group.images.contract.outputs[wish.index], replace(wish, index=output)
            tensors.append(output_of(takes[member].contract, own, (array.shape, raw_of(array)), spec, NO_LABELS))
        return tensors

    # --- small parts

    @asynccontextmanager
    async def _seats(
        self, call: Call, request: web.Request, options: EnsembleOptions
    ) -> AsyncIterator[tuple[_Group, Mapping[str, Call]]]:
        """A call for every member, each with a slot; they are settled as the whole is."""
        call.name = options.name
        call.priority = priority_of(request.headers)
        timeout_s = timeout_of(request.headers)
        if timeout_s is not None:
            self._gateway.set_timeout(call, timeout_s)
        members: dict[str, Call] = {}
        reason = Reason.OK
        try:
            for name in sorted(options.models):
                member = members[name] = self._gateway.open(call.client)
                member.priority, member.deadline, member.echo = call.priority, call.deadline, call.echo
                with _named(name):
                    await self._gateway.admit(member, self._repository.answering(self._repository.find(name)))
            group = self._group_of(options, {name: members[name].seat[0] for name in options.models})
            _check_version(request, options, group)
            call.statistics = self._statistics[options.name]
            yield group, members
            call.goes_by(members.values())
        except BaseException as error:
            reason = _reason_of(error)
            raise
        finally:
            for member in members.values():
                self._gateway.settle(member, reason)

    def _group_of(self, options: EnsembleOptions, served: Mapping[str, Served]) -> _Group:
        known = self._groups.get(options.name)
        if known is None or known.served != served:
            known = self._groups[options.name] = _group_of(options, served)
            self._statistics[options.name] = self._gateway.statistics_of(options.name, known.version)
        return known

    def _checked_group(self, request: web.Request, options: EnsembleOptions) -> _Group:
        """What is loaded now, and of the version that the path names. Raises RefusedError."""
        group = self._group_of(options, _active(self._repository, options))
        _check_version(request, options, group)
        return group

    async def _body(self, call: Call, request: web.Request, limit: int) -> bytes:
        check_length(request, limit)
        body_s = min(self._http.body_s, max(call.deadline - time.monotonic(), 0.001))
        return await read_body(request, limit, body_s, self._limits)

    def _body_bytes(self, group: _Group) -> int:
        largest = largest_body(group.tensors.contract)
        images = [served.images.max_bytes for served in group.served.values() if served.images]
        return min(self._http.body_bytes, max([largest, *map(base64_body, images)]))


def check_ensembles(ensembles: Sequence[EnsembleOptions], repository: Repository) -> None:
    """Raise ConfigError where a member is no model, or members cannot be put together. All models are loaded."""
    models = {entry.name for entry in repository.entries}
    names = [each.name for each in ensembles]
    for options in ensembles:
        if options.name in models or names.count(options.name) > 1:
            raise ConfigError(f"two models or ensembles are called {options.name!r}", "rename one")
        for member in options.models:
            if member not in models:
                raise ConfigError(f"ensemble {options.name!r}: no model {member!r}", did_you_mean(member, models))
        try:
            _group_of(options, _active(repository, options))
        except RefusedError as error:
            raise ConfigError(error.message, error.hint) from None


def _group_of(options: EnsembleOptions, served: Mapping[str, Served]) -> _Group:
    """Raises RefusedError where the members' contracts contradict each other, which a reload can bring about."""
    images = {name: each.images.contract for name, each in served.items() if each.images}
    digest = hashlib.sha256(" ".join(f"{name} {each.model.digest}" for name, each in served.items()).encode())
    try:
        together = Ensemble(images) if len(images) == len(served) else None
        try:
            tensors = Ensemble({name: each.model.contract.whole for name, each in served.items()})
        except ContractError:
            if together is None:
                raise
            # They differ in how an image becomes their input, and agree on taking one.
            tensors = together
    except ContractError as error:
        raise RefusedError(Reason.MODEL_NOT_READY, f"ensemble {options.name!r}: {error.message}", error.hint) from None
    return _Group(dict(served), version_of(digest.hexdigest()), tensors, together)


def _active(repository: Repository, options: EnsembleOptions) -> dict[str, Served]:
    """Each member's version of now. Raises RefusedError where one has none."""
    active = {name: repository.find(name).active for name in options.models}
    for name, served in active.items():
        if served is None:
            raise RefusedError(Reason.MODEL_NOT_READY, f"member {name!r} is not loaded now")
    return {name: served for name, served in active.items() if served is not None}


def _describe_images(name: str, images: Ensemble) -> dict[str, Any]:
    """As `Images.describe` has it for one model."""
    return {
        "image_path": f"/v2/models/{name}/image",
        "image_input": images.contract.inputs[0].name,
        "image_formats": "jpeg,png",
        "image_outputs": ",".join(spec.name for spec in images.contract.outputs),
    }


def _check_version(request: web.Request, options: EnsembleOptions, group: _Group) -> None:
    version = request.match_info.get("version")
    if version not in (None, group.version):
        raise no_version(options.name, str(version), [group.version])


def _decode(body: bytes, encoding: str, limit: int, header_length: str | None, group: _Group) -> InferRequest:
    images = group.images.contract if group.images else None
    return decode_infer(decompress(body, encoding, limit), header_length, group.tensors.contract, images)


async def _together(jobs: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """What all of them give, by member. When one fails the others are given up, and its error is raised in its name."""
    tasks = {name: asyncio.ensure_future(job) for name, job in jobs.items()}
    try:
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for name, task in tasks.items():
            if task.done() and not task.cancelled() and task.exception() is not None:
                with _named(name):
                    task.result()
        return {name: task.result() for name, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        # A slot is given back when nothing works in it any more.
        await asyncio.gather(*tasks.values(), return_exceptions=True)


@contextmanager
def _named(member: str) -> Iterator[None]:
    """What is refused in the block is refused in the member's name."""
    try:
        yield
    except TightfitError as error:
        raise RefusedError(_reason_of(error), f"member {member!r}: {error.message}", error.hint) from None


def _reason_of(error: BaseException) -> Reason:
    if isinstance(error, RefusedError):
        return error.reason
    if isinstance(error, TightfitError):
        return Reason.BAD_REQUEST
    if isinstance(error, asyncio.CancelledError | ConnectionError):
        return Reason.DISCONNECTED
    return Reason.FAULT
