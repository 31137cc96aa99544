"""File systems that are too small, for tests of what happens then."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of `nbytes` at `folder`, while the block runs; the test is skipped where none can be mounted."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root's rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
