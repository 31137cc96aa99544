"""Composition root: puts the parts together, runs them, and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Coroutine
from importlib import metadata
from pathlib import Path
from typing import Any

import uvloop

from agent import finalise, log, systemd
from agent.config import Config
from agent.gateway import Gateway
from agent.http.protocol import address_of, listen, runner_of
from agent.http.v2 import V2
from agent.images import Images, load_images
from agent.laid_out import FinaliseError, locate
from agent.models import Model, machine_budget, open_model
from agent.telemetry import Telemetry
from targets.bundle import Residency

# After the drain every answer is written; this is for the last of them to leave the socket.
_FLUSH_S = 2.0
# While a bundle is finalised the service manager hears of it every few seconds, and may wait this much longer.
_FINALISE_STEP_US = 120_000_000
Announce = Callable[[str], None]


def version() -> str:
    """Version of the installed package; a source tree that is not installed has none."""
    try:
        return metadata.version("tightfit")
    except metadata.PackageNotFoundError:
        return "0+source"


def serve(config: Config, announce: Announce) -> None:
    """Verify the bundle, load it, and serve until SIGTERM or SIGINT. `announce` hears the address once ready."""
    log.configure(config.log.level, config.log.format)
    chosen = None if config.engine.residency == "plan" else Residency(config.engine.residency)
    model = open_model(Path(config.bundle), machine_budget(config.memory.os_reserve_mib), chosen)
    if not model.planned:
        planned = sorted({segment.residency.value for segment in model.manifest.segments})
        log.get("gateway").warning(
            "the plan was made for another residency: it says nothing of the memory that this one takes",
            chosen=config.engine.residency, planned=",".join(planned),
        )  # fmt: skip
    if Residency.UNPACKED in model.residencies and model.manifest.quantization.quantized:
        log.get("gateway").warning("unpacked is for float weights: quantized ones may run many times slower")
    if model.to_lay_out:
        model = dataclasses.replace(model, finalised=_laid_out(config, model))
    uvloop.run(_serve(config, model, load_images(model), announce))


def _laid_out(config: Config, model: Model) -> Path:
    """The folder with the model's laid-out segments, made now if the configuration says so."""
    cache = Path(config.engine.cache) if config.engine.cache else None
    try:
        return locate(model, cache)
    except FinaliseError:
        if not config.engine.finalise_on_start:
            raise

    def progress(line: str) -> None:
        systemd.notify(f"EXTEND_TIMEOUT_USEC={_FINALISE_STEP_US}\nSTATUS={line}")
        log.get("gateway").info("finalise", progress=line)

    return finalise.build(model, cache, config.engine.intra_op_threads, progress).folder


async def _serve(config: Config, model: Model, images: Images | None, announce: Announce) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config, model, Telemetry())
    try:
        if not await _unless(stop, gateway.start()):
            return
        await _listen(config, gateway, images, announce, stop)
    finally:
        await gateway.close()


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
    config: Config, gateway: Gateway, images: Images | None, announce: Announce, stop: asyncio.Event
) -> None:
    runner = runner_of(V2(gateway, images, config, version()).application(), _FLUSH_S)
    await runner.setup()
    try:
        server = await listen(runner, config.http)
        address = address_of(server)
        logger = log.get("gateway")
        logger.info("serving", model=gateway.model.name, version=gateway.model.version, address=address)
        announce(f"serving {gateway.model.name} at {address}")
        systemd.notify("READY=1")
        lost = await _unless(stop, gateway.given_up.wait())
        systemd.notify("STOPPING=1")
        logger.info("stopping: no new requests, what was accepted is answered first")
        server.close()
        await gateway.drain()
    finally:
        await runner.cleanup()
    if lost:
        logger.error("the engine died too often to be started again; the agent ends")
        # Not that of a bad bundle or configuration: the service manager is to start the agent again.
        sys.exit(1)
