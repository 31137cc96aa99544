"""onnxruntime's sessions: a model is loaded and run, in the one arena of its process.

The compiler's only door to onnxruntime. Nothing here imports onnx, so that a process that only runs models is small.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state

from compile.errors import VerificationError

# One run; a model that needs longer is not going to serve anybody, and one whose loop has no end needs longer.
RUN_TIMEOUT_S = 3600
_VNNI = re.compile(r"\bavx(512)?_vnni\b")


def version() -> str:
    """Version of onnxruntime."""
    return str(onnxruntime.__version__)


def saturates(machine: str, cpuinfo: str) -> bool:
    """Whether kernels add two products of a uint8 and an int8 in 16 bits, as those of x86-64 do without VNNI; `cpuinfo`
    is what /proc/cpuinfo says."""
    return machine == "x86_64" and not _VNNI.search(cpuinfo)


@functools.cache
def known_operators() -> dict[tuple[str, str], int]:
    """(domain, operator) -> the first opset of the domain that has it; "" is the domain of ONNX itself."""
    known: dict[tuple[str, str], int] = {}
    for schema in onnxruntime_pybind11_state.get_all_operator_schema():
        key = schema.domain, schema.name
        known[key] = min(schema.since_version, known.get(key, schema.since_version))
    return known


class OrtModel:
    """A loaded model; `run` takes and gives numpy arrays."""

    def __init__(self, model: Path | bytes, options: onnxruntime.SessionOptions) -> None:
        name = model.name if isinstance(model, Path) else "the source model"
        try:
            self._session = onnxruntime.InferenceSession(
                str(model) if isinstance(model, Path) else model,
                options,
                providers=["CPUExecutionProvider"],
                enable_fallback=0,  # it would print, and try the same again
            )
        except Exception as error:  # noqa: BLE001 - its exceptions share no base class
            raise VerificationError(f"onnxruntime cannot load {name}: {one_line(error)}") from None
        self.outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        options = onnxruntime.RunOptions()
        alarm = threading.Timer(RUN_TIMEOUT_S, setattr, (options, "terminate", True))
        alarm.start()
        try:
            values = self._session.run(None, dict(inputs), options)
        except Exception as error:  # noqa: BLE001 - its exceptions share no base class
            if options.terminate:
                raise VerificationError(f"onnxruntime ran the model for {RUN_TIMEOUT_S} s without an end") from None
            raise VerificationError(f"onnxruntime cannot run the model: {one_line(error)}") from None
        finally:
            alarm.cancel()
        return dict(zip(self.outputs, values, strict=True))

    def run_in_arena(self, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """As `run`, but outputs are seen where the arena holds them, as the agent sees them; strings are copied."""
        if any(v.type == "tensor(string)" for v in (*self._session.get_inputs(), *self._session.get_outputs())):
            return self.run(inputs)
        try:
            binding = self._session.io_binding()
            for name, value in inputs.items():
                binding.bind_cpu_input(name, value)
            for name in self.outputs:
                binding.bind_output(name, "cpu")
            self._session.run_with_iobinding(binding)
        except Exception as error:  # noqa: BLE001 - its exceptions share no base class
            raise VerificationError(f"onnxruntime cannot run the model: {one_line(error)}") from None
        values = binding.get_outputs()
        seen = [np.from_dlpack(v) if hasattr(v, "__dlpack__") else v.numpy() for v in values]
        return dict(zip(self.outputs, seen, strict=True))

    def end_profiling(self) -> Path:
        """Where the profile of the runs so far was written."""
        return Path(self._session.end_profiling())


def load(path: Path, settings: Mapping[str, str]) -> OrtModel:
    """Load for ordinary runs; settings that need a registered arena do not apply here."""
    return OrtModel(path, make_options({k: v for k, v in settings.items() if k != "session.use_env_allocators"}))


def load_mapped(graph: bytes, folder: Path) -> OrtModel:
    """Load a serialized graph whose weights are files in `folder`: they stay mapped, no kernel lays them out anew."""
    settings = {
        "session.disable_prepacking": "1",
        "session.model_external_initializers_file_folder_path": str(folder),
        "session.intra_op.allow_spinning": "0",
    }
    options = make_options(settings)
    # What a kernel makes is given back when nobody reads it any more, and nothing is computed from weights in advance:
    # a widened FP16 weight must live no longer than its kernel.
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return OrtModel(graph, options)


def make_options(settings: Mapping[str, str]) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.log_severity_level = 4  # its warnings are not for the person who compiles; errors are raised
    for key, value in settings.items():
        options.add_session_config_entry(key, value)
    return options


def register_arena(initial: int, cap: int) -> None:
    """One arena whose first chunk is the whole plan: later requests split it, so sizes that vary cannot grow it."""
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    config = onnxruntime.OrtArenaCfg(
        {
            "max_mem": cap,
            "arena_extend_strategy": 0,  # kNextPowerOfTwo: the only one that honours the first chunk's size
            "initial_chunk_size_bytes": initial,
            "max_dead_bytes_per_chunk": -1,
        }
    )
    onnxruntime.create_and_register_allocator(memory, config)


def one_line(error: Exception) -> str:
    """A runtime's message without its prefixes of codes and source lines, cut to a readable length."""
    text = " ".join(str(error).split())
    for mark in ("Status Message: ", "[ONNXRuntimeError] : "):
        if mark in text:
            text = text.split(mark, 1)[1]
    return text[:300]
