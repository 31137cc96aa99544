"""A bundle's recipe at work in the gateway: encoded images into slots, outputs into answers.

OpenCV is loaded when a bundle has a recipe, and never before. All work on images is done by one thread: the event loop
stays free, and whatever the number of slots one decoded image is in memory, as the plan has it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agent.engine.channel import Slab
from agent.errors import AgentError, Reason, RefusedError
from agent.models import Model, labels_of
from agent.request import Result
from targets.recipe import Classify, Recipe, answer_contract

if TYPE_CHECKING:
    from processing.answers import Answer, Postprocessor
    from processing.images import Frame
    from processing.preprocess import Preprocessor


@dataclass(frozen=True, slots=True)
class Filled:
    """An image as it stands in a slot: shape and bytes of the input, and where the image is in it."""

    shape: tuple[int, ...]
    nbytes: int
    frame: Frame


class Images:
    """`contract` is what a client sees who sends an image; `outputs` are indices into the model's, as they are read;
    `labels` are the names of an output's classes, by its own."""

    def __init__(
        self, recipe: Recipe, model: Model, before: Preprocessor, after: Postprocessor, labels: tuple[str, ...]
    ) -> None:
        names = [spec.name for spec in model.contract.outputs]
        self.contract = answer_contract(recipe)
        self.max_bytes = recipe.decode.max_bytes
        self.labels = dict.fromkeys(after.outputs, labels) if isinstance(recipe.post, Classify) else {}
        self.outputs = tuple(names.index(name) for name in after.outputs)
        self.thread = ThreadPoolExecutor(1, "image")
        self._recipe, self._before, self._after = recipe, before, after

    def describe(self, name: str) -> dict[str, Any]:
        """What the metadata of the model, served by that name, says of images: parameters of the protocol."""
        return {
            "image_path": f"/v2/models/{name}/image",
            "image_input": self.contract.inputs[0].name,
            "image_formats": "jpeg,png",
            "image_max_bytes": self.max_bytes,
            "image_max_pixels": self._recipe.decode.max_pixels,
            "image_outputs": ",".join(spec.name for spec in self.contract.outputs),
        }

    def fill(self, data: bytes, slab: Slab, slot: int) -> Filled:
        """Decode an image and write the input that it makes into the slot. Raises ImageError."""
        placed = self._before.place(data)
        nbytes = self._before.write(placed, slab.input(slot, 0))
        return Filled(self._before.shape(placed), nbytes, placed.frame)

    def answer(self, result: Result, slab: Slab, slot: int, filled: Filled) -> Answer:
        """The answer out of the outputs that stand in the slot; it holds no view of them."""
        values = {
            name: _floats(slab.output(slot, output.index)[: output.nbytes]).reshape(output.shape)
            for name, output in zip(self._after.outputs, result.outputs, strict=True)
        }
        answer = self._after.answer(values, filled.frame)
        if not all(np.isfinite(array).all() for array in answer.values() if array.dtype.kind == "f"):
            raise RefusedError(Reason.ENGINE_ERROR, "the model answered with NaN or infinity")
        return answer


def no_images(kind: str, name: str) -> RefusedError:
    """That a model, which is of that kind, has no recipe."""
    return RefusedError(
        Reason.UNSUPPORTED_ENCODING,
        f"{kind} {name!r} takes tensors, no images",
        "compile it with --recipe, or send tensors as JSON or raw bytes",
    )


def _floats(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return data.view(np.dtype("<f4"))


def load_images(model: Model) -> Images | None:
    """What applies the bundle's recipe; None when it has none. Raises AgentError when OpenCV is not installed."""
    recipe = model.manifest.recipe
    if recipe is None:
        return None
    try:
        from processing.answers import Postprocessor  # noqa: PLC0415 - only a bundle with a recipe needs OpenCV
        from processing.preprocess import Preprocessor  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise AgentError(
            f"{model.name} takes images, and {error.name} is not installed", "pip install 'tightfit[agent,cpu,image]'"
        ) from None
    labels = labels_of(model.folder, model.manifest)
    after = Postprocessor(recipe, model.contract, labels)
    return Images(recipe, model, Preprocessor(recipe, model.contract), after, labels)
