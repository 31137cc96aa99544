"""Recipes: how an image becomes a model's input, and how its outputs become an answer. Strict TOML; no code.

A recipe does not repeat what the bundle's contract says: sizes and element type of the input are the model's own.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from targets.errors import ContractError, RecipeError, did_you_mean
from targets.tensor import Contract, DimRange, DType, TensorSpec, human, nbytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_RECIPE_BYTES = 1 << 20
"""A recipe is a page of text."""
MAX_LABELS_BYTES = 16 << 20
METADATA = "assets/metadata.json"
"""Where the compiler puts the model's own metadata (of PP-OCR: its alphabet, under `character`)."""
IMAGE = "image"
"""Name of the BYTES input that takes an encoded image."""
ENCODED = "encoded"
"""Layout of that input: a file's bytes, which are no text."""

Unit = Annotated[float, Meta(ge=0, le=1)]
Interpolation = Literal["linear", "area", "cubic", "nearest"]
Activation = Literal["none", "softmax", "sigmoid"]


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an encoded image (JPEG or PNG) may be; larger ones are refused by their header, before they are decoded.

    `max_pixels` is width times height, by default a 4K frame. `orientation`: "exif" turns the image upright as its
    EXIF tag says, "stored" leaves it as it is stored; what follows, boxes included, speaks of the result.
    """

    max_pixels: Annotated[int, Meta(ge=1, le=1 << 28)] = 4096 * 2160
    max_bytes: Annotated[int, Meta(ge=64, le=1 << 28)] = 8 << 20
    orientation: Literal["exif", "stored"] = "exif"


class Stretch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mode", tag="stretch"):
    """To the model's size, whatever that does to proportions."""

    interpolation: Interpolation = "linear"


class Letterbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mode", tag="letterbox"):
    """As large as fits in proportion, in the middle; the rest has pixel value `fill` (before it is normalised)."""

    fill: Annotated[float, Meta(ge=0, le=255)] = 0.0
    interpolation: Interpolation = "area"


class KeepHeight(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mode", tag="height"):
    """To the model's height, in proportion, for a model whose width is a range (a line of text).

    What is wider than the range is squeezed; narrower is filled up on the right with pixel value `fill`.
    """

    fill: Annotated[float, Meta(ge=0, le=255)] = 0.0
    interpolation: Interpolation = "linear"


class CentreCrop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mode", tag="centre-crop"):
    """The middle of the image, in proportion: the largest window of the model's shape, times `share`.

    ImageNet's "resize to 256, crop 224" is 0.875 = 224 / 256.
    """

    share: Annotated[float, Meta(gt=0, le=1)] = 0.875
    interpolation: Interpolation = "linear"


class Normalise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """(pixel x `scale` - `mean`) / `std`. One value for all channels, or one for each in the order of the tensor."""

    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.scale <= 0 or any(value <= 0 for value in self.std):
            raise ValueError("scale and std must be above zero")


class Classify(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="classify"):
    """The best classes: outputs `label` and `score`, at most `top_k`, best first, none below `threshold`.

    `activation` is what the graph does not do itself. With "sigmoid" and a threshold an image can have several
    classes. `labels` is an asset with one class a line; without, a label is the class's number.
    """

    output: str = ""
    labels: str = ""
    activation: Activation = "none"
    top_k: Annotated[int, Meta(ge=1, le=1000)] = 1
    threshold: Unit = 0.0


class Ctc(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="ctc"):
    """Greedy CTC over [1, steps, classes]: outputs `text` and `score` (mean over the characters that were kept).

    The alphabet is an asset with one character a line, or a `metadata` key of the model. The blank is class `blank`,
    the others follow the alphabet; `append_space`: the last class is a space that the alphabet leaves out.
    """

    output: str = ""
    alphabet: str = ""
    metadata: str = ""
    blank: Annotated[int, Meta(ge=0)] = 0
    append_space: bool = False
    activation: Literal["none", "softmax"] = "none"

    def __post_init__(self) -> None:
        if bool(self.alphabet) == bool(self.metadata):
            raise ValueError("ctc needs either alphabet (an asset) or metadata (a key of the model's own)")


class NanoDet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", tag="nanodet"):
    """Boxes of an anchor-free detector: outputs `boxes` (x0, y0, x1, y1 in pixels of the image), `label`, `score`.

    For every stride an output of class scores [1, N, classes] and one of distances [1, N, 4 (bins)], N cells of a
    grid, row by row. A distance is the expected value of the softmax over its bins, in strides, from the cell's
    centre. Source: Generalized Focal Loss (arXiv:2006.04388) and NanoDet. Of boxes of one class that overlap by more
    than `iou` (intersection over union) the best is kept.
    """

    scores: tuple[str, ...]
    distances: tuple[str, ...]
    strides: tuple[Annotated[int, Meta(ge=1, le=1024)], ...]
    labels: str = ""
    activation: Literal["none", "sigmoid"] = "none"
    threshold: Unit = 0.4
    iou: Unit = 0.6
    max_boxes: Annotated[int, Meta(ge=1, le=1000)] = 100

    def __post_init__(self) -> None:
        if not self.strides or not len(self.scores) == len(self.distances) == len(self.strides):
            raise ValueError("nanodet needs one output of scores and one of distances for every stride")


Post = Classify | Ctc | NanoDet
Resize = Stretch | Letterbox | KeepHeight | CentreCrop


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From image to input, and from outputs to answer. `colour` and `layout` are the input tensor's."""

    schema: int
    resize: Resize
    post: Post
    colour: Literal["rgb", "bgr", "gray"] = "rgb"
    layout: Literal["nchw", "nhwc"] = "nchw"
    decode: Decode = Decode()
    normalise: Normalise = Normalise()

    def __post_init__(self) -> None:
        if self.schema != 1:
            raise ValueError(f"schema {self.schema} is not known; available: 1")
        for name in ("mean", "std"):
            if len(getattr(self.normalise, name)) not in (1, self.channels):
                raise ValueError(f"normalise.{name} must have 1 or {self.channels} values for colour {self.colour!r}")

    @property
    def channels(self) -> int:
        return 1 if self.colour == "gray" else 3

    def size(self, contract: Contract) -> tuple[DimRange, DimRange]:
        """(height, width) that the model takes."""
        shape = contract.inputs[0].shape
        ranges = [contract.dims[dim] if isinstance(dim, str) else DimRange(dim, dim, dim) for dim in shape]
        return (ranges[2], ranges[3]) if self.layout == "nchw" else (ranges[1], ranges[2])

    def shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Shape of an input of that size."""
        return (1, self.channels, height, width) if self.layout == "nchw" else (1, height, width, self.channels)


# --- reading


def recipe_names() -> list[str]:
    """Names of the recipes that come with Tightfit."""
    folder = resources.files("targets") / "recipes"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name_or_path: str) -> Recipe:
    """The recipe of that name, or of that `.toml` file; raises RecipeError."""
    if name_or_path.endswith(".toml"):
        try:
            with Path(name_or_path).open("rb") as file:
                data = file.read(MAX_RECIPE_BYTES + 1)
            if len(data) > MAX_RECIPE_BYTES:
                raise RecipeError(f"recipe {name_or_path} is larger than {human(MAX_RECIPE_BYTES)}")
            return parse_recipe(data.decode("utf-8"), Path(name_or_path).stem)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RecipeError(f"cannot read recipe {name_or_path}: {reason}") from None
    names = recipe_names()
    if name_or_path not in names:
        raise RecipeError(f"unknown recipe {name_or_path!r}", f"{did_you_mean(name_or_path, names)}, or a .toml file")
    return parse_recipe(
        (resources.files("targets") / "recipes" / f"{name_or_path}.toml").read_text(encoding="utf-8"), name_or_path
    )


def parse_recipe(text: str, name: str) -> Recipe:
    """Read one recipe; raises RecipeError naming the key and what was expected."""
    try:
        fields = tomllib.loads(text, parse_float=_finite)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {name!r} is not valid TOML: {error}", _EXAMPLES) from None
    try:
        return msgspec.convert(fields, Recipe)
    except msgspec.ValidationError as error:
        raise RecipeError(f"recipe {name!r}: {error}", _hint(str(error), fields)) from None


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise RecipeError(f"{text} is not a number that a recipe can have", _EXAMPLES)
    return float(text)


_EXAMPLES = "see targets/recipes for examples"
_MODES: dict[str, Any] = {"stretch": Stretch, "letterbox": Letterbox, "height": KeepHeight, "centre-crop": CentreCrop}
_OPS: dict[str, Any] = {"classify": Classify, "ctc": Ctc, "nanodet": NanoDet}
_KEYS: dict[str, Any] = {
    "colour": ("rgb", "bgr", "gray"),
    "layout": ("nchw", "nhwc"),
    "orientation": ("exif", "stored"),
    "interpolation": ("linear", "area", "cubic", "nearest"),
    "activation": ("none", "softmax", "sigmoid"),
    "mode": _MODES,
    "op": _OPS,
}


def _hint(message: str, fields: dict[str, Any]) -> str:
    """What is available where the message says something is not."""
    chosen = {key: value for key, value in fields.items() if isinstance(value, dict)}
    if unknown := re.search(r"unknown field `([^`]*)`(?: - at `\$\.?(\w*)`)?", message):
        table = chosen.get(unknown[2] or "", {})
        kinds = {"decode": Decode, "normalise": Normalise, **_MODES, **_OPS}
        struct = kinds.get(table.get("mode") or table.get("op") or unknown[2], Recipe)
        return did_you_mean(unknown[1], struct.__struct_fields__)
    if value := re.search(r"Invalid (?:enum )?value '(.*?)' - at `\$(?:.*\.)?(\w+)`", message):
        return did_you_mean(value[1], _KEYS.get(value[2], ()))
    if missing := re.search(r"missing required field `(mode|op)`", message):
        return did_you_mean("", _KEYS[missing[1]])
    return _EXAMPLES


# --- judging it beside a model

_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.UINT8)


def check_input(recipe: Recipe, contract: Contract) -> None:
    """Whether the recipe's image is what the model takes; raises RecipeError. Outputs are not looked at."""
    if len(contract.inputs) != 1:
        names = ", ".join(spec.name for spec in contract.inputs)
        raise RecipeError(f"a recipe is for a model with one input, this one has {names or 'none'}")
    spec = contract.inputs[0]
    wrong = f"the recipe makes no input for {spec.describe()}"
    if len(spec.shape) != 4:
        raise RecipeError(wrong, f"an image is {recipe.layout} with 4 dimensions")
    if spec.dtype not in _DTYPES:
        raise RecipeError(wrong, f"types that an image can have: {', '.join(d.value for d in _DTYPES)}")
    height, width = recipe.size(contract)
    given = {spec.name: (spec.dtype, recipe.shape(height.opt, width.opt))}
    try:
        contract.check_inputs(given)
    except ContractError as error:
        raise RecipeError(f"{wrong}: {error.message}", "look at layout and colour, and at --shape") from None
    if height.min != height.max and isinstance(recipe.resize, KeepHeight):
        raise RecipeError("resize mode 'height' needs one height", f"the model takes {height}; fix it with --shape")


def check_outputs(recipe: Recipe, contract: Contract) -> None:
    """Whether the outputs that the recipe reads are there, and can be what it takes them for; raises RecipeError."""
    specs = {spec.name: spec for spec in contract.outputs}
    for name in output_names(recipe.post, contract):
        if name not in specs:
            raise RecipeError(f"the recipe reads output {name!r}", did_you_mean(name, specs))
        if specs[name].dtype is not DType.FLOAT32 or not specs[name].shape:
            raise RecipeError(f"output {specs[name].describe()} cannot be read", "a recipe reads float32 tensors")
    if isinstance(recipe.post, NanoDet):
        _check_grids(recipe.post, contract, *recipe.size(contract))


def _check_grids(post: NanoDet, contract: Contract, height: DimRange, width: DimRange) -> None:
    """One cell for every `stride` x `stride` pixels, and four distances in each."""
    if height.min != height.max or width.min != width.max:
        raise RecipeError("nanodet needs a model of one size", "fix height and width with --shape")
    specs = {spec.name: spec for spec in contract.outputs}
    for stride, scores, distances in zip(post.strides, post.scores, post.distances, strict=True):
        cells = math.prod(grid(stride, height.max, width.max))
        for spec in (specs[scores], specs[distances]):
            if len(spec.shape) != 3 or spec.shape[1] not in (cells, *_names(spec)):
                raise RecipeError(f"output {spec.describe()} is no grid of stride {stride}", f"needed: [1,{cells},...]")
        bins = specs[distances].shape[2]
        if isinstance(bins, int) and bins % 4:
            raise RecipeError(f"output {specs[distances].describe()} holds no four distances")


def _names(spec: TensorSpec) -> list[str]:
    return [dim for dim in spec.shape if isinstance(dim, str)]


def grid(stride: int, height: int, width: int) -> tuple[int, int]:
    """(rows, columns) of cells."""
    return -(-height // stride), -(-width // stride)


def output_names(post: Post, contract: Contract) -> tuple[str, ...]:
    """Model outputs that the answer is made of, in the recipe's order."""
    if isinstance(post, NanoDet):
        return (*post.scores, *post.distances)
    if post.output:
        return (post.output,)
    names = [spec.name for spec in contract.outputs]
    if len(names) != 1:
        raise RecipeError("the recipe does not say which output it reads", f"output = one of {', '.join(names)}")
    return (names[0],)


def asset_of(recipe: Recipe) -> str:
    """Path in the bundle of the file with labels or alphabet; empty when there is none."""
    post = recipe.post
    if isinstance(post, Ctc):
        return METADATA if post.metadata else f"assets/{post.alphabet}"
    return f"assets/{post.labels}" if post.labels else ""


def read_labels(recipe: Recipe, contract: Contract, read: Callable[[str], bytes]) -> tuple[str, ...]:
    """Class number -> name (the blank is ""), out of the bundle's file that `read` gives; empty when it has none.

    Raises RecipeError when their number is not the number of the model's classes.
    """
    post, path = recipe.post, asset_of(recipe)
    if not path:
        return ()
    data = read(path)
    if len(data) > MAX_LABELS_BYTES:
        raise RecipeError(f"{path} has {human(len(data))}, at most {human(MAX_LABELS_BYTES)} are read")
    try:
        text = data.decode("utf-8")
        if isinstance(post, Ctc) and post.metadata:
            text = msgspec.convert(json.loads(text), dict[str, str])[post.metadata]
    except KeyError:
        raise RecipeError(f"the model's metadata has no key {post.metadata!r}") from None  # type: ignore[union-attr]
    except ValueError as error:
        raise RecipeError(f"{path} cannot be read: {error}", "it must be UTF-8 text, one label a line") from None
    # Only line feeds separate: splitlines() would also break at characters that are letters of an alphabet.
    names = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if isinstance(post, Ctc):
        names += [" "] * post.append_space
        names.insert(post.blank, "")
    classes = next(spec for spec in contract.outputs if spec.name == output_names(post, contract)[0]).shape[-1]
    if isinstance(classes, int) and classes != len(names):
        raise RecipeError(f"{path} names {len(names)} classes, the model has {classes}", "give the model's own list")
    return tuple(names)


def answer_contract(recipe: Recipe) -> Contract:
    """What a client sees who sends an image: one BYTES input, and the answer's tensors."""
    image = TensorSpec(IMAGE, DType.STRING, (1,), recipe.decode.max_bytes + 4, ENCODED)
    if isinstance(recipe.post, Ctc):
        return Contract((image,), (_text("text", 1), _score(1)), {})
    if isinstance(recipe.post, Classify):
        return Contract((image,), (_text("label", "n"), _score("n")), {})
    most = recipe.post.max_boxes
    boxes = TensorSpec("boxes", DType.FLOAT32, ("n", 4), nbytes(DType.FLOAT32, (most, 4)))
    return Contract((image,), (boxes, _text("label", "n"), _score("n")), {})


def _text(name: str, count: int | str) -> TensorSpec:
    return TensorSpec(name, DType.STRING, (count,), MAX_LABELS_BYTES)


def _score(count: int | str) -> TensorSpec:
    return TensorSpec("score", DType.FLOAT32, (count,), 0)


PIXEL_BYTES = 10
"""Most that decoding takes for a pixel. Measured with OpenCV 5.0 on 4096 x 2160: 6.2 for baseline JPEG and PNG of 8 and
16 bits, 9.2 for progressive JPEG without subsampling (its coefficients, and the result)."""
LIBRARY_BYTES = 24 << 20
"""OpenCV in the gateway. Measured: 4 MiB anonymous and 11 MiB mapped of its library, before the first image."""


def memory_bytes(recipe: Recipe, contract: Contract) -> int:
    """Memory that the gateway takes for images beside bodies and slots: one is worked on at a time, and is there as
    it is decoded and as it is resized."""
    return LIBRARY_BYTES + recipe.decode.max_pixels * PIXEL_BYTES + 2 * contract.inputs[0].max_nbytes
