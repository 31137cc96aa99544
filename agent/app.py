"""Composition root: puts the parts together, runs them, and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from agent import finalise, log, systemd
from agent.access.access import Access
from agent.config import Config, ModelOptions, Tracing
from agent.errors import AgentError
from agent.gateway import Gateway
from agent.http.ensembles import check_ensembles
from agent.http.protocol import listen, runner_of
from agent.http.sockets import listening, url_of
from agent.http.v2 import V2
from agent.laid_out import FinaliseError, locate
from agent.models import Model, machine_budget, open_model
from agent.reload import Reloads, Source
from agent.repository import Repository
from agent.telemetry import Telemetry
from targets.bundle import Residency

if TYPE_CHECKING:
    from agent.fleet.fleet import Fleet
    from agent.tracing import Tracer

# After the drain every answer is written; this is for the last of them to leave the socket.
_FLUSH_S = 2.0
# While a bundle is finalised the service manager hears of it every few seconds, and may wait this much longer.
_FINALISE_STEP_US = 120_000_000
SWITCH_S = 0.0005
Announce = Callable[[str], None]


def version() -> str:
    """Version of the installed package; a source tree that is not installed has none."""
    try:
        return metadata.version("tightfit")
    except metadata.PackageNotFoundError:
        return "0+source"


def serve(config: Config, source: Source, announce: Announce) -> None:
    """Verify the bundles, load them, and serve until SIGTERM or SIGINT. `announce` hears the address once ready.

    SIGHUP and SIGUSR1 have `source` read again, and what changed of the models activated.
    """
    log.configure(config.log.level, config.log.format)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        # Until there is something to reload, which would else be the end of the process.
        signal.signal(number, signal.SIG_IGN)
    access = Access(config)
    tracer = _tracer(config.tracing)
    budget = machine_budget(config.memory.os_reserve_mib)
    models = [(options, _open(config, budget, options, config.engine.finalise_on_start)) for options in config.served]
    # How long a thread that computes in Python (one verifies bundles, two parse JSON) may keep the interpreter from the
    # loop, each time that the loop wakes; a request wakes it several times.
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(_serve(config, source, access, tracer, budget, models, announce))
    if tracer is not None:
        tracer.close()


def _tracer(options: Tracing) -> Tracer | None:
    """What makes spans, if something is to. Raises AgentError where its library is not there."""
    if not options.endpoint:
        return None
    try:
        tracing = importlib.import_module("agent.tracing")
    except ModuleNotFoundError as error:
        raise AgentError(
            f"[tracing] has an endpoint, but {error.name} is not installed",
            "pip install 'tightfit[otel]', or leave the endpoint out",
        ) from None
    tracer: Tracer = tracing.to_collector(options, version())
    return tracer


def _open(config: Config, budget: int, options: ModelOptions, may_finalise: bool) -> Model:
    """Verify one bundle and find what was made of it. Raises TightfitError."""
    chosen = None if config.engine.residency == "plan" else Residency(config.engine.residency)
    model = open_model(Path(options.bundle), budget, chosen)
    if not model.planned:
        planned = sorted({segment.residency.value for segment in model.manifest.segments})
        log.get("gateway").warning(
            "the plan was made for another residency: it says nothing of the memory that this one takes",
            model=model.name, chosen=config.engine.residency, planned=",".join(planned),
        )  # fmt: skip
    if Residency.UNPACKED in model.residencies and model.manifest.quantization.quantized:
        log.get("gateway").warning("unpacked is for float weights: quantized ones may run many times slower")
    if model.to_lay_out:
        model = dataclasses.replace(model, finalised=_laid_out(config, model, may_finalise))
    return model


def _laid_out(config: Config, model: Model, may_finalise: bool) -> Path:
    """The folder with the model's laid-out segments, made now if it may be."""
    cache = Path(config.engine.cache) if config.engine.cache else None
    try:
        return locate(model, cache)
    except FinaliseError:
        if not may_finalise:
            raise

    def progress(line: str) -> None:
        systemd.notify(f"EXTEND_TIMEOUT_USEC={_FINALISE_STEP_US}\nSTATUS={line}")
        log.get("gateway").info("finalise", progress=line)

    return finalise.build(model, cache, config.engine.intra_op_threads, progress).folder


async def _serve(
    config: Config, source: Source, access: Access, tracer: Tracer | None, budget: int,
    models: Sequence[tuple[ModelOptions, Model]], announce: Announce,
) -> None:  # fmt: skip
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    telemetry = Telemetry()
    telemetry.built(version())
    telemetry.watch_one("tightfit_budget_bytes", "What the agent may use of this machine's memory.", lambda: budget)
    gateway = Gateway(config, telemetry, tracer=tracer)
    if tracer is not None:
        telemetry.watch_one_count("tightfit_spans_made", "Spans that were made.", lambda: tracer.made)
        telemetry.watch_one_count("tightfit_spans_sent", "Spans that the collector took.", tracer.sent)
    # What is loaded later is laid out before, with `tightfit-agent finalise`: that may take longer than anyone waits.
    repository = Repository(config, gateway, budget, lambda options: _open(config, budget, options, may_finalise=False))
    reloads = Reloads(config, source, access, repository)
    for number in (signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(number, reloads.ask)
    try:
        if await _unless(stop, repository.start(models)):
            check_ensembles(config.ensembles, repository)
            await _listen(config, access, gateway, repository, reloads, announce, stop)
    finally:
        access.close()
        await reloads.close()
        gateway.close()
        await repository.close()


def _fleet(config: Config, access: Access, gateway: Gateway, repository: Repository, api: V2) -> Fleet | None:
    """What publishes, if anything is to be. Raises AgentError where its library is not there."""
    if not config.mqtt.is_on:
        return None
    try:
        fleet = importlib.import_module("agent.fleet.fleet")
    except ModuleNotFoundError as error:
        raise AgentError(
            f"[mqtt] names a broker, but {error.name} is not installed",
            "pip install 'tightfit[agent]', or leave brokers out",
        ) from None
    made: Fleet = fleet.Fleet(config, gateway, repository, api, access, version())
    return made


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Do `work`; False when `stop` came first."""
    stopped: asyncio.Task[Any] = asyncio.ensure_future(stop.wait())
    task: asyncio.Task[Any] = asyncio.ensure_future(work)
    await asyncio.wait({stopped, task}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False


async def _listen(
    config: Config, access: Access, gateway: Gateway, repository: Repository, reloads: Reloads, announce: Announce,
    stop: asyncio.Event,
) -> None:  # fmt: skip
    api = V2(gateway, repository, access, config, version())
    runner = runner_of(api.application(), _FLUSH_S)
    await runner.setup()
    telemetry = gateway.telemetry
    telemetry.watch_one(
        "tightfit_certificate_expires_seconds", "When, since 1970; 0 without TLS.", lambda: access.expires
    )
    telemetry.watch_one_count(
        "tightfit_handshakes_failed", "Connections that TLS came to nothing on.", lambda: access.handshakes_failed
    )
    fleet = _fleet(config, access, gateway, repository, api)
    try:
        with listening(config.http, access.speaks_tls, config.limits) as listeners:
            servers = [await listen(runner, api.lane, config, access, listener) for listener in listeners]
            addresses = [url_of(listener) for listener in listeners]
            if fleet is not None:
                await fleet.begin()
            logger = log.get("gateway")
            names = ",".join(entry.name for entry in repository.entries)
            logger.info("serving", models=names, addresses=",".join(addresses))
            announce(f"serving {names} at {', '.join(addresses)}")
            systemd.notify("READY=1")
            access.begin()
            reloads.begin()
            # All that is there by now stays: the collector need not look through it again and again.
            gc.collect()
            gc.freeze()
            lost = await _unless(stop, gateway.given_up.wait())
            systemd.notify("STOPPING=1")
            logger.info("stopping: no new requests, what was accepted is answered first")
            for server in servers:
                server.close()
            await gateway.drain()
    finally:
        if fleet is not None:
            # Behind the last answers, so that what they were is told.
            await fleet.close()
        await runner.cleanup()
    if lost:
        logger.error("every engine died too often to be started again; the agent ends")
        # Not that of a bad bundle or configuration: the service manager is to start the agent again.
        sys.exit(1)
