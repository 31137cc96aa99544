"""onnxruntime on the CPU.

The session options are those measured to keep memory low: graphs are loaded by path so that weights are mapped, all
sessions share one arena that grows by what is asked for, and no thread spins while it waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime as ort

from agent.backends.base import Array, BackendError, Session, SessionOptions, one_line

# kSameAsRequested: a chunk is as large as the request, where the default doubles every time.
_SAME_AS_REQUESTED = 1
_INITIAL_CHUNK_BYTES = 64 << 10
# The runtime raises everything it reports; its own copy on stderr would say it twice and in several lines.
_FATAL_ONLY = 4


def describe() -> str:
    return f"onnxruntime {ort.__version__}"


def prepare() -> None:
    """Register the arena that all sessions share; a second registration would silently replace it."""
    ort.set_default_logger_severity(_FATAL_ONLY)
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    # max_mem 0 is "no cap": activations are bounded by the plan, which the gateway checked.
    arena = ort.OrtArenaCfg(
        {
            "max_mem": 0,
            "arena_extend_strategy": _SAME_AS_REQUESTED,
            "initial_chunk_size_bytes": _INITIAL_CHUNK_BYTES,
        }
    )
    ort.create_and_register_allocator(memory, arena)


def load_session(path: Path, options: SessionOptions) -> Session:
    settings = ort.SessionOptions()
    settings.log_severity_level = _FATAL_ONLY
    settings.enable_mem_pattern = False
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not options.prepack:
        settings.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return _Session(ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"]))
    except Exception as error:  # noqa: BLE001 - the runtime's exceptions share no base but Exception
        raise BackendError(f"onnxruntime cannot load {path.name}: {one_line(error)}") from None


class _Session:
    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        # `run` reads numpy feeds in place; through its Python face it is also faster than IOBinding (5 us against 10).
        try:
            values: list[Array] = self._session.run(list(outputs), dict(feeds))
        except Exception as error:  # noqa: BLE001 - see load_session
            raise BackendError(f"onnxruntime: {one_line(error)}") from None
        return values
