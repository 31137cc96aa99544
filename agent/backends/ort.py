"""onnxruntime on the CPU.

The session options are those that make memory what the plan says: graphs are loaded by path so that weights are
mapped, and all sessions share one arena whose first chunk is the whole plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from agent.backends.base import ArenaOptions, Array, BackendError, Session, SessionOptions, one_line

# kNextPowerOfTwo: the only strategy that honours the size of the first chunk. Requests split that chunk, so shapes
# that vary from one run to the next cannot make the arena grow, as they do when every request gets its own chunk.
_NEXT_POWER_OF_TWO = 0
_SMALLEST_CHUNK_BYTES = 64 << 10
# What holds for every bundle, whatever it says: the shared arena, and no thread that spins while it waits.
_SETTINGS = {"session.use_env_allocators": "1", "session.intra_op.allow_spinning": "0"}
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
    settings = ort.SessionOptions()
    settings.log_severity_level = _FATAL_ONLY
    settings.enable_mem_pattern = False
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    for key, value in {**_SETTINGS, **options.settings}.items():
        settings.add_session_config_entry(key, value)
    try:
        return _Session(ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"]))
    except Exception as error:  # noqa: BLE001 - the runtime's exceptions share no base but Exception
        raise BackendError(f"onnxruntime cannot load {path.name}: {one_line(error)}") from None


class _Session:
    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._has_strings = any(v.type == "tensor(string)" for v in (*session.get_inputs(), *session.get_outputs()))

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        try:
            if self._has_strings:
                return list(self._session.run(list(outputs), dict(feeds)))
            return self._run_bound(feeds, outputs)
        except Exception as error:  # noqa: BLE001 - see load_session
            raise BackendError(f"onnxruntime: {one_line(error)}") from None

    def _run_bound(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Feeds are read and outputs seen in place: `run` would copy every output once more, outside the plan."""
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for name in outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        return [_seen(value) for value in binding.get_outputs()]


def _seen(value: ort.OrtValue) -> Array:
    """An output as numpy sees it; before onnxruntime 1.24 there was no way but to copy it."""
    return np.from_dlpack(value) if hasattr(value, "__dlpack__") else value.numpy()
