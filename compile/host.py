"""The memory of the machine that compiles."""

from __future__ import annotations

import ctypes
import gc

_libc = ctypes.CDLL(None)


def give_back() -> None:
    """Return freed heap to the system.

    glibc keeps what was freed below the top of its heap: 220 MiB after shape inference of a large graph, hundreds
    after a session is dropped. Where the C library has no such call, nothing happens.
    """
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
