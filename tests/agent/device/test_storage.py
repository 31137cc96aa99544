"""How worn and how full storage is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.device.storage import read_storage

STAT = "1 0 8 5 100 0 4096 50 0 60 60\n"


def emmc(root: Path, folder: Path, *, life: str = "0x02 0x01\n", end: str = "0x01\n", partition: bool = True) -> None:
    """A tree in which the device that the folder is really on is an eMMC, or its first partition."""
    number = folder.stat().st_dev
    device = root / "sys/devices/mmc0/block/mmcblk0"
    (device / "device").mkdir(parents=True)
    (device / "stat").write_text(STAT, encoding="ascii")
    (device / "device/life_time").write_text(life, encoding="ascii")
    (device / "device/pre_eol_info").write_text(end, encoding="ascii")
    part = device / "mmcblk0p1"
    part.mkdir()
    (part / "partition").write_text("1\n", encoding="ascii")
    (root / "sys/dev/block").mkdir(parents=True)
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.symlink_to(part if partition else device)


@pytest.mark.parametrize("partition", [True, False])
def test_an_emmc(tmp_path: Path, partition: bool) -> None:
    emmc(tmp_path / "root", tmp_path, partition=partition)
    found = read_storage(tmp_path, tmp_path / "root")
    assert (found.device, found.written_bytes, found.used_life, found.end_of_life) == (
        "mmcblk0", 4096 * 512, 20, "normal",
    )  # fmt: skip
    room = os.statvfs(tmp_path)
    assert found.total_bytes == room.f_blocks * room.f_frsize
    assert 0 < found.free_bytes <= found.total_bytes


@pytest.mark.parametrize(
    ("life", "end", "used", "said"),
    [("0x0b 0x0a\n", "0x03\n", 110, "urgent"), ("0x00 0x00\n", "0x00\n", None, ""), ("junk\n", "junk\n", None, "")],
)
def test_what_it_says_of_its_life(tmp_path: Path, life: str, end: str, used: int | None, said: str) -> None:
    emmc(tmp_path / "root", tmp_path, life=life, end=end)
    found = read_storage(tmp_path, tmp_path / "root")
    assert (found.used_life, found.end_of_life) == (used, said)


def test_what_is_no_device(tmp_path: Path) -> None:
    found = read_storage(tmp_path, tmp_path / "root")
    assert (found.device, found.written_bytes, found.used_life) == ("", None, None)
    assert found.total_bytes > 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        read_storage(tmp_path / "none")
