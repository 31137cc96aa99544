"""A disk that is really full, and one that is not any more."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.spools import LIMITS, POLICIES, balanced, opened, waiting

KB = b"x" * 1000


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 300 KB."""
    folder = Path(tempfile.mkdtemp(prefix="disk"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("this user may not mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


def test_measures_go_first_then_what_comes_is_refused_and_it_goes_on(small_disk: Path) -> None:
    limits = dataclasses.replace(LIMITS, notes_bytes=16 << 10)
    folder = small_disk / "spool"
    policies = {kind: dataclasses.replace(policy, max_bytes=1 << 20) for kind, policy in POLICIES.items()}
    spool = opened(folder, limits=limits, policies=policies)
    for _ in range(100):
        spool.append("m", "m", KB, 0.0)
        spool.sync(0.0)
    kept, lost = [], set[int]()
    for number in range(300):
        position = spool.append("e" if number % 2 else "a", "ae"[number % 2], b"%d " % number + KB, 0.0)
        spool.sync(0.0)
        lost.update(spool.lost())
        if position is not None and position not in lost:
            kept.append(number)
    by_kind = spool.figures.by_kind
    assert by_kind["m"].queued == 0
    assert by_kind["m"].dropped["disk"] > 0
    assert lost
    assert len(kept) > 150
    assert {int(each[3].split()[0]) for each in waiting(spool)} == set(kept)
    assert balanced(spool)
    # Room again, and it goes on; what was refused meanwhile is told.
    gone = [*spool.replay(100, 0.0), *spool.live(100, 0.0)]
    for entry in gone:
        spool.delivered(entry.position, 0.0)
    spool.sync(0.0)
    position = spool.append("e", "e", b"1000 after", 0.0)
    assert position is not None
    assert spool.sync(0.0) >= position
    assert not spool.lost()
    spool.close(0.0)
    spool = opened(folder, "s2", limits=limits, policies=policies)
    left = {int(each[3].split()[0]) for each in waiting(spool)}
    assert left >= {*kept, 1000} - {int(entry.body.split()[0]) for entry in gone if entry.stream in {"a", "e"}}
    assert balanced(spool)
    spool.close(0.0)


def test_a_full_disk_when_it_is_opened_loses_nothing(small_disk: Path) -> None:
    folder = small_disk / "spool"
    spool = opened(folder)
    for number in range(20):
        spool.append("e", "t", b"%d" % number, 0.0)
    spool.sync(0.0)
    entry = spool.live(1, 0.0)[0]
    spool.delivered(entry.position, 0.0)
    spool.sync(0.0)
    spool.abandon()
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(1 << 20))
    spool = opened(folder, "s2")
    assert [each[2] for each in waiting(spool)] == [*range(1, 20)]
    position = spool.append("a", "t", b"alarm", 0.0)
    spool.sync(0.0)
    assert spool.lost() == [position]
    filler.unlink()
    assert spool.append("a", "t", b"alarm", 0.0) is not None
    spool.sync(0.0)
    assert not spool.lost()
    spool.abandon()
    spool = opened(folder, "s3")
    assert [each[:3] for each in waiting(spool)] == [*(("s1", "t", number) for number in range(1, 20)), ("s2", "t", 1)]
    assert balanced(spool)
    spool.close(0.0)


LIMITED = """
import resource, sys
from pathlib import Path
from tests.support.spools import balanced, opened, waiting
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
spool = opened(Path(sys.argv[1]))
for number in range(12):
    spool.append("e", "t", b"x" * 1000, 0.0)
    spool.sync(0.0)
lost = spool.lost()
assert len(waiting(spool)) + len(lost) == 12 and lost and waiting(spool)
assert balanced(spool)
"""


def test_a_limit_of_the_process_is_as_a_full_disk(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], env=environment, check=True)
    spool = opened(tmp_path, "s2")
    assert waiting(spool)
    assert balanced(spool)
    assert spool.gaps
    shutil.rmtree(tmp_path)
