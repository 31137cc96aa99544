"""Seconds and bytes of a pass, from counters."""

from __future__ import annotations

import subprocess
import sys

import pytest

from compile.speed import Counters, Speed, read_bytes_of, speed


def test_bytes_are_those_of_a_mean_pass_and_a_slow_first_round_does_not_show() -> None:
    counted = [
        Counters(3, 1.0, 100, 50),
        Counters(5, 21.0, 300, 250),
        Counters(7, 22.0, 500, 450),
        Counters(9, 23.2, 700, 500),
    ]
    assert speed(counted, [12.0, 20.0, 0.6, 1.0, 0.7, 1.1]) == Speed(6, 6, 0.6, 1.05, 100, 75)


def test_one_pass_can_serve_several_requests() -> None:
    counted = [Counters(1, 1.0, 100, 100), Counters(2, 1.5, 200, 180), Counters(4, 2.3, 400, 400)]
    assert speed(counted, [0.6] * 8) == Speed(8, 3, 0.45, 0.6, 100, 100)


def test_where_the_kernel_does_not_count_there_is_no_figure() -> None:
    assert speed([Counters(0, 0.0, 0, None), Counters(2, 1.0, 0, None)], [0.5, 0.5]).disk_bytes is None


def test_the_kernels_count_of_a_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert read_bytes_of(process.pid) is None


@pytest.mark.parametrize("text", ["rchar: 1\nread_bytes: 4096\nwrite_bytes: 1\n", "rchar: 1\n"])
def test_only_what_came_from_a_disk_counts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: text)
    assert read_bytes_of(1) == (4096 if "read_bytes" in text else None)
