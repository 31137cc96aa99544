"""The storage that the agent writes to: what is free, and how worn it is, from statvfs and sysfs.

Sources: JEDEC JESD84-B51, EXT_CSD (life_time in tenths for the two types of memory, pre_eol_info), as Linux shows them
(`Documentation/driver-api/mmc/mmc-dev-attrs.rst`); `Documentation/block/stat.rst` (sectors of 512 bytes). An SD card
and most NVMe drives say nothing of their life in sysfs: then only what was written to them since the boot is known.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
_SECTOR_BYTES = 512
# Of EXT_CSD: 0x0b is "more than all of it"; 0 is "not defined".
_LIVES = range(1, 12)
_PRE_EOL = {1: "normal", 2: "warning", 3: "urgent"}


class Storage(NamedTuple):
    """Where a folder is stored. `used_life` is the worst of what the device says, in per cent and in steps of ten, and
    `end_of_life` is normal, warning or urgent; None and empty where it says nothing. `written_bytes` is since boot."""

    free_bytes: int
    total_bytes: int
    device: str = ""
    written_bytes: int | None = None
    used_life: int | None = None
    end_of_life: str = ""


def read_storage(folder: Path, root: Path = ROOT) -> Storage:
    """Of the file system that holds the folder. Raises OSError where the folder cannot be asked."""
    room = os.statvfs(folder)
    number = folder.stat().st_dev
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    device = _device(root, os.major(number), os.minor(number))
    if device is None:
        return Storage(free, total)
    life, end = _life(device)
    return Storage(free, total, device.name, _written(device), life, end)


def _device(root: Path, major: int, minor: int) -> Path | None:
    """The whole device in sysfs, also of a partition; None of what is none (overlay, tmpfs)."""
    found = root / f"sys/dev/block/{major}:{minor}"
    if not found.exists():
        return None
    found = found.resolve()
    return found.parent if (found / "partition").exists() else found


def _written(device: Path) -> int | None:
    try:
        return int((device / "stat").read_text(encoding="ascii").split()[6]) * _SECTOR_BYTES
    except (OSError, ValueError, IndexError):
        return None


def _life(device: Path) -> tuple[int | None, str]:
    """(per cent used, how near the end): of an eMMC, `0x02 0x01` and `0x01`."""
    try:
        lives = [int(word, 16) for word in (device / "device/life_time").read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        lives = []
    try:
        end = int((device / "device/pre_eol_info").read_text(encoding="ascii"), 16)
    except (OSError, ValueError):
        end = 0
    used = max((life for life in lives if life in _LIVES), default=None)
    return None if used is None else used * 10, _PRE_EOL.get(end, "")
