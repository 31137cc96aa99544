"""Which models are served, in which version: loads, replaces and unloads them while requests come.

Theory of operation. A model is activated in one of two ways, by what fits the machine's budget beside all others:

    swap    the new version loads while the old one serves; then calls go to the new, and the old ends with its last
    drain   the old one ends with its last call, its memory is free, the new one loads; callers wait at the door

Either way whoever was let in is answered by the version that let him in. When the new one fails, what ran before goes
on, or is loaded again. One change is made at a time, so that what was judged to fit is what is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from agent import log
from agent.bundles import SUFFIX, bundle_in, bundles_in
from agent.config import Config, ModelOptions
from agent.errors import AgentError, ConfigError, Reason, RefusedError
from agent.gateway import Gateway
from agent.generation.tokenizer import load_text
from agent.images import load_images
from agent.journal import Activate, Failed, Unload
from agent.models import Model, check_beside, is_like
from agent.served import Entry, Served
from targets.bundle import NAME, read_manifest
from targets.errors import BudgetError, TightfitError, did_you_mean

T = TypeVar("T")
OpenModel = Callable[[ModelOptions], Model]


class Repository:
    """The models of one gateway. `open_model` verifies a bundle, which takes as long as reading it."""

    def __init__(self, config: Config, gateway: Gateway, budget: int, open_model: OpenModel) -> None:
        self.entries: list[Entry] = []
        self._config = config
        self._gateway = gateway
        self._budget = budget
        self._open_model = open_model
        self._running: list[Served] = []
        """All that is in memory: active versions, and those that load or end."""
        self._log = log.get("repository")
        self._changes = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "bundles")

    # --- who asks for what

    def find(self, name: str, version: str | None = None) -> Entry:
        """The model of that name, the first where there are several versions. Raises RefusedError."""
        named = self._named(name)
        if not named:
            names = {entry.name for entry in self.entries}
            raise RefusedError(Reason.UNKNOWN_MODEL, f"unknown model {name[:100]!r}", did_you_mean(name[:100], names))
        if version is None:
            return named[0]
        # One that is on its way may be the one that is meant: that is known when it is there.
        found = [entry for entry in named if entry.version == version] or [entry for entry in named if entry.coming]
        if not found:
            raise no_version(name, version, [entry.version for entry in named])
        return found[0]

    def answering(self, entry: Entry) -> Entry:
        """Who answers for it: under pressure its lighter variant, while that is ready and like it; else itself."""
        if not self._gateway.overload.step.lighter:
            return entry
        for other in self._named(entry.options.lighter):
            if other.ready and other.active and entry.active and is_like(entry.active.model, other.active.model):
                self._gateway.telemetry.stood_in(entry.name)
                return other
        return entry

    def versions(self, name: str) -> list[str]:
        """All that are served of the model."""
        return [entry.version for entry in self._named(name) if entry.version]

    @property
    def ready(self) -> bool:
        """Whether every model that should be there can run requests."""
        return not self._gateway.draining and all(entry.ready for entry in self.entries if entry.wanted)

    async def index(self) -> list[dict[str, str]]:
        """Name, version, state and reason of every model that is served, failed, or could be loaded."""
        listed = [
            {"name": each.name, "version": each.version, "state": each.state, "reason": each.reason}
            for each in self.entries
        ]
        known = {entry.name for entry in self.entries}
        found = await asyncio.to_thread(bundles_in, self._config.repository.folders)
        listed += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": "not loaded"}
            for name in found
            if name not in known
        ]
        return listed

    # --- changes

    async def start(self, models: Sequence[tuple[ModelOptions, Model]]) -> None:
        """Load all of them. Raises TightfitError when together they do not fit, or at the first that fails."""
        _check_lighter(models)
        for position, (_, model) in enumerate(models):
            kept = sum(options.kept_bytes for options, _ in models[: position + 1])
            check_beside(model, [other for _, other in models[:position]], self._budget, kept)
        async with self._changes:
            for options, model in models:
                await self._activate(self._add(options.name or model.name, options), options, model)

    async def reload(self, wanted: Sequence[ModelOptions]) -> list[str]:
        """Make what is configured what runs: load what is new, replace what changed, unload what is configured no more.

        What failed is logged and returned, a line each; a model that could not be replaced goes on as it was.
        """
        async with self._changes:
            opened = [await self._opened(options) for options in wanted]
            known = _matched(opened, [entry for entry in self.entries if entry.configured])
            for entry in [entry for entry in self.entries if entry.configured and entry not in known.values()]:
                await self._unload(entry)
                self.entries.remove(entry)
            for position, each in enumerate(opened):
                if position not in known:
                    known[position] = self._add(each.name, each.options)
            configured = [known[position] for position in range(len(opened))]
            # Where a name has several versions the first that is configured goes by the name alone.
            self.entries[:] = configured + [entry for entry in self.entries if entry not in configured]
            lines = [await self._reloaded(entry, each) for entry, each in zip(configured, opened, strict=True)]
            return [line for line in lines if line]

    async def load(self, name: str, bundle: str | None = None) -> None:
        """Load the model, or what its bundle has become, or another `bundle` from the configured folders.

        Raises RefusedError where that may not be, and TightfitError when it fails: what ran before goes on.
        """
        self._check_control()
        async with self._changes:
            named = self._named(name)
            if not named and not NAME.fullmatch(name):
                raise RefusedError(Reason.UNKNOWN_MODEL, f"{name[:100]!r} cannot be a model's name")
            if bundle is not None or not named:
                options = named[0].options if named else ModelOptions(bundle=name, name=name)
                path = await self._off_loop(bundle_in, self._config.repository.folders, bundle or name + SUFFIX, name)
                options = msgspec.structs.replace(options, bundle=str(path))
                todo = [(named[0] if named else None, options)]
            else:
                todo = [(entry, entry.options) for entry in named]
            for entry, options in todo:
                model = await self._off_loop(self._open_model, options)
                # An entry is made for what can be opened, so that they are no more than there are bundles.
                await self._activate(entry or self._add(name, options, configured=False), options, model)

    async def unload(self, name: str) -> None:
        """Unload the model in all its versions, when what was accepted is answered."""
        self._check_control()
        self.find(name)
        async with self._changes:
            for entry in self._named(name):
                await self._unload(entry)

    async def close(self) -> None:
        """End every engine."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(served.close() for served in self._running))

    # --- one model

    async def _reloaded(self, entry: Entry, opened: _Opened) -> str:
        """Activate one model of the configuration; what was wrong, if anything."""
        if isinstance(opened.model, TightfitError):
            return self._failed(entry, opened.model)
        try:
            await self._activate(entry, opened.options, opened.model)
        except TightfitError as error:
            return f"{entry.name}: {error}"
        return ""

    async def _activate(self, entry: Entry, options: ModelOptions, model: Model) -> None:
        """Make `model` what the entry serves. Raises TightfitError; what ran before runs then."""
        before = entry.active
        if before is not None and before.is_same(model, options):
            # Its folder may be another: the next engine is loaded from there.
            before.model = model
            entry.use(options)
            entry.reason = ""
            return
        entry.coming = before is None
        try:
            if before is None or (not before.engine.given_up and self._fits(options, model, self._running)):
                self._check_room(options, model, self._running)
                await self._swap(entry, options, model)
            else:
                self._check_room(options, model, [served for served in self._running if served is not before])
                await self._replace(entry, before, options, model)
        except TightfitError as error:
            self._failed(entry, error)
            raise
        finally:
            entry.coming = False
            self._gateway.let_in(entry)
        entry.use(options)
        entry.wanted, entry.reason = True, ""

    async def _swap(self, entry: Entry, options: ModelOptions, model: Model) -> None:
        """Load it beside what runs, hand over, and end what ran."""
        served = await self._load(entry, options, model)
        before, entry.active = entry.active, served
        self._gateway.let_in(entry)
        self._activated(entry, before)
        if before is not None:
            self._log.info("swapped", model=entry.name, version=served.version, before=before.version)
            await self._end(before)

    async def _replace(self, entry: Entry, before: Served, options: ModelOptions, model: Model) -> None:
        """End what runs, load it, and hand over to it, or to what ran before."""
        entry.active, entry.coming = None, True
        await self._end(before)
        try:
            entry.active = await self._load(entry, options, model)
        except TightfitError as error:
            try:
                entry.active = await self._load(entry, before.options, before.model)
                self._activated(entry, None)
            except TightfitError as again:
                raise AgentError(f"{error.message}; what ran before does not load any more: {again.message}") from None
            raise
        self._log.info("replaced", model=entry.name, version=entry.version, before=before.version)
        self._activated(entry, before)

    async def _unload(self, entry: Entry) -> None:
        """End it when who was let in, and who waits at the door, is answered."""
        if entry.active is not None:
            entry.closing = True
            try:
                await self._end(entry.active)
            finally:
                entry.closing = False
            entry.active = None
            self._log.info("unloaded", model=entry.name)
        entry.wanted, entry.reason = False, "unloaded"

    async def _load(self, entry: Entry, options: ModelOptions, model: Model) -> Served:
        """Start an engine with it. Raises TightfitError."""
        images = await self._off_loop(load_images, model)
        text = await self._off_loop(load_text, model)
        # Reserving the slab is writing zeros to all of it.
        served = await self._off_loop(Served, entry, options, model, images, self._config, self._gateway, text)
        self._running.append(served)
        try:
            ready = await served.start(lambda: any(each.engine.up for each in self._running if each is not served))
        except BaseException:
            self._running.remove(served)
            await served.close()
            raise
        self._gateway.attach(served, ready)
        return served

    async def _end(self, served: Served) -> None:
        """End an engine that nobody is let into any more, when its last slot is given back."""
        for leave in self._gateway.on_leave:
            leave(served)
        await served.empty()
        self._gateway.detach(served)
        await served.close()
        self._running.remove(served)
        self._gateway.journal.note(Unload(model=served.name, version=served.version))

    def _activated(self, entry: Entry, before: Served | None) -> None:
        version = before.version if before else None
        self._gateway.journal.note(Activate(model=entry.name, version=entry.version, before=version))

    def _add(self, name: str, options: ModelOptions, configured: bool = True) -> Entry:
        entry = Entry(name, options, self._config.requests, configured)
        self.entries.append(entry)
        return entry

    def _failed(self, entry: Entry, error: TightfitError) -> str:
        """Note why a model could not be activated."""
        entry.reason = str(error)
        self._gateway.journal.note(Failed(model=entry.name, error=entry.reason))
        self._log.error("not activated", model=entry.name, error=str(error), serves=entry.version or None)
        return f"{entry.name}: {error}"

    # --- small parts

    def _named(self, name: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.name == name]

    def _check_room(self, options: ModelOptions, model: Model, beside: Sequence[Served]) -> None:
        kept = options.kept_bytes + sum(served.options.kept_bytes for served in beside)
        check_beside(model, [served.model for served in beside], self._budget, kept)

    def _fits(self, options: ModelOptions, model: Model, beside: Sequence[Served]) -> bool:
        try:
            self._check_room(options, model, beside)
        except BudgetError:
            return False
        return True

    def _check_control(self) -> None:
        if not self._config.repository.control:
            raise RefusedError(
                Reason.CONTROL_DISABLED,
                "models are not loaded or unloaded on request here",
                "set control = true under [repository], or change the configuration and reload the service",
            )

    async def _opened(self, options: ModelOptions) -> _Opened:
        """Look at a bundle of the configuration; verify it unless it is one that runs."""
        try:
            model = await self._off_loop(lambda: self._running_model(options) or self._open_model(options))
        except TightfitError as error:
            known = next((entry.name for entry in self.entries if entry.options.bundle == options.bundle), "")
            return _Opened(options, options.name or known or Path(options.bundle).stem, error)
        return _Opened(options, options.name or model.name, model)

    def _running_model(self, options: ModelOptions) -> Model | None:
        """What runs of that very bundle: every file of it was verified, and is in memory."""
        folder = Path(options.bundle).resolve()
        models = [served.model for served in list(self._running) if served.model.folder == folder]
        return next((model for model in models if model.digest == read_manifest(folder).digest), None)

    async def _off_loop(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


@dataclass(frozen=True)
class _Opened:
    """A bundle of the configuration, the name that it is asked for by, and what was found there."""

    options: ModelOptions
    name: str
    model: Model | TightfitError


def _check_lighter(models: Sequence[tuple[ModelOptions, Model]]) -> None:
    """Raise ConfigError where a lighter variant is none."""
    named = {options.name or model.name: model for options, model in models}
    for options, model in models:
        if not options.lighter:
            continue
        name = options.name or model.name
        if options.lighter not in named or options.lighter == name:
            raise ConfigError(
                f"no model {options.lighter!r} to be the lighter variant of {name!r}",
                did_you_mean(options.lighter, named.keys() - {name}),
            )
        if not is_like(model, named[options.lighter]):
            raise ConfigError(
                f"{options.lighter!r} cannot answer for {name!r}: their inputs or outputs differ",
                "compile both with equal names, types and ranges",
            )


def _matched(opened: Sequence[_Opened], entries: Sequence[Entry]) -> dict[int, Entry]:
    """Positions of what is configured, and the entry of each that there is: of its name, and of its version if it can
    be, so that versions which change places are not loaded anew."""
    found: dict[int, Entry] = {}
    left = list(entries)
    for same_version in (True, False):
        for position, each in enumerate(opened):
            version = "" if isinstance(each.model, TightfitError) else each.model.version
            named = [entry for entry in left if entry.name == each.name]
            fitting = [entry for entry in named if not same_version or entry.version == version]
            if position not in found and fitting:
                found[position] = fitting[0]
                left.remove(fitting[0])
    return found


def no_version(name: str, version: str, available: Sequence[str]) -> RefusedError:
    """That a model has no such version, and which it has."""
    listed = ", ".join(each for each in available if each) or "none"
    return RefusedError(
        Reason.UNKNOWN_MODEL, f"model {name!r} has no version {version[:100]!r}", f"available: {listed}"
    )
