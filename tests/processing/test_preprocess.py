"""Folders of images as samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from processing.preprocess import image_samples
from targets.errors import ImageError, RecipeError
from targets.recipe import parse_recipe
from targets.tensor import Contract, DType, TensorSpec
from tests.support.images import BLUE, CLASSIFIER, RED, jpeg, plain, png

RECIPE = parse_recipe(CLASSIFIER, "test")
CONTRACT = Contract((TensorSpec("pixels", DType.FLOAT32, (1, 3, 4, 4), 192),), (), {})


def test_a_folder_gives_one_input_per_image_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.PNG").write_bytes(png(plain(9, 5, BLUE)))
    (tmp_path / "a.jpeg").write_bytes(jpeg(plain(5, 9, RED)))
    (tmp_path / "notes.txt").write_text("no image")
    samples = list(image_samples(tmp_path, RECIPE, CONTRACT))
    assert [list(sample) for sample in samples] == [["pixels"]] * 2
    assert [sample["pixels"].mean((0, 2, 3)).round(1).tolist() for sample in samples] == [[1, 0, 0], [0, 0, 1]]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds no images.*\.jpeg, \.jpg, \.png"):
        next(image_samples(tmp_path, RECIPE, CONTRACT))
    with pytest.raises(RecipeError, match="No such file"):
        next(image_samples(tmp_path / "none", RECIPE, CONTRACT))
    (tmp_path / "cut.jpg").write_bytes(jpeg(plain(5, 9))[:-20])
    with pytest.raises(ImageError, match=r"cut\.jpg: the JPEG ends too early"):
        next(image_samples(tmp_path, RECIPE, CONTRACT))
    (tmp_path / "cut.jpg").write_bytes(bytes((8 << 20) + 1))
    with pytest.raises(ImageError, match=r"cut\.jpg has more than 8\.0 MiB.*max_bytes"):
        next(image_samples(tmp_path, RECIPE, CONTRACT))
