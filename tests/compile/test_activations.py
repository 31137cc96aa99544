"""Activations on disk: the arrays come back, the limit holds, and what is dropped is gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compile.activations import IN_MEMORY_BYTES, ActivationCache
from compile.errors import DataError
from tests.support.models import normal

LARGE = IN_MEMORY_BYTES // 4


def test_large_arrays_are_files_until_they_are_dropped(tmp_path: Path) -> None:
    cache = ActivationCache(tmp_path, 1 << 20)
    arrays = {name: normal(2, LARGE, seed=at) for at, name in enumerate(("a", "../b:0", "c\0"))}
    for name, array in arrays.items():
        cache.put("source", name, 0, array.T)
    assert len(list(tmp_path.iterdir())) == 3
    for name, array in arrays.items():
        found = cache.get("source", name, 0)
        assert isinstance(found, np.memmap)
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, array.T)
        cache.drop("source", name, 0)
        cache.drop("source", name, 0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError):
        cache.get("source", "a", 0)


def test_small_arrays_and_strings_stay_in_memory(tmp_path: Path) -> None:
    cache = ActivationCache(tmp_path, 0)
    strings = np.array(["a", "b" * 9] * LARGE, object)
    for array in (np.float32(3), np.zeros((0, 5)), normal(LARGE - 1), strings):
        given = np.array(array)
        cache.put("source", "x", 0, given)
        if given.dtype != object and given.size:
            given[...] = 7
        np.testing.assert_array_equal(cache.get("source", "x", 0), array)
        assert cache.get("source", "x", 0).dtype == array.dtype
    assert not list(tmp_path.iterdir())


def test_equal_names_of_other_models_and_samples_stand_apart(tmp_path: Path) -> None:
    cache = ActivationCache(tmp_path, 1 << 22)
    keys = [(model, sample) for model in ("source", "compiled") for sample in range(3)]
    for at, (model, sample) in enumerate(keys):
        cache.put(model, "x", sample, normal(LARGE, seed=at))
    for at, (model, sample) in enumerate(keys):
        np.testing.assert_array_equal(cache.get(model, "x", sample), normal(LARGE, seed=at))


def test_the_limit_counts_what_is_there_now(tmp_path: Path) -> None:
    cache = ActivationCache(tmp_path, 3 * IN_MEMORY_BYTES)
    for sample in range(3):
        cache.put("source", "x", sample, normal(LARGE))
    with pytest.raises(DataError, match=r"more than 192.0 KiB of disk .*--samples"):
        cache.put("source", "x", 3, normal(LARGE))
    assert len(list(tmp_path.iterdir())) == 3
    cache.drop("source", "x", 1)
    cache.put("source", "x", 3, normal(LARGE))
    # An array that is put again takes the place of the first.
    for _ in range(5):
        cache.put("source", "x", 3, normal(LARGE, seed=4))
    np.testing.assert_array_equal(cache.get("source", "x", 3), normal(LARGE, seed=4))
    assert len(list(tmp_path.iterdir())) == 3
