"""What the compiler needs of a runtime. Backends are found by name and imported when first asked for."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy.typing as npt

from compile.calibrate.collectors import Range, Unfit
from compile.errors import OptionError
from compile.graph import ir
from compile.quantize.schemes import Scheme
from targets.bundle import LeftAlone

Tensors = Mapping[str, npt.NDArray[Any]]
"""Inputs or outputs by name; string tensors are object arrays of `str` or `bytes`."""

# runtime of a board -> module. A runtime that is not listed here cannot be compiled for yet.
BACKENDS = {"onnxruntime": "compile.backends.ort"}


@dataclasses.dataclass(frozen=True)
class Lowered:
    """What lowering did to the graph it was given (in place)."""

    quantized: dict[str, int]
    left: tuple[LeftAlone, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One kernel as it ran: tensors it read and wrote, bytes of each output, bytes the allocator gave it.

    `in_subgraph`: it belongs to the body of a control-flow node, which ends after it.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_nbytes: tuple[int, ...]
    allocated: int
    in_subgraph: bool = False


@dataclasses.dataclass(frozen=True)
class Trace:
    """One observed run: its kernels in order, and bytes of each graph output; `made`: of all that each segment gives.

    `weights_in_arena` is what the arena counts before a kernel asks for anything; `peak` the most that was in use
    besides (0 where the runtime does not report it).
    """

    steps: tuple[Step, ...]
    output_nbytes: dict[str, int]
    weights_in_arena: int
    peak: int = 0
    made: tuple[Mapping[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """One segment on disk: its graph file, and what it takes and gives."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class WeightFootprint:
    """Bytes of one segment's weights in a runtime.

    Loaded, a runtime keeps `session` of the graph itself (nodes, kernels, their bookkeeping), and of the weights `heap`
    that it lays out anew, and `mapped` that it reads where they are in the file.
    """

    heap: int
    mapped: int
    session: int
    largest: int
    """The largest of the copies."""
    largest_mapped: int = 0
    """The largest weight that is read in the file."""
    copies: int = 0
    """`heap` as a file to be mapped holds it, in whole pages."""
    rearranged: int = 0
    """Of `heap`, what the graph's optimizer lays out, whether kernels may or not."""
    sources: int = 0
    """What the other copies are made of, in the file."""
    touched: int = 0
    """Of `mapped`, what loading reads; the rest is not in memory until it is used."""
    transit_heap: int = 0
    transit_file: int = 0
    """What is there besides while the largest copy is made: what making it takes, and its source."""
    optimizing: int = 0
    """What is there besides while the optimizer makes `rearranged`, before any of the other copies."""
    unpacked_scratch: int = 0
    """The most that a kernel takes beside the arena, while it runs, when its weight was not laid out."""
    unread: int = 0
    """Of `mapped`, what no run reads once the copies are there to be mapped: it is in them."""
    tables: int = 0
    """Of `mapped`, tables that a run reads by rows, the few that its inputs name."""
    rows: int = 0
    """The pages of them that one run reads at the most."""
    indexes: bool = False
    """Whether loading already asks the arena for memory."""


class Model(Protocol):
    """A loaded model."""

    def run(self, inputs: Tensors) -> dict[str, npt.NDArray[Any]]:
        """Outputs by name; raises VerificationError with the runtime's reason."""


class Backend(Protocol):
    """One runtime, as a module."""

    def check_operators(self, model: ir.Model) -> None:
        """Raise ModelError that names the operators which this runtime does not know, and where they are."""

    def prepare(self, model: ir.Model, scheme: Scheme) -> list[str]:
        """Bring the graph, in place, into the form that is calibrated; names of the values whose ranges are needed."""

    def lower(self, model: ir.Model, scheme: Scheme, ranges: Mapping[str, Range | Unfit] | None = None) -> Lowered:
        """Rewrite the graph, in place, into what this runtime executes best under the scheme."""

    def session_settings(self, scheme: Scheme) -> dict[str, str]:
        """Settings a segment must be loaded with; they go into the bundle, so that the agent uses the same."""

    def verification_settings(self, scheme: Scheme) -> dict[str, str]:
        """What this machine needs beside those, so that a segment computes here what it computes on the board."""

    def load(self, path: Path, settings: Mapping[str, str]) -> Model:
        """Load a model file; raises VerificationError with the runtime's reason."""

    def load_mapped(self, model: ir.Model, folder: Path) -> Model:
        """Load a graph in memory whose weights are files in `folder`; they are mapped and never copied."""

    def observe(
        self, parts: Sequence[Part], settings: Mapping[str, str], inputs: Tensors, results: Sequence[str]
    ) -> Trace:
        """Run all segments once, one after the other, in a process of its own; say what each kernel allocated."""

    def runs_within(
        self, parts: Sequence[Part], settings: Mapping[str, str], inputs: Tensors, arena: int, trace: Trace
    ) -> bool:
        """Whether such a run ends inside an arena of that many bytes."""

    def weight_footprint(
        self, model: ir.Model, sizes: Mapping[str, int], start: int = 0, end: int | None = None
    ) -> WeightFootprint:
        """Where the runtime will keep the weights of a lowered graph, or of its nodes [start, end), once it has loaded
        it."""

    def version(self) -> str:
        """Version of the runtime."""


def backend(runtime: str) -> Backend:
    """The backend of that name; OptionError when there is none or its library is not installed."""
    if runtime not in BACKENDS:
        raise OptionError(
            f"this version has no compiler backend for {runtime}",
            f"choose a board whose runtime is {' or '.join(BACKENDS)} (tightfit-targets list)",
        )
    try:
        return cast(Backend, importlib.import_module(BACKENDS[runtime]))
    except ModuleNotFoundError as error:
        raise OptionError(f"{runtime} is not installed ({error})", "pip install 'tightfit[compile,cpu]'") from None
