"""What commands do: with the repository, the gateway, and the results that are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import structs

from agent.calls import Call
from agent.errors import Reason, RefusedError
from agent.feed import Feed
from agent.fleet.results import tensors_of, told
from agent.gateway import Gateway
from agent.http.answers import judged
from agent.http.codecs import InferRequest, OutputTensor, decode_infer, encode_infer
from agent.http.following import Shown
from agent.http.tensors import answered, wished
from agent.http.v2 import V2
from agent.mqtt import commands
from agent.mqtt.commands import Command
from agent.repository import Repository
from agent.results import Kept, Policy
from agent.served import Served
from agent.strings import unpack_strings
from targets.errors import TightfitError

CLIENT = "mqtt"
_Do = Callable[[Command], Awaitable[object]]


class Settings:
    """What a command may set until the next start."""

    def __init__(self, telemetry_s: float, device_s: float) -> None:
        self.telemetry_s, self.device_s = telemetry_s, device_s
        self.changed = asyncio.Event()

    def view(self) -> dict[str, object]:
        return {"telemetry_s": self.telemetry_s, "device_s": self.device_s}

    def set(self, wanted: commands.Configure) -> dict[str, object]:
        """Take what is given, and say what holds."""
        self.telemetry_s = wanted.telemetry_s or self.telemetry_s
        self.device_s = wanted.device_s or self.device_s
        self.changed.set()
        return self.view()


class Work:
    """Does commands, each at most until its deadline. `answer_bytes` is what an answer may have."""

    def __init__(
        self, gateway: Gateway, repository: Repository, api: V2, settings: Settings, ping: Callable[[], object],
        answer_bytes: int,
    ) -> None:  # fmt: skip
        self._gateway, self._repository, self._api, self._settings = gateway, repository, api, settings
        self._answer_bytes = answer_bytes
        self._before: dict[str, Path] = {}
        """Of each model, the bundle that ran before the last command that activated another."""
        self._ping = ping
        self._verbs: dict[str, _Do] = {
            "ping": self._say, "models": self._models, "config": self._config, "configure": self._configure,
            "snapshot": self._snapshot, "infer": self._infer, "activate": self._activate, "rollback": self._rollback,
        }  # fmt: skip

    async def do(self, command: Command) -> object:
        """What came of it. Raises RefusedError, or TightfitError where it could not be done."""
        left_s = command.deadline - time.monotonic()
        if command.changes:
            # Half a change is none: what began is brought to its end.
            return await self._verbs[command.verb](command)
        try:
            return await asyncio.wait_for(self._verbs[command.verb](command), max(left_s, 0.001))
        except (TimeoutError, asyncio.TimeoutError):
            raise RefusedError(Reason.DEADLINE, "it was not done before it expired") from None

    async def _say(self, _: Command) -> object:
        return self._ping()

    async def _models(self, _: Command) -> object:
        return {"models": await self._repository.index()}

    async def _config(self, _: Command) -> object:
        return self._settings.view()

    async def _configure(self, command: Command) -> object:
        return self._settings.set(command.arguments)

    async def _activate(self, command: Command) -> object:
        wanted: commands.Activate = command.arguments
        return await self._load(wanted.model, wanted.bundle)

    async def _rollback(self, command: Command) -> object:
        model: str = command.arguments.model
        self._repository.find(model)
        before = self._before.get(model)
        if before is None:
            raise RefusedError(
                Reason.BAD_REQUEST, f"no command has activated another bundle of {model[:100]!r} since the start",
                "activate the one that is wanted by its name",
            )  # fmt: skip
        return await self._load(model, str(before))

    async def _load(self, model: str, bundle: str | None) -> object:
        """Load it, and remember what ran before."""
        before = self._folder_of(model)
        await self._repository.load(model, bundle)
        entry = self._repository.find(model)
        if before is not None and before != self._folder_of(model):
            self._before[model] = before
        return {"model": model, "version": entry.version, "state": entry.state}

    def _folder_of(self, model: str) -> Path | None:
        found = next((each for each in self._repository.entries if each.name == model), None)
        return found.active.model.folder if found and found.active else None

    async def _snapshot(self, command: Command) -> object:
        wanted: commands.Snapshot = command.arguments
        entry = self._repository.find(wanted.model)
        feed = self._api.feeds.of(entry)
        self._api.feeds.digested[entry.name] += 1
        try:
            number, shown = await asyncio.wait_for(_next(feed), max(wanted.wait_s, 0.001))
        except (TimeoutError, asyncio.TimeoutError):
            raise RefusedError(Reason.DEADLINE, f"{entry.name} gave no result within {wanted.wait_s:g} s") from None
        finally:
            self._api.feeds.digested[entry.name] -= 1
        body = told(shown, feed.results.epoch, number, tensors_of(shown), self._answer_bytes // 8)
        return {**body, "input": {"sha256": shown.sha256}} if shown.sha256 else body

    async def _infer(self, command: Command) -> object:
        wanted: commands.Infer = command.arguments
        reason, message = Reason.OK, ""
        call = self._gateway.open(CLIENT)
        try:
            call.deadline = min(call.deadline, command.deadline)
            entry = self._repository.answering(self._repository.find(wanted.model))
            served, _ = await self._gateway.admit(call, entry)
            body = bytes(wanted.request)
            if len(body) > self._api.body_bytes(served):
                raise RefusedError(Reason.TOO_LARGE, f"a request of {len(body)} bytes is larger than the model takes")
            decoded = await self._api.runs.off_loop(_decoded, body, served)
            call.priority = decoded.priority or call.priority
            outputs = await self._outputs(call, served, decoded)
            await self._api.feeds.publish(call, decoded.id, outputs)
            answer, _ = await self._api.runs.off_loop(encode_infer, served.name, served.version, decoded.id, outputs)
            if len(answer) > self._answer_bytes:
                raise RefusedError(
                    Reason.TOO_LARGE, f"the answer has {len(answer)} bytes, and {self._answer_bytes} may be sent",
                    "ask for fewer outputs, or over HTTP",
                )  # fmt: skip
            return msgspec.json.decode(answer)
        except asyncio.CancelledError:
            reason, message = Reason.DISCONNECTED, "it expired"
            raise
        except Exception as error:
            reason, message = judged(error)
            raise
        finally:
            self._gateway.settle(call, reason, message)

    async def _outputs(self, call: Call, served: Served, decoded: InferRequest) -> list[OutputTensor]:
        """They stand in the call's slot until it is settled."""
        if decoded.is_image and served.images is not None:
            (image,) = unpack_strings(memoryview(decoded.payloads[0]), 1)
            answer = await self._api.runs.image(call, served.images, image)
            return await self._api.runs.off_loop(answered, served.images.contract, decoded, answer)
        made = await self._api.runs.tensors(call, decoded.shapes, decoded.payloads, decoded.wanted)
        return await self._api.runs.off_loop(wished, served.model.contract, decoded, made, served.labels)


async def _next(feed: Feed[Shown]) -> tuple[int, Shown]:
    """The next result, and its number."""
    follower = feed.follow(Policy.LATEST, None)
    try:
        while True:
            taken = follower.take()
            if isinstance(taken, Kept):
                return taken.seq, taken.value
            if taken is None:
                await follower.wait(60.0)
    finally:
        follower.close()


def _decoded(body: bytes, served: Served) -> InferRequest:
    """Raises ContractError or RefusedError."""
    images = served.images.contract if served.images else None
    decoded = decode_infer(body, None, served.model.contract.whole, images)
    if decoded.part is not None:
        raise RefusedError(Reason.BAD_REQUEST, "a sequence whose state is kept is asked over HTTP")
    return structs.replace(decoded, wishes=tuple(replace(each, binary=False) for each in decoded.wishes))


def reason_of(error: TightfitError) -> Reason:
    """What a refusal says; other errors say that the command, or the bundle, is not what it should be."""
    return error.reason if isinstance(error, RefusedError) else Reason.BAD_REQUEST
