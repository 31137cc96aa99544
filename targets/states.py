"""State that a model carries from one run to the next: a cache of keys and values, the hidden state of a recurrence.

Theory of operation. A pair is an output and the input that takes it in the next run. In a slot each has a place, both
as large as the larger, and from one run to the next the two swap roles: what one run wrote is read where it stands.

    turn 0   reads the input's place, writes the output's
    turn 1   reads the output's place, writes the input's

State begins with zeros; one that grows with every run begins with a length of 0 along the axis that grows.
"""

from __future__ import annotations

import msgspec


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `output` gives is `input` of the next run.

    `axis`: along which it grows, from 0; None: it keeps its shape.
    """

    input: str
    output: str
    axis: int | None = None


class Sum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dimension `dim` is always as large as `of` together: a mask covers the past and what is new.

    Each of them is the name of a dimension, or a size.
    """

    dim: str
    of: tuple[int | str, ...]
