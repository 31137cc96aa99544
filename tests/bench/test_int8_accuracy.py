"""Intervals are paired and right, records are counted as the tasks say, and what is missing is said in one line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bench.int8_accuracy import figure, main, resampled
from bench.int8_tasks import FRAME, RATE, mean, stretch, word_pieces


def test_an_interval_is_that_of_the_mean() -> None:
    values = np.random.default_rng(3).normal(5, 2, 400)
    middle, low, high = figure(resampled({"mean": mean}, list(values))["mean"])
    assert middle == pytest.approx(values.mean())
    # 1.96 standard errors to either side.
    assert (middle - low, high - middle) == pytest.approx([1.96 * values.std() / 20] * 2, rel=0.1)


def test_differences_are_paired() -> None:
    records = list(np.random.default_rng(4).normal(size=50))
    ours, theirs = (resampled({"mean": mean}, [value + shift for value in records])["mean"] for shift in (0.5, 0.25))
    assert figure(ours - theirs) == pytest.approx((0.25, 0.25, 0.25))


def test_words_are_cut_into_the_longest_known_pieces() -> None:
    codes = {"[UNK]": 0, "web": 1, "##kit": 2, "##ki": 3, "a": 4, "-": 5}
    assert list(word_pieces("a webkit-xyz", codes)) == [4, 1, 2, 5, 0]


def test_a_frame_is_speech_where_the_sound_is_loud() -> None:
    sound = np.zeros(2 * RATE, np.float32)
    sound[RATE : RATE + RATE // 2] = 0.5
    frames, speech = stretch(sound, 0.001, np.random.default_rng(0))
    heard = np.abs(frames).mean(axis=1) > 0.1
    assert speech[heard].all()
    # The window of 0.3 s reaches 0.15 s beyond either end.
    assert 0 < speech.sum() - heard.sum() <= 2 * 0.15 * RATE / FRAME + 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing"], "unknown task 'nothing' \\(available: ppocr-v6-rec, nanodet, .*\\)"),
        (["nanodet"], r"nanodet needs a file that was not given \(--nanodet FILE\)"),
        (["minilm", "--sections", "absent.jsonl"], "--sections: there is no file absent.jsonl"),
    ],
)
def test_what_is_missing_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert re.fullmatch(f"bench.int8_accuracy: error: {line}\n", capsys.readouterr().err)
