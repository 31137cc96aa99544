"""The gateway's side of the engine process: starts it, talks to it, and says what became of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from agent import log
from agent.engine import channel
from agent.engine.channel import Done, Failed, Load, Pass, Passed, Ready, RunError, Slab
from agent.errors import AgentError

# An engine that is told to stop has nothing left to do but to exit.
_EXIT_S = 2.0
# Where this very `agent` was imported from: the child must find the same one.
_ROOT = Path(__file__).parents[2]

OnReply = Callable[[Passed | Done | RunError], None]
OnDeath = Callable[[str], None]


class EngineHost:
    """One engine process. `on_reply` hears every answer, `on_death` once why it is gone, unless it was closed, or never
    was ready: then `start` says so."""

    def __init__(self, slab: Slab, on_reply: OnReply, on_death: OnDeath) -> None:
        self._slab = slab
        self._on_reply = on_reply
        self._on_death = on_death
        self._log = log.get("gateway")
        self._control, self._engines_end = channel.socket_pair()
        self._control.setblocking(False)
        self._ready: asyncio.Future[Ready] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._closing = False
        self._was_up = False
        self.up = False

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self, load: Load, timeout_s: float) -> Ready:
        """Start the process and wait until the bundle is loaded and warm. Raises AgentError with its reason."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        fds = (self._engines_end.fileno(), self._slab.fd)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent.engine.worker", str(fds[0]), str(fds[1]), str(os.getpid())),
            cwd=_ROOT,
            pass_fds=fds,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,
        )
        self._engines_end.close()
        loop.add_reader(self._control.fileno(), self._read)
        self._watcher = loop.create_task(self._watch(self._process))
        channel.send(self._control, load)
        try:
            ready = await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise AgentError(f"the engine did not load within {timeout_s:g} s", "raise load_s under [engine]") from None
        self.up = self._was_up = True
        return ready

    def send(self, runs: Pass) -> None:
        """Hand over a pass. The engine's death, not this call, says when it cannot be done."""
        try:
            channel.send(self._control, runs)
        except OSError:
            self._lost()

    async def close(self) -> None:
        """End the process, politely first."""
        self._closing = True
        self.up = False
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._engines_end.close()
        if self._watcher is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._watcher), _EXIT_S)
        except (TimeoutError, asyncio.TimeoutError):
            self.kill()
            await self._watcher
        if self._ready is not None and self._ready.done():
            self._ready.exception()  # whoever waited for it may be gone

    def _read(self) -> None:
        """Handle every message that is there."""
        while True:
            try:
                message = channel.receive_in_gateway(self._control)
            except BlockingIOError:
                return
            except (OSError, msgspec.DecodeError) as error:
                self._log.error("the engine's channel is broken", error=str(error))
                message = None
            if message is None:
                self._lost()
                return
            self._handle(message)

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
        self.up = False
        loop = asyncio.get_running_loop()
        if self._control.fileno() >= 0:
            loop.remove_reader(self._control.fileno())
        # A process that ends by itself is given the time to, so that its own exit code is what gets reported.
        loop.call_later(_EXIT_S, self.kill)

    def kill(self) -> None:
        """End the process at once; its death is noticed as any other."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._control.fileno() >= 0 and not self._closing:
            self._read()
        was_up, self.up = self._was_up, False
        how = describe_exit(code)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(AgentError(f"the engine process {how} while it loaded the bundle"))
        if was_up and not self._closing:
            self._on_death(how)


def describe_exit(code: int) -> str:
    """What the exit code of a process says, for people."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
