"""What can be wrong with a board, a bundle or a tensor, said so that a person can act on it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TightfitError(Exception):
    """One clear line: what was wrong and where; `hint` says what is available and what to do.

    Every error that a person can cause derives from this class. The command lines print it and exit with 2,
    the agent answers it with a status and a JSON body; a traceback therefore always means a fault of ours.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = _one_line(message)
        self.hint = _one_line(hint)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def _one_line(text: str) -> str:
    """Names come from files that anybody may have made: what a terminal would obey is shown as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


class BoardError(TightfitError):
    """A board is unknown, or its description is not valid."""


class BundleError(TightfitError):
    """A bundle is incomplete, changed, unsafe or of another schema."""


class ContractError(TightfitError):
    """Tensors do not match what the bundle promises to take."""


class RecipeError(TightfitError):
    """A recipe is not valid, or does not go with the model."""


class ImageError(TightfitError):
    """An encoded image is damaged, too large, or of another kind."""


class BudgetError(TightfitError):
    """Something does not fit the memory of the board."""


def did_you_mean(word: str, available: Iterable[str]) -> str:
    """A hint that lists what is available, the closest match first."""
    names = sorted(available)
    close = difflib.get_close_matches(word, names, n=1)
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return (f"did you mean {close[0]!r}? " if close else "") + f"available: {listed or 'none'}"
