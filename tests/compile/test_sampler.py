"""What the kernel saw between two samples."""

from __future__ import annotations

from compile.processes import Status
from compile.sampler import _Phase


def test_processes_that_follow_each_other_do_not_add_up() -> None:
    """A gateway, whose peak was 5 above what was seen, and three engines after another, 7, 30 and 2 above."""
    phase = _Phase()
    for pid, above in ((2, 7), (3, 30), (4, 2)):
        phase.keep_peaks({1: Status(0, 0, 100, 105), pid: Status(0, 0, 50, 50 + above)})
    assert phase.peak().unseen == 5 + 30
    phase.keep_peaks({1: Status(0, 0, 100, 105), 3: Status(0, 0, 50, 80), 4: Status(0, 0, 50, 52)})
    assert phase.peak().unseen == 5 + 30 + 2
