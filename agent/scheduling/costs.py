"""What a batch takes: a curve of seconds by rows, measured at load and corrected by every run.

Theory of operation. What is known at load is a few runs on a machine that has just started: a guess. What is seen later
replaces it, size by size, by the median of the last runs, which one slow run does not move. Sizes in between are
interpolated; sizes that were only guessed are scaled by how much faster or slower than the guess those seen have been.
How runs scatter about their median is kept over all sizes together, since that is the machine's more than the model's:
its top is what to promise by, its bottom what nobody can rule out.

A model may take inputs of several shapes, which cost differently: `key` tells them apart, each with sizes of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Sequence
from itertools import islice
from operator import itemgetter

WINDOW = 15
"""Runs of one size that its median is of: a change is believed after eight."""
SCATTER = 128
"""Runs that the scatter is of."""
HIGH = 0.95
"""The quantile of the scatter to plan by. A higher one is that of the one or two stalls there were lately: planned for
with every run they cost more answers than they do when they come."""
KEYS = 32
"""Shapes and sizes that are kept apart, each; what was seen longest ago is forgotten."""
SIZES = 32
ENOUGH = 3
"""Runs of a size after which what is seen counts, and not the guess."""
SPARE = 0.9
"""Part of the best run seen that another one may still take."""
STALE = 512
"""Runs of others after which a size is measured again when there is occasion to: machines change."""
TRY = 16
"""The same for a size that was hardly seen."""


Points = Sequence[tuple[int, float]]
"""(rows, seconds), ascending by rows."""


class _Size:
    """The last runs of one key and number of rows, of which `guess` was said before."""

    __slots__ = ("guess", "number", "runs", "typical")

    def __init__(self, guess: float) -> None:
        self.guess = guess
        self.runs: deque[float] = deque(maxlen=WINDOW)
        self.typical = 0.0
        self.number = 0


class _Curve:
    """What was seen of one key, over the guess."""

    __slots__ = ("_points", "_rows", "drift", "guess", "runs", "sizes")

    def __init__(self, guess: Points, drift: float) -> None:
        self.guess = guess
        self.drift = drift
        self.sizes: OrderedDict[int, _Size] = OrderedDict()
        self.runs = 0
        self._points: Points | None = None
        self._rows: Sequence[int] | None = None

    def add(self, rows: int, took_s: float, number: int) -> float:
        """One more run, the so-manieth of all; gives what runs of its size take now."""
        size = self.sizes.get(rows)
        if size is None:
            size = self.sizes[rows] = _Size(_at(self.guess, rows))
            if len(self.sizes) > SIZES:
                self.sizes.popitem(last=False)
        else:
            self.sizes.move_to_end(rows)
        size.runs.append(took_s)
        size.typical, size.number = _median(size.runs), number
        self.runs += 1
        if size.guess > 0:
            self.drift = size.typical / size.guess
        self._points = None
        if len(size.runs) <= ENOUGH:
            # Only a new size, or one that is believed from now on, changes which are known.
            self._rows = None
        return size.typical

    def seen(self, rows: int) -> float | None:
        """What a run of this very size takes, where enough were seen to know."""
        size = self.sizes.get(rows)
        return size.typical if size is not None and len(size.runs) >= ENOUGH else None

    @property
    def rows(self) -> Sequence[int]:
        """The sizes of which anything is known, ascending."""
        if self._rows is None:
            self._rows = [rows for rows, _ in self.points]
        return self._rows

    @property
    def points(self) -> Points:
        """The guess as far as nothing was seen, scaled by what was."""
        if self._points is None:
            # One run of a size may be the one that stalled, so it waits for more before it counts among others.
            believed = {rows: size.typical for rows, size in self.sizes.items() if len(size.runs) >= ENOUGH}
            points = {rows: seconds * self.drift for rows, seconds in self.guess} | believed
            latest = ((rows, size.typical) for rows, size in reversed(self.sizes.items()))
            self._points = sorted(points.items()) or [*islice(latest, 1)]
        return self._points


class Costs:
    """Seconds of a run by its rows. `measured` are (rows, seconds) at load, in any order; without any, all is free.

    The key None stands for any: what is known of all shapes together.
    """

    def __init__(self, measured: Points = ()) -> None:
        self._guess = sorted(dict(measured).items())
        self._any = _Curve(self._guess, 1.0)
        self._curves: OrderedDict[Hashable, _Curve] = OrderedDict()
        self._scatter: deque[float] = deque((1.0,))
        self._scattered = [1.0]
        self._low = self._high = 1.0
        self._runs = 0
        # What `likely` said of other sizes since the last run.
        self._said: dict[tuple[Hashable, int], float] = {}

    def observe(self, key: Hashable, rows: int, took_s: float) -> None:
        """A run of so many rows took so long."""
        self._runs += 1
        self._said.clear()
        self._any.add(rows, took_s, self._runs)
        if key not in self._curves:
            self._curves[key] = _Curve(self._guess, self._any.drift)
        self._curves.move_to_end(key)
        if len(self._curves) > KEYS:
            self._curves.popitem(last=False)
        typical = self._curves[key].add(rows, took_s, self._runs)
        ratio, ordered = took_s / typical if typical > 0 else 1.0, self._scattered
        self._scatter.append(ratio)
        insort(ordered, ratio)
        if len(ordered) > SCATTER:
            del ordered[bisect_left(ordered, self._scatter.popleft())]
        self._low, self._high = ordered[0], ordered[int(HIGH * (len(ordered) - 1))]

    def likely(self, key: Hashable, rows: int) -> float:
        """What it takes: as often less as more."""
        # Most sizes that anyone asks for were seen, and need no curve.
        said = self._curve(key).seen(rows)
        if said is None:
            said = self._said.get((key, rows))
        if said is None:
            if len(self._said) >= KEYS * SIZES:
                self._said.clear()
            said = self._said[key, rows] = _at(self._curve(key).points, rows)
        return said

    @property
    def margin(self) -> float:
        """So many times what is likely a run takes at most, but for one in twenty."""
        return self._high

    def surely(self, key: Hashable, rows: int) -> float:
        """What it takes at most, but for one run in twenty."""
        return self.likely(key, rows) * self._high

    def least(self, key: Hashable, rows: int) -> float:
        """What it takes at least, as far as anyone can tell: 0 where little was seen."""
        return self.likely(key, rows) * self._low * SPARE if self.known(key) else 0.0

    def known(self, key: Hashable) -> bool:
        """Whether enough was seen to refuse by."""
        curve = self._any if key is None else self._curves.get(key)
        return curve is not None and curve.runs >= ENOUGH

    def fresh(self, key: Hashable, rows: int) -> bool:
        """Whether this very size was seen enough, and lately."""
        size = self._curve(key).sizes.get(rows)
        return size is not None and len(size.runs) >= ENOUGH and self._runs - size.number < STALE

    def curious(self, key: Hashable, rows: int) -> bool:
        """Whether it is time to see what twice as many rows take: not before what these take is beyond doubt."""
        sizes = self._curve(key).sizes
        size, twice = sizes.get(rows), sizes.get(2 * rows)
        if size is None or len(size.runs) <= WINDOW // 2:
            return False
        seen = twice is not None and len(twice.runs) >= ENOUGH
        return self._runs - (twice.number if twice else 0) >= (STALE if seen else TRY)

    def sizes(self, key: Hashable) -> Sequence[int]:
        """The numbers of rows of which anything is known, ascending."""
        return self._curve(key).rows

    def _curve(self, key: Hashable) -> _Curve:
        return self._curves.get(key, self._any)


def _median(values: Collection[float]) -> float:
    """As that of `statistics`, which takes longer to see what it was given."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _at(points: Points, rows: int) -> float:
    """Linear between points and, above, as between the last two; in proportion where there is no second."""
    if not points:
        return 0.0
    above = bisect_left(points, rows, key=itemgetter(0))
    if above < len(points) and points[above][0] == rows:
        return points[above][1]
    if above == 0:
        return points[0][1] * rows / points[0][0]
    if len(points) == 1:
        return points[0][1] * rows / points[0][0]
    low, high = points[min(above, len(points) - 1) - 1], points[min(above, len(points) - 1)]
    slope = (high[1] - low[1]) / (high[0] - low[0])
    if above == len(points):
        return high[1] + max(slope, 0.0) * (rows - high[0])
    return low[1] + slope * (rows - low[0])
