"""The bench of stream framings measures the records that it says."""

from __future__ import annotations

import pytest

from bench.framing import main


def test_every_record_is_read_and_answered(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seconds", "0.01"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [int(row[1]) for row in rows[:3]] == [1009, 422, 432]
    assert all(0 < float(figure) < 1e6 for row in rows for figure in row[2:4])
