"""The next token, by the scores of all. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sampling:
    """How it is chosen. `temperature` 0: the most likely one, always; else by chance, the flatter the higher.

    `top_k`: among so many of the most likely (0: all). `top_p`: among the fewest of the most likely that have so much
    of the probability together (Holtzman et al., 2020). `seed`: equal seeds choose equally; None: nobody knows.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


class Sampler:
    """Chooses the tokens of one text."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def pick(self, scores: NDArray[Any]) -> int:
        """A position in `scores` (floats, one a token, -infinity for what cannot be). Of equal ones the first counts as
        more likely. Raises ValueError when they are NaN or infinity."""
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):
            raise ValueError("the scores of tokens are NaN or infinity")
        how = self._sampling
        if how.temperature == 0 or how.top_k == 1 or how.top_p == 0:
            return best
        with np.errstate(over="ignore"):
            # Next to no temperature, all but the most likely are infinitely unlikely.
            chances = np.exp((scores.astype(np.float64) - float(scores[best])) / how.temperature)
        if not how.top_k and how.top_p >= 1:
            return self._at(chances)
        kept = np.flatnonzero(chances >= _least(chances, how))
        kept = kept[np.argsort(-chances[kept], kind="stable")][: how.top_k or None]
        ranked = chances[kept]
        if how.top_p < 1:
            whole = ranked.sum() if how.top_k else chances.sum()
            ranked = ranked[: int(np.searchsorted(np.cumsum(ranked), how.top_p * whole)) + 1]
        return int(kept[self._at(ranked)])

    def logprob(self, scores: NDArray[Any], token: int) -> float:
        """How likely the model has it that this token is next: the natural logarithm of its probability."""
        apart = scores.astype(np.float64) - float(scores.max())
        return float(apart[token] - np.log(np.exp(apart).sum()))

    def _at(self, chances: NDArray[np.float64]) -> int:
        upto = np.cumsum(chances)
        # Below the last even where the product is rounded up.
        return min(int(np.searchsorted(upto, self._random.random() * upto[-1], "right")), len(chances) - 1)


def _least(chances: NDArray[np.float64], how: Sampling) -> float:
    """Whoever has less is not among those to choose from, and need not be sorted: a vocabulary has a hundred thousand
    tokens, of which most are next to impossible."""
    if how.top_k:
        at = max(len(chances) - how.top_k, 0)
        return float(np.partition(chances, at)[at])
    # All that are below this share have less together than is left out; half of it, for the sake of rounding.
    return float((1 - how.top_p) * chances.sum() / len(chances) / 2)
