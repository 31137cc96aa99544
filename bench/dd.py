"""The storage's floor: dd reads or writes once, cold and to the disk."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

_BLOCK_BYTES = 8 << 20


def drop_caches() -> None:
    """Start from a cold page cache where this process may say so."""
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("the page cache stays warm: no right to drop it", file=sys.stderr)


def read_seconds(path: Path) -> float:
    """To read a file once, cold."""
    drop_caches()
    return _timed(["dd", f"if={path}", "of=/dev/null", "bs=8M", "status=none"])


def write_seconds(folder: Path, nbytes: int) -> float:
    """To write as many bytes and have them on disk."""
    target = folder / "floor.bin"
    try:
        count = f"count={-(-nbytes // _BLOCK_BYTES)}"
        return _timed(["dd", "if=/dev/zero", f"of={target}", "bs=8M", count, "conv=fsync", "status=none"])
    finally:
        target.unlink(missing_ok=True)


def _timed(command: list[str]) -> float:
    started = time.monotonic()
    subprocess.run(command, check=True)
    return time.monotonic() - started
