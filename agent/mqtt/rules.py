"""Which results of a model are published: all, those that differ, or those beyond a threshold; and how many a second.

Pure: time is an argument. What is not published is counted, and the next one that is says so.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.limits.rates import Rates

_Rate = Annotated[float, Meta(ge=0, le=1e6)]


class When(str, enum.Enum):
    """Which results are worth a message."""

    ALL = "all"
    CHANGE = "change"
    THRESHOLD = "threshold"


class Figure(str, enum.Enum):
    """The number that an output comes down to, where a rule is about one."""

    MAX = "max"
    MIN = "min"
    MEAN = "mean"
    FIRST = "first"
    ARGMAX = "argmax"


class ResultOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of `model` that are published; the model needs results_mib under [[models]], from where they are taken.

    `when` "all" is every one. "change": where the answer is not the one before; with `by` where the `figure` of
    `output` (the first one, where it is not named) differs by more than that from the last that was published.
    "threshold": where the figure is `above` or `below`, and the first that is not any more, by `hysteresis`.
    At most `most_per_s` (0: any number) after `burst` at once. Tensors of more than `inline_bytes` together are not in
    the message: what they are is, their SHA-256, and where to get them. `outputs` are those that are told of (all).
    """

    model: str
    when: When = When.ALL
    output: str = ""
    figure: Figure = Figure.MAX
    by: float | None = None
    above: float | None = None
    below: float | None = None
    hysteresis: Annotated[float, Meta(ge=0)] = 0.0
    most_per_s: _Rate = 10.0
    burst: Annotated[int, Meta(ge=1, le=100_000)] = 10
    inline_bytes: Annotated[int, Meta(ge=0, le=1 << 20)] = 4096
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("results to be published need a model")
        if self.when is When.THRESHOLD and self.above is None and self.below is None:
            raise ValueError(f'results of {self.model!r}: when = "threshold" needs above or below')
        if self.when is not When.THRESHOLD and (self.above is not None or self.below is not None):
            raise ValueError(f'results of {self.model!r}: above and below are for when = "threshold"')
        if self.by is not None and (self.when is not When.CHANGE or self.by < 0):
            raise ValueError(f'results of {self.model!r}: by, of 0 or more, is for when = "change"')

    @property
    def needs_figure(self) -> bool:
        """Whether the output is looked into."""
        return self.when is When.THRESHOLD or self.by is not None


class Withheld(msgspec.Struct):
    """Results that were not published since the last that was: by the rule, by the rate, and those that came faster
    than they were read."""

    rule: int = 0
    rate: int = 0
    missed: int = 0

    @property
    def count(self) -> int:
        return self.rule + self.rate + self.missed


class Rule:
    """Judges the results of one model, in order."""

    def __init__(self, options: ResultOptions) -> None:
        self.options = options
        self._rates = Rates(options.most_per_s, options.burst, 0)
        self._digest: bytes | None = None
        self._figure: float | None = None
        self._beyond = False
        self._withheld = Withheld()

    def takes(self, figure: float | None, digest: bytes, now: float) -> Withheld | None:
        """What was withheld before it, if it is to be published; None: it is withheld itself. `figure` is that of its
        output where the rule needs one (None: it has none), `digest` tells its outputs from others."""
        if not self._wants(figure, digest):
            self._withheld.rule += 1
            return None
        if self._rates.wait_s(self.options.model, now):
            self._withheld.rate += 1
            return None
        self._digest, self._figure = digest, figure
        if self.options.when is When.THRESHOLD:
            self._beyond = self._is_beyond(figure)
        withheld, self._withheld = self._withheld, Withheld()
        return withheld

    def missed(self, count: int) -> None:
        """So many came and went before they were read."""
        self._withheld.missed += count

    def _wants(self, figure: float | None, digest: bytes) -> bool:
        options = self.options
        if options.when is When.ALL:
            return True
        if options.when is When.THRESHOLD:
            # The first one that is back is told, so that a reader knows that it is over.
            return self._beyond or self._is_beyond(figure)
        if options.by is None:
            return digest != self._digest
        if figure is None or self._figure is None:
            return (figure is None) != (self._figure is None) or self._digest is None
        return abs(figure - self._figure) > options.by

    def _is_beyond(self, figure: float | None) -> bool:
        options, slack = self.options, self.options.hysteresis if self._beyond else 0.0
        if figure is None:
            return False
        above = options.above is not None and figure > options.above - slack
        return above or (options.below is not None and figure < options.below + slack)
