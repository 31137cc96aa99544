"""What the engine needs of a runtime, and how it is found."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from agent.errors import AgentError
from agent.runtimes import backend_module
from targets.bundle import Residency

Array = NDArray[np.generic]
"""A tensor of a type numpy has; strings are object arrays of str."""


@dataclass(frozen=True)
class SessionOptions:
    """How a segment is loaded; `settings` are the runtime's own, and what the bundle's plan rests on.

    A graph that is to be mapped must be one that `Backend.lay_out` wrote.
    """

    threads: int
    settings: Mapping[str, str]
    residency: Residency = Residency.HEAP


@dataclass(frozen=True)
class ArenaOptions:
    """The arena that all sessions share, in bytes: its first chunk is the plan, and past the cap a run fails."""

    planned_bytes: int
    cap_bytes: int


class BackendError(AgentError):
    """The runtime refused a graph or a run; the message is its own, on one line."""


class Session(Protocol):
    """One loaded segment."""

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Values of `outputs`, in that order. Feeds are read in place. Raises BackendError."""
        ...

    def close(self) -> None:
        """Give back weights and graph now; outputs that were given out stay valid. Nothing runs afterwards."""
        ...


class Backend(Protocol):
    """One module a runtime."""

    def describe(self) -> str:
        """Name and version of the runtime."""
        ...

    def prepare(self, arena: ArenaOptions) -> None:
        """Once per process, before the first session."""
        ...

    def load_session(self, path: Path, options: SessionOptions) -> Session:
        """Load one graph. Raises BackendError."""
        ...

    def lay_out(self, source: Path, target: Path, options: SessionOptions) -> None:
        """Write the graph as this machine's kernels want it: `target`, and its weights beside it as `target`.bin.

        Holds one segment in memory, laid out. The files are good for this version of the runtime on this CPU.
        Raises BackendError.
        """
        ...


def open_backend(runtime: str) -> Backend:
    """Import the module that drives `runtime`; a missing library is an AgentError that says what to install."""
    try:
        module: Any = importlib.import_module(backend_module(runtime))
    except ModuleNotFoundError as error:
        raise AgentError(f"{error.name} is not installed", "pip install 'tightfit[agent,cpu]'") from None
    return cast(Backend, module)


def one_line(error: Exception) -> str:
    """First line of a runtime's message, cut to what fits in a log line."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:500]
