"""Recipes as text, and beside a model."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from targets.errors import RecipeError
from targets.recipe import (
    METADATA,
    Recipe,
    answer_contract,
    asset_of,
    check_input,
    check_outputs,
    load_recipe,
    parse_recipe,
    read_labels,
    recipe_names,
)
from targets.tensor import Contract, DimRange, DType, TensorSpec

HEAD = "schema = 1\n"
RESIZE = '[resize]\nmode = "stretch"\n'
POST = '[post]\nop = "classify"\n'
GOOD = HEAD + RESIZE + POST


def spec(name: str, *shape: int | str, dtype: DType = DType.FLOAT32) -> TensorSpec:
    return TensorSpec(name, dtype, shape, 0)


def contract(*shape: int | str, outputs: tuple[TensorSpec, ...] = (), dtype: DType = DType.FLOAT32) -> Contract:
    return Contract((spec("x", *shape, dtype=dtype),), outputs, {"n": DimRange(1, 1, 8), "w": DimRange(32, 64, 128)})


IMAGE = contract("n", 3, 32, "w", outputs=(spec("y", "n", 4),))


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_that_come_with_tightfit_survive_the_manifest(name: str) -> None:
    recipe = load_recipe(name)
    assert msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = ", "not valid TOML"),
        (HEAD, "missing required field `resize`"),
        ("schema = 2\n" + RESIZE + POST, "schema 2 is not known; available: 1"),
        ('color = "rgb"\n' + GOOD, "unknown field `color`.*did you mean 'colour'?"),
        (HEAD + 'colour = "rbg"\n' + RESIZE + POST, r"'rbg' - at `\$.colour` \(did you mean 'rgb'?"),
        (HEAD + RESIZE.replace("stretch", "strech") + POST, r"'strech'.*did you mean 'stretch'\?"),
        (HEAD + RESIZE + "fill = 1.0\n" + POST, r"unknown field `fill` - at `\$.resize`.*available: interpolation"),
        (HEAD + "[resize]\n" + POST, "missing required field `mode`.*available: centre-crop, height"),
        (GOOD + "topk = 3\n", "unknown field `topk`.*did you mean 'top_k'?"),
        (GOOD + "top_k = 0\n", "Expected `int` >= 1"),
        (GOOD + "threshold = nan\n", "nan is not a number"),
        (HEAD + "resize = 3\n" + POST, "Expected `object`, got `int`"),
        (GOOD + "[normalise]\nstd = [0.0]\n", "scale and std must be above zero"),
        (GOOD + "[normalise]\nmean = [1.0, 2.0]\n", "normalise.mean must have 1 or 3 values for colour 'rgb'"),
        (GOOD + "[decode]\nmax_pixel = 3\n", "unknown field `max_pixel`.*did you mean 'max_pixels'?"),
        (HEAD + RESIZE + '[post]\nop = "ctc"\n', "either alphabet .* or metadata"),
        (HEAD + RESIZE + '[post]\nop = "nanodet"\nstrides=[8]\nscores=["a"]\ndistances=[]\n', "for every stride"),
    ],
)
def test_what_is_wrong_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        parse_recipe(text, "mine")
    assert "\n" not in str(caught.value)
    assert "mine" in str(caught.value) or "nan" in text


def test_by_name_and_by_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"unknown recipe 'ppocr'.*did you mean 'ppocr-.*or a .toml file"):
        load_recipe("ppocr")
    with pytest.raises(RecipeError, match=r"cannot read recipe .*none.toml: No such file"):
        load_recipe(str(tmp_path / "none.toml"))
    path = tmp_path / "own.toml"
    path.write_text(GOOD)
    assert load_recipe(str(path)) == parse_recipe(GOOD, "own")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match=r"cannot read recipe .*own.toml"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Contract((spec("a", 1), spec("b", 1)), (), {}), "one input, this one has a, b"),
        (contract(1, 3), "4 dimensions"),
        (contract(1, 3, 8, 8, dtype=DType.INT64), "types that an image can have: float32, float16, uint8"),
        (contract(1, 8, 8, 3), "size 3 on axis 1.*look at layout and colour"),
        (contract(1, 1, 8, 8), "size 3 on axis 1"),
        (contract(2, 3, 8, 8), "size 1 on axis 0"),
    ],
)
def test_models_that_take_no_such_image(model: Contract, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_input(parse_recipe(GOOD, "t"), model)


def test_a_model_that_does() -> None:
    recipe = parse_recipe(GOOD, "t")
    check_input(recipe, IMAGE)
    check_outputs(recipe, IMAGE)
    tall = parse_recipe(GOOD.replace("stretch", "height"), "t")
    with pytest.raises(RecipeError, match="needs one height"):
        check_input(tall, contract(1, 3, "w", 32))


def test_outputs_are_looked_for() -> None:
    with pytest.raises(RecipeError, match=r"reads output 'z'.*available: y"):
        check_outputs(parse_recipe(GOOD + 'output = "z"\n', "t"), IMAGE)
    two = contract(1, 3, 8, 8, outputs=(spec("y", 1, 4), spec("z", 1, 4)))
    with pytest.raises(RecipeError, match=r"does not say which output it reads.*y, z"):
        check_outputs(parse_recipe(GOOD, "t"), two)
    with pytest.raises(RecipeError, match="float32"):
        check_outputs(parse_recipe(GOOD, "t"), contract(1, 3, 8, 8, outputs=(spec("y", 1, 4, dtype=DType.INT64),)))


def test_grids_of_a_detector() -> None:
    post = '[post]\nop = "nanodet"\nstrides = [8, 32]\nscores = ["s8", "s32"]\ndistances = ["d8", "d32"]\n'
    recipe = parse_recipe(HEAD + RESIZE + post, "t")

    def model(cells: int, bins: int) -> Contract:
        outputs = (spec("s8", 1, 130, 5), spec("d8", 1, 130, 44), spec("s32", 1, cells, 5), spec("d32", 1, cells, bins))
        return contract(1, 3, 80, 100, outputs=outputs)

    check_outputs(recipe, model(12, 44))
    with pytest.raises(RecipeError, match=r"s32 .*is no grid of stride 32.*\[1,12,"):
        check_outputs(recipe, model(6, 44))
    with pytest.raises(RecipeError, match=r"d32 .*no four distances"):
        check_outputs(recipe, model(12, 45))
    with pytest.raises(RecipeError, match="one size"):
        check_outputs(recipe, msgspec.structs.replace(model(12, 44), inputs=(spec("x", 1, 3, 80, "w"),)))


def test_labels_are_as_many_as_classes() -> None:
    recipe = parse_recipe(GOOD + 'labels = "l.txt"\n', "t")
    assert asset_of(recipe) == "assets/l.txt"
    assert read_labels(recipe, IMAGE, lambda _: b"a\r\nb\nc\n\xe2\x80\xa8d\n") == ("a", "b", "c", "\u2028d")
    with pytest.raises(RecipeError, match=r"assets/l\.txt names 3 classes, the model has 4"):
        read_labels(recipe, IMAGE, lambda _: b"a\nb\nc")
    with pytest.raises(RecipeError, match="UTF-8"):
        read_labels(recipe, IMAGE, lambda _: b"\xff")
    assert read_labels(parse_recipe(GOOD, "t"), IMAGE, lambda _: pytest.fail("nothing is to be read")) == ()


def test_an_alphabet_out_of_the_models_metadata() -> None:
    text = HEAD + RESIZE + '[post]\nop = "ctc"\nmetadata = "character"\nappend_space = true\n'
    recipe = parse_recipe(text, "t")
    assert asset_of(recipe) == METADATA
    assert read_labels(recipe, IMAGE, lambda _: json.dumps({"character": "a\nb\n"}).encode()) == ("", "a", "b", " ")
    last = parse_recipe(text + "blank = 9\n", "t")
    assert read_labels(last, IMAGE, lambda _: json.dumps({"character": "a\nb"}).encode())[-1] == ""
    with pytest.raises(RecipeError, match="no key 'character'"):
        read_labels(recipe, IMAGE, lambda _: b"{}")
    for broken in (b"[]", b"{", b'{"character": 3}'):
        with pytest.raises(RecipeError, match="cannot be read"):
            read_labels(recipe, IMAGE, lambda _, data=broken: data)


def test_what_a_client_sees() -> None:
    seen = answer_contract(parse_recipe(GOOD + "[decode]\nmax_bytes = 1000\n", "t"))
    assert [(s.name, s.dtype.oip) for s in (*seen.inputs, *seen.outputs)] == [
        ("image", "BYTES"),
        ("label", "BYTES"),
        ("score", "FP32"),
    ]
    assert seen.inputs[0].max_nbytes == 1004
