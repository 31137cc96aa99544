"""onnxruntime on the CPU.

The session options are those that make memory what the plan says: graphs are loaded by path so that weights are
mapped, and all sessions share one arena whose first chunk is the whole plan.

Kernels lay most weights out anew ("prepack") and keep the copy on the heap. `lay_out` has the runtime save its copies
beside the weights; a graph so saved is loaded with the copies mapped. The runtime lays every tensor out once more
while it loads, compares checksums, and drops its copy for the saved one, tensor by tensor: a file of another version or
CPU costs heap but never gives wrong results, and both kinds of weights must stand on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from agent.backends.base import ArenaOptions, Array, BackendError, Session, SessionOptions, one_line
from targets.bundle import Residency

# kNextPowerOfTwo: the only strategy that honours the size of the first chunk. Requests split that chunk, so shapes
# that vary from one run to the next cannot make the arena grow, as they do when every request gets its own chunk.
_NEXT_POWER_OF_TWO = 0
_SMALLEST_CHUNK_BYTES = 64 << 10
# What holds for every bundle, whatever it says: the shared arena, and no thread that spins while it waits.
_SETTINGS = {"session.use_env_allocators": "1", "session.intra_op.allow_spinning": "0"}
# What a bundle may set: how its memory was planned, nothing that names files, loads libraries or opens sockets.
_FROM_BUNDLE = frozenset({*_SETTINGS, "session.use_device_allocator_for_initializers", "session.disable_prepacking"})
_NOT_LAID_OUT = {"session.disable_prepacking": "1"}
# Smaller tensors stay in the graph file, where they cost no page of their own.
_INLINE_BYTES = 1024
# The runtime raises everything it reports; its own copy on stderr would say it twice and in several lines.
_FATAL_ONLY = 4


def describe() -> str:
    return f"onnxruntime {ort.__version__}"


def prepare(arena: ArenaOptions) -> None:
    """Register the arena that all sessions share; a second registration would silently replace it."""
    ort.set_default_logger_severity(_FATAL_ONLY)
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    config = ort.OrtArenaCfg(
        {
            "max_mem": arena.cap_bytes,
            "arena_extend_strategy": _NEXT_POWER_OF_TWO,
            "initial_chunk_size_bytes": max(arena.planned_bytes, _SMALLEST_CHUNK_BYTES),
        }
    )
    ort.create_and_register_allocator(memory, config)


def load_session(path: Path, options: SessionOptions) -> Session:
    settings = _settings(options)
    if options.residency.needs_finalise:
        # It was optimized before it was saved, and is to stay the graph that its weights were laid out for.
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _Session(_open(path, settings))


def lay_out(source: Path, target: Path, options: SessionOptions) -> None:
    settings = _settings(options)
    settings.optimized_model_filepath = str(target)
    for key, value in (
        ("session.optimized_model_external_initializers_file_name", f"{target.name}.bin"),
        ("session.optimized_model_external_initializers_min_size_in_bytes", str(_INLINE_BYTES)),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        settings.add_session_config_entry(key, value)
    _open(source, settings)
    target.with_name(f"{target.name}.bin").touch()  # a graph without weights writes none


def _settings(options: SessionOptions) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.log_severity_level = _FATAL_ONLY
    settings.enable_mem_pattern = False
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    foreign = sorted(options.settings.keys() - _FROM_BUNDLE)
    if foreign:
        raise BackendError(
            f"the bundle sets {foreign[0]!r} of onnxruntime, which no bundle may", "do not use this bundle"
        )
    unpacked = _NOT_LAID_OUT if options.residency is Residency.UNPACKED else {}
    for key, value in {**_SETTINGS, **options.settings, **unpacked}.items():
        settings.add_session_config_entry(key, value)
    return settings


def _open(path: Path, settings: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - the runtime's exceptions share no base but Exception
        raise BackendError(f"onnxruntime cannot load {path.name}: {one_line(error)}") from None


class _Session:
    def __init__(self, session: ort.InferenceSession) -> None:
        self._session: ort.InferenceSession | None = session
        self._has_strings = any(v.type == "tensor(string)" for v in (*session.get_inputs(), *session.get_outputs()))

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        if self._session is None:
            raise BackendError("the session was closed")
        try:
            if self._has_strings:
                return list(self._session.run(list(outputs), dict(feeds)))
            return _run_bound(self._session, feeds, outputs)
        except Exception as error:  # noqa: BLE001 - see _open
            message = one_line(error)
        # Not raised above: as its context the runtime's own exception would keep the binding, and so the session.
        raise BackendError(f"onnxruntime: {message}")

    def close(self) -> None:
        self._session = None


def _run_bound(session: ort.InferenceSession, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
    """Feeds are read and outputs seen in place: `run` would copy every output once more, outside the plan."""
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    for name in outputs:
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    return [_seen(value) for value in binding.get_outputs()]


def _seen(value: ort.OrtValue) -> Array:
    """An output as numpy sees it; before onnxruntime 1.24 there was no way but to copy it."""
    return np.from_dlpack(value) if hasattr(value, "__dlpack__") else value.numpy()
