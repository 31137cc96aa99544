"""From an encoded image to a model's input: one model, one recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from processing.images import Frame, Placed, decode, place, write
from targets.errors import ImageError
from targets.recipe import Recipe, check_input
from targets.tensor import Contract, human

SUFFIXES = (".jpeg", ".jpg", ".png")
"""Of image files, in lower case."""


class Preprocessor:
    """Pre-processing for one model. Holds no image; its methods may be called from any thread.

    Raises RecipeError when recipe and model do not go together. Of the contract only the inputs are looked at.
    """

    def __init__(self, recipe: Recipe, contract: Contract) -> None:
        check_input(recipe, contract)
        self._recipe = recipe
        self._height, self._width = recipe.size(contract)
        self._dtype = np.dtype(contract.inputs[0].dtype.numpy)

    def place(self, data: bytes) -> Placed:
        """Decode a JPEG or PNG and bring it to size; raises ImageError."""
        return place(decode(data, self._recipe.decode), self._recipe, self._height, self._width)

    def shape(self, placed: Placed) -> tuple[int, int, int, int]:
        """Shape of the input that the placed image makes."""
        return self._recipe.shape(placed.height, placed.width)

    def write(self, placed: Placed, buffer: NDArray[np.uint8]) -> int:
        """Write the input tensor into the first bytes of `buffer`; returns how many."""
        shape = self.shape(placed)
        nbytes = math.prod(shape) * self._dtype.itemsize
        write(placed, self._recipe, buffer[:nbytes].view(self._dtype).reshape(shape))
        return nbytes

    def tensor(self, data: bytes) -> tuple[NDArray[Any], Frame]:
        """The input of an encoded image, and where the image stands in it; raises ImageError."""
        placed = self.place(data)
        out = np.empty(self.shape(placed), self._dtype)
        write(placed, self._recipe, out)
        return out, placed.frame

    def read(self, path: Path) -> NDArray[Any]:
        """The input of an image file, as the agent would make it; raises ImageError that names the file."""
        limit = self._recipe.decode.max_bytes
        try:
            with path.open("rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise ImageError(f"cannot read {path}: {error.strerror}") from None
        if len(data) > limit:
            raise ImageError(f"{path} has more than {human(limit)}", "raise max_bytes under [decode] of the recipe")
        try:
            return self.tensor(data)[0]
        except ImageError as error:
            raise ImageError(f"{path}: {error.message}", error.hint) from None
