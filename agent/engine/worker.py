"""The engine process: loads a runtime and a bundle, then runs what the gateway puts into the slab.

Started as `python -m agent.engine.worker CONTROL_FD SLAB_FD PARENT_PID`, a fresh interpreter. It lives exactly as
long as its gateway: the kernel kills it with its parent, and the end of the control socket ends its loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path

from agent import log
from agent.engine.channel import Failed, Layout, Load, Pass, Ready, Slab, receive_in_engine, send_to_gateway
from agent.engine.loading import Loaded, load, manifest_of
from agent.engine.passes import Engine
from agent.engine.quiet import behind_others
from agent.engine.residency import give_freed_blocks_back
from agent.errors import AgentError
from agent.memory import pss_by_kind
from targets.errors import TightfitError

_PR_SET_PDEATHSIG = 1
# When memory runs out the kernel takes the engine, whose connections survive in the gateway, not the gateway.
_OOM_SCORE_ADJ = 500


def serve(control: socket.socket, engine: Engine) -> None:
    """Answer every run of every Pass with exactly one Done or RunError until the gateway is gone."""
    while (message := receive_in_engine(control)) is not None:
        if not isinstance(message, Pass):
            raise AgentError("the gateway sent a second Load")
        passed, answers = engine.run(message.batches)
        try:
            send_to_gateway(control, passed, *answers)
        except BrokenPipeError:
            return


def tie_to_parent(parent: int) -> None:
    """Die when the gateway dies, and leave signals meant for the service to the gateway, which drains first."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the gateway is gone")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(max(int(score.read_text(encoding="ascii")), _OOM_SCORE_ADJ)), encoding="ascii")
    except OSError as error:
        log.get("engine").warning("cannot raise oom_score_adj", error=error.strerror)


def main(arguments: list[str]) -> None:
    control_fd, slab_fd, parent = map(int, arguments)
    tie_to_parent(parent)
    control = socket.socket(fileno=control_fd)
    message = receive_in_engine(control)
    if not isinstance(message, Load):
        return
    log.configure(message.log_level, message.log_format)
    give_freed_blocks_back()
    started = time.perf_counter()
    try:
        with behind_others(os.getpriority(os.PRIO_PROCESS, parent)) if message.quiet else contextlib.nullcontext():
            loaded = _load(message, slab_fd)
    except TightfitError as error:
        send_to_gateway(control, Failed(error.message, error.hint))
        return
    pss = pss_by_kind(os.getpid())
    log.get("engine").debug("loaded", runtime=loaded.engine.runtime, **{f"pss_{kind}": n for kind, n in pss.items()})
    load_s = time.perf_counter() - started
    ready = Ready(loaded.engine.runtime, load_s, loaded.warm_s, pss, loaded.costs, loaded.sample_bytes)
    # What was loaded stays: the collector need not look through it again.
    gc.collect()
    gc.freeze()
    send_to_gateway(control, ready)
    serve(control, loaded.engine)


def _load(message: Load, slab_fd: int) -> Loaded:
    manifest = manifest_of(message)
    return load(message, manifest, Slab(slab_fd, Layout.of(manifest.contract, manifest.plan.slots)))


if __name__ == "__main__":
    main(sys.argv[1:])
