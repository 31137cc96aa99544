"""Image files as a model's input."""

from __future__ import annotations

from pathlib import Path

import pytest

from processing.preprocess import Preprocessor
from targets.errors import ImageError
from targets.recipe import parse_recipe
from targets.tensor import Contract, DType, TensorSpec
from tests.support.images import CLASSIFIER, RED, jpeg, plain

RECIPE = parse_recipe(CLASSIFIER, "test")
CONTRACT = Contract((TensorSpec("pixels", DType.FLOAT32, (1, 3, 4, 4), 192),), (), {})


def test_a_file_becomes_the_input(tmp_path: Path) -> None:
    (tmp_path / "a.jpeg").write_bytes(jpeg(plain(5, 9, RED)))
    tensor = Preprocessor(RECIPE, CONTRACT).read(tmp_path / "a.jpeg")
    assert tensor.shape == (1, 3, 4, 4)
    assert tensor.mean((0, 2, 3)).round(1).tolist() == [1, 0, 0]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    preprocessor = Preprocessor(RECIPE, CONTRACT)
    with pytest.raises(ImageError, match=r"none\.jpg: No such file"):
        preprocessor.read(tmp_path / "none.jpg")
    (tmp_path / "cut.jpg").write_bytes(jpeg(plain(5, 9))[:-20])
    with pytest.raises(ImageError, match=r"cut\.jpg: the JPEG ends too early"):
        preprocessor.read(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes(bytes((8 << 20) + 1))
    with pytest.raises(ImageError, match=r"cut\.jpg has more than 8\.0 MiB.*max_bytes"):
        preprocessor.read(tmp_path / "cut.jpg")
