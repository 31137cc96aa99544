"""The gateway's side of the engine process: starts it, talks to it, and says what became of it."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from agent import log
from agent.engine import channel
from agent.engine.channel import Done, Failed, Load, Pass, Passed, Ready, RunError, Slab
from agent.engine.quiet import step_back
from agent.errors import AgentError
from agent.memory import oom_kills

# An engine that is told to stop has nothing left to do but to exit.
_EXIT_S = 2.0
# Where this very `agent` was imported from: the child must find the same one.
_ROOT = Path(__file__).parents[2]
# An engine dies with the thread that started it (prctl(2), PR_SET_PDEATHSIG): one that lives as long as this process.
# Starting one takes milliseconds, in which the loop goes on.
_starter = ThreadPoolExecutor(1, "engines")

OnReply = Callable[[Passed | Done | RunError], None]
OnDeath = Callable[[str], None]


class AnyEngine(Protocol):
    """What is used of an engine, wherever it runs."""

    @property
    def up(self) -> bool: ...

    @property
    def pid(self) -> int | None: ...

    async def start(self, load: Load, timeout_s: float) -> Ready: ...

    def send(self, runs: Pass) -> None: ...

    def kill(self) -> None: ...

    async def close(self) -> None: ...


def new_engine(inline: bool, slab: Slab, on_reply: OnReply, on_death: OnDeath) -> AnyEngine:
    """One that is not started yet: a process, or `agent.engine.inline`, which is imported only then."""
    if not inline:
        return EngineHost(slab, on_reply, on_death)
    module: Any = importlib.import_module("agent.engine.inline")
    engine: AnyEngine = module.InlineEngine(slab, on_reply, on_death)
    return engine


class EngineHost:
    """One engine process. `on_reply` hears every answer, `on_death` once why it is gone, unless it was closed, or never
    was ready: then `start` says so."""

    def __init__(self, slab: Slab, on_reply: OnReply, on_death: OnDeath) -> None:
        self._slab = slab
        self._on_reply = on_reply
        self._on_death = on_death
        self._log = log.get("gateway")
        self._control, self._engines_end = channel.socket_pair()
        self._oom_kills = oom_kills()
        self._control.setblocking(False)
        self._ready: asyncio.Future[Ready] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._closing = False
        self._was_up = False
        self._up = False

    @property
    def up(self) -> bool:
        """Whether it can run requests now."""
        return self._up

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self, load: Load, timeout_s: float) -> Ready:
        """Start the process and wait until the bundle is loaded and warm. Raises AgentError with its reason."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self._control.fileno(), self._read)
        self._watcher = loop.create_task(self._live(load.quiet))
        channel.send_to_engine(self._control, load)
        try:
            ready = await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise AgentError(f"the engine did not load within {timeout_s:g} s", "raise load_s under [engine]") from None
        self._up = self._was_up = True
        return ready

    def send(self, runs: Pass) -> None:
        """Hand over a pass. The engine's death, not this call, says when it cannot be done."""
        try:
            channel.send_to_engine(self._control, runs)
        except OSError:
            self._lost()

    async def close(self) -> None:
        """End the process, politely first."""
        self._closing = True
        self._up = False
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        if self._watcher is None:
            self._engines_end.close()
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._watcher), _EXIT_S)
        except (TimeoutError, asyncio.TimeoutError):
            self.kill()
            await self._watcher
        if self._ready is not None and self._ready.done():
            self._ready.exception()  # whoever waited for it may be gone

    def _read(self) -> bool:
        """Handle the packet that is there; whether there was one. The loop calls again while there are more."""
        try:
            messages = channel.receive_in_gateway(self._control)
        except BlockingIOError:
            return False
        except (OSError, msgspec.DecodeError) as error:
            self._log.error("the engine's channel is broken", error=str(error))
            messages = None
        if messages is None:
            self._lost()
            return False
        for message in messages:
            self._handle(message)
        return True

    def _handle(self, message: channel.ToGateway) -> None:
        if isinstance(message, (Passed, Done, RunError)):
            self._on_reply(message)
        elif self._ready is None or self._ready.done():
            self._log.error("the engine spoke out of turn", message=type(message).__name__)
        elif isinstance(message, Failed):
            self._ready.set_exception(AgentError(message.message, message.hint))
        else:
            self._ready.set_result(message)

    def _lost(self) -> None:
        """The channel is of no more use, so neither is the process: make sure that it ends and is noticed."""
        self._up = False
        loop = asyncio.get_running_loop()
        if self._control.fileno() >= 0:
            loop.remove_reader(self._control.fileno())
        # A process that ends by itself is given the time to, so that its own exit code is what gets reported.
        loop.call_later(_EXIT_S, self.kill)

    def kill(self) -> None:
        """End the process at once; its death is noticed as any other."""
        if self._process is not None:
            self._process.kill()

    async def _live(self, quiet: bool) -> None:
        """The process, from its beginning to its end."""
        try:
            self._process = await asyncio.get_running_loop().run_in_executor(_starter, self._start_process, quiet)
        except OSError as error:
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(AgentError(f"the engine process cannot be started: {error.strerror}"))
            return
        finally:
            self._engines_end.close()
        self._ended(await _end_of(self._process))

    def _start_process(self, quiet: bool) -> subprocess.Popen[bytes]:
        fds = (self._engines_end.fileno(), self._slab.fd)
        process = subprocess.Popen(
            (sys.executable, "-m", "agent.engine.worker", str(fds[0]), str(fds[1]), str(os.getpid())),
            cwd=_ROOT,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
        if quiet:
            step_back(process.pid)
        return process

    def _ended(self, code: int) -> None:
        if self._control.fileno() >= 0 and not self._closing:
            while self._read():
                pass
        was_up, self._up = self._was_up, False
        how = describe_exit(code, out_of_memory=oom_kills() > self._oom_kills)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(AgentError(f"the engine process {how} while it loaded the bundle"))
        if was_up and not self._closing:
            self._on_death(how)


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for its end; its exit code."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    pidfd = os.pidfd_open(process.pid)

    def readable() -> None:
        loop.remove_reader(pidfd)
        ended.set_result(None)

    loop.add_reader(pidfd, readable)
    try:
        await ended
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return process.wait()


def describe_exit(code: int, out_of_memory: bool | None = None) -> str:
    """What the exit code of a process says, for people. `out_of_memory`: whether the kernel says that memory ran out,
    where it was asked."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = {None: " (out of memory?)", True: ", because memory ran out", False: ""}[out_of_memory]
    return f"was killed by {name}" + (why if name == "SIGKILL" else "")
