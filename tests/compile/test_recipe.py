"""Compiling with a recipe: it is judged before any work, and the bundle and its plan carry it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile.options import Options
from compile.pipeline import compile_model
from targets.board import load_board
from targets.bundle import dumps, read_manifest, verify_files
from targets.errors import TightfitError
from targets.recipe import memory_bytes, parse_recipe
from tests.support.images import BLUE, CLASSIFIER, COLOURS, RED, jpeg, plain, png
from tests.support.models import model, node, save, value

BOARD = load_board("x86-64-dev")
ALPHABET = CLASSIFIER.replace('op = "classify"\nlabels = "labels.txt"', 'op = "ctc"\nmetadata = "character"')


def means(folder: Path, channels: int = 3, character: str = "") -> Path:
    """`y` [1,3]: the mean of each channel of `x` [1,3,8,8]."""
    nodes = [node("GlobalAveragePool", ["x"], ["m"]), node("Flatten", ["m"], ["y"])]
    made = model(nodes, [value("x", [1, channels, 8, 8])], [value("y", [1, channels])])
    if character:
        entry = made.metadata_props.add()
        entry.key, entry.value = "character", character
    return save(folder, made, "means.onnx")


def labels(folder: Path, text: str = COLOURS) -> Path:
    path = folder / "labels.txt"
    path.write_text(text)
    return path


def options(*assets: Path, recipe: str = CLASSIFIER) -> Options:
    return Options(recipe=parse_recipe(recipe, "test"), assets=assets)


def test_a_folder_of_images_calibrates_and_verifies(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "b.PNG").write_bytes(png(plain(9, 5, BLUE)))
    (folder / "a.jpeg").write_bytes(jpeg(plain(5, 9, RED)))
    (folder / "notes.txt").write_text("no image")
    wanted = dataclasses.replace(options(labels(tmp_path)), scheme="int8-static", calib=folder)
    manifest = compile_model(means(tmp_path), BOARD, tmp_path / "m.tfb", wanted)
    assert (manifest.verification.samples, manifest.verification.inputs) == (2, "images")
    (folder / "c.png").write_bytes(png(plain(9, 5, BLUE))[:-30])
    with pytest.raises(TightfitError, match=r"c\.png: the image ends too early"):
        compile_model(means(tmp_path), BOARD, tmp_path / "n.tfb", wanted)
    assert not (tmp_path / "n.tfb").exists()


def test_images_without_a_recipe_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(plain(9, 5, BLUE)))
    with pytest.raises(TightfitError, match=r"holds no samples.*--recipe"):
        compile_model(means(tmp_path), BOARD, tmp_path / "m.tfb", Options(calib=tmp_path / "a.png"))


def test_the_bundle_carries_the_recipe_and_its_plan_counts_it(tmp_path: Path) -> None:
    source, wanted = means(tmp_path), options(labels(tmp_path))
    recipe = wanted.recipe
    assert recipe is not None
    for name in ("a", "b"):
        compile_model(source, BOARD, tmp_path / f"{name}.tfb", wanted)
    manifest = read_manifest(tmp_path / "a.tfb")
    verify_files(tmp_path / "a.tfb", manifest)
    assert manifest.recipe == recipe
    assert manifest.assets == ("assets/labels.txt",)
    assert dumps(manifest) == dumps(read_manifest(tmp_path / "b.tfb"))
    run = manifest.plan.phase("run")
    images, bodies = run.term("recipe"), run.term("bodies")
    assert images is not None
    assert images.nbytes == memory_bytes(recipe, manifest.contract)
    assert bodies is not None
    assert bodies.nbytes == 2 * manifest.plan.slots * recipe.decode.max_bytes


def test_without_a_recipe_nothing_is_counted(tmp_path: Path) -> None:
    manifest = compile_model(means(tmp_path), BOARD, tmp_path / "m.tfb", Options())
    assert manifest.recipe is None
    assert manifest.plan.phase("run").term("recipe") is None


def test_an_alphabet_out_of_the_models_metadata(tmp_path: Path) -> None:
    manifest = compile_model(means(tmp_path, character="a\nb"), BOARD, tmp_path / "m.tfb", options(recipe=ALPHABET))
    assert manifest.assets == ("assets/metadata.json",)


@pytest.mark.parametrize(
    ("channels", "text", "character", "recipe", "message"),
    [
        (1, COLOURS, "", CLASSIFIER, r"makes no input for x float32\[1,1,8,8\]"),
        (3, "red\n", "", CLASSIFIER, "names 1 classes, the model has 3"),
        (3, None, "", CLASSIFIER, r"reads assets/labels\.txt.*--asset .*labels\.txt"),
        (3, COLOURS, "", CLASSIFIER.replace("labels =", 'output = "z"\nlabels ='), "reads output 'z'.*available: y"),
        (3, None, "a\nb\nc", ALPHABET, "names 4 classes, the model has 3"),
        (3, None, "", ALPHABET, "no key 'character'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, channels: int, text: str | None, character: str, recipe: str, message: str
) -> None:
    assets = () if text is None else (labels(tmp_path, text),)
    with pytest.raises(TightfitError, match=message):
        compile_model(means(tmp_path, channels, character), BOARD, tmp_path / "m.tfb", options(*assets, recipe=recipe))
    assert not list(tmp_path.glob("m.tfb*"))


def test_on_the_command_line(tmp_path: Path) -> None:
    source, asset, recipe, out = means(tmp_path), labels(tmp_path), tmp_path / "own.toml", tmp_path / "m.tfb"

    def run(name: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "compile", source, "--target", "x86-64-dev", "--asset", asset, "-o", out]
        return subprocess.run(
            [*map(str, command), "--recipe", str(name)], capture_output=True, text=True, check=False, env={**os.environ}
        )

    recipe.write_text(CLASSIFIER.replace("stretch", "strech"))
    for name, words in (("imagnet", "did you mean 'imagenet'?"), (recipe, "did you mean 'stretch'?")):
        done = run(name)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert not out.exists()
    recipe.write_text(CLASSIFIER)
    done = run(recipe)
    assert done.returncode == 0, done.stderr
    assert read_manifest(out).recipe == parse_recipe(CLASSIFIER, "own")
