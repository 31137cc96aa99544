"""The compiled model against its source: what is emitted has been loaded, run and compared before it is called done."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from compile.activations import ActivationCache
from compile.backends.base import Model
from compile.calibrate.samples import Sample
from compile.errors import VerificationError
from compile.host import give_back
from targets.bundle import OutputError, SegmentError

# Without quantization only the order of float32 sums may differ.
FLOAT_LIMIT = 1e-4
# A source that computes in FP16 rounds every result to 11 bits (2^-11 each); the compiled model, in FP32, does not.
HALF_LIMIT = 1e-2
# Elements that are compared together, in 8 bytes each: outputs may be large.
_PIECE = 1 << 20


@dataclasses.dataclass
class Comparison:
    """Online error figures of one output: nothing of a sample is kept."""

    output: str
    max_abs: float = 0.0
    square_error: float = 0.0
    square_reference: float = 0.0
    square_compiled: float = 0.0
    product: float = 0.0
    rows: int = 0
    rows_equal: int = 0

    def add(self, reference: npt.NDArray[Any], compiled: npt.NDArray[Any]) -> None:
        """Take in one pair; raises VerificationError when shape, type or finiteness differ."""
        if reference.shape != compiled.shape or reference.dtype != compiled.dtype:
            raise VerificationError(
                f"output {self.output!r} is {compiled.dtype}{list(compiled.shape)} after compiling, "
                f"{reference.dtype}{list(reference.shape)} before"
            )
        if reference.dtype.kind not in "fiub":
            different = int((reference != compiled).sum())
            reference, compiled = np.zeros(1), np.array([float(different > 0)])
        for start in range(0, reference.size, _PIECE):
            self._add_piece(*(array.reshape(-1)[start : start + _PIECE] for array in (reference, compiled)))
        if reference.ndim and reference.shape[-1] > 1 and reference.size:
            self.rows += reference[..., 0].size
            self.rows_equal += int((reference.argmax(-1) == compiled.argmax(-1)).sum())

    def _add_piece(self, reference: npt.NDArray[Any], compiled: npt.NDArray[Any]) -> None:
        a, b = reference.astype(np.float64), compiled.astype(np.float64)
        same_special = ~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))
        if not (np.isfinite(b) | same_special).all():
            raise VerificationError(f"output {self.output!r} has NaN or infinity that the source model has not")
        a, b = np.where(np.isfinite(a), a, 0), np.where(np.isfinite(a), b, 0)
        self.max_abs = max(self.max_abs, float(np.abs(a - b).max(initial=0)))
        self.square_error += float(((a - b) ** 2).sum())
        self.square_reference += float((a * a).sum())
        self.square_compiled += float((b * b).sum())
        self.product += float((a * b).sum())

    def result(self) -> OutputError:
        """Max abs, relative L2, cosine, and the share of equal argmax along the last axis."""
        relative = math.sqrt(self.square_error / self.square_reference) if self.square_reference else self.max_abs
        norms = math.sqrt(self.square_reference * self.square_compiled)
        cosine = self.product / norms if norms else float(self.square_error == 0)
        agreement = self.rows_equal / self.rows if self.rows else None
        return OutputError(self.output, _six(self.max_abs), _six(relative), _six(cosine), _round(agreement))


def _six(value: float) -> float:
    """Six significant digits: what is left differs between machines and says nothing."""
    return float(f"{value:.6g}")


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


@dataclasses.dataclass(frozen=True)
class Link:
    """One piece of a model that runs as a chain: what it takes and gives, and how it is loaded when its turn comes."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    load: Callable[[], Model]


def verify(
    source: Sequence[Link],
    compiled: Sequence[Link],
    samples: Sequence[Sample],
    results: Sequence[str],
    cache: ActivationCache,
    limit: float | None,
) -> tuple[tuple[OutputError, ...], tuple[SegmentError, ...]]:
    """Run every sample through both models, link by link; one link is in memory at a time.

    The source may be cut finer than the compiled model, as long as it makes every value that crosses between compiled
    segments. Returns the end-to-end error of every output in `results`, and for each segment its own error (run on
    what the source model makes in front of it) beside the accumulated one (run on what the compiled segments make).
    Raises VerificationError when an output's relative L2 exceeds `limit`.
    """
    for index, sample in enumerate(samples):
        for name, array in sample.items():
            cache.put(_SOURCE, name, index, np.asarray(array))
            cache.put(_COMPILED, name, index, np.asarray(array))
    _run_source(source, {n for link in compiled for n in (*link.inputs, *link.outputs)}, len(samples), cache)
    ends: dict[str, Comparison] = {}
    errors: list[SegmentError] = []
    last = _last_readers(compiled)
    for at, link in enumerate(compiled):
        errors.append(_verify_link(link, len(samples), at == 0, results, cache, ends))
        done = {name for name in (*link.inputs, *link.outputs) if last.get(name, -1) <= at}
        _drop(cache, (_SOURCE, _COMPILED), done, len(samples))
    outputs = tuple(ends[name].result() for name in results)
    for result in outputs:
        if limit is not None and result.relative_l2 > limit:
            raise VerificationError(
                f"output {result.output!r} differs from the source model: relative L2 {result.relative_l2:.3g}, "
                f"limit {limit:.3g}",
                "use a finer scheme (int8-weights, fp32), or raise the limit with --max-error",
            )
    return outputs, tuple(errors)


def verify_rows(
    source: Sequence[Link], rows: Sample, results: Sequence[str], cache: ActivationCache, limit: float
) -> None:
    """Run an even number of rows through the source model, all together and in two halves, link by link.

    Raises VerificationError unless every output in `results` has axis 0 of its own for them, and a relative L2 between
    the two of at most `limit`. The source is asked because the compiled model may round all rows with one scale.
    """
    half = len(next(iter(rows.values()))) // 2
    parts = (slice(None), slice(half), slice(half, None))
    made = run_chain(source, [{name: rows[name][part] for name in rows} for part in parts], results, cache)
    for name in results:
        together = made(name, 0)
        comparison = Comparison(name)
        for index in (1, 2):
            apart = made(name, index)
            if together.shape != (2 * half, *apart.shape[1:]) or apart.shape[:1] != (half,):
                raise VerificationError(
                    f"output {name!r} is {list(together.shape)} for {2 * half} rows together, {list(apart.shape)} for "
                    f"{half} of them"
                )
            comparison.add(together[parts[index]], apart)
        relative = comparison.result().relative_l2
        if relative > limit:
            raise VerificationError(
                f"output {name!r} of rows together differs from that of rows apart: relative L2 {relative:.3g}"
            )


_SOURCE, _COMPILED = "source", "compiled"


def run_chain(
    chain: Sequence[Link], samples: Sequence[Sample], results: Sequence[str], cache: ActivationCache
) -> Callable[[str, int], npt.NDArray[Any]]:
    """Run every sample through the chain, link by link; what comes back reads an output in `results` by its name and
    the sample's number, until the next chain is run."""
    for index, sample in enumerate(samples):
        for name, array in sample.items():
            cache.put(_SOURCE, name, index, np.asarray(array))
    _run_source(chain, set(results), len(samples), cache)
    return lambda name, index: cache.get(_SOURCE, name, index)


def _last_readers(chain: Sequence[Link]) -> dict[str, int]:
    return {name: at for at, link in enumerate(chain) for name in link.inputs}


def _drop(cache: ActivationCache, models: Iterable[str], names: Iterable[str], samples: int) -> None:
    for model, name, index in itertools.product(models, names, range(samples)):
        cache.drop(model, name, index)


def _run_source(chain: Sequence[Link], wanted: Collection[str], samples: int, cache: ActivationCache) -> None:
    """Every sample through one link before the next is loaded, so that its weights are read once."""
    last = _last_readers(chain)
    for at, link in enumerate(chain):
        model = link.load()
        for index in range(samples):
            made = model.run({name: cache.get(_SOURCE, name, index) for name in link.inputs})
            for name in link.outputs:
                cache.put(_SOURCE, name, index, _output(made, name))
        del model
        give_back()
        done = {n for n in (*link.inputs, *link.outputs) if last.get(n, -1) <= at and n not in wanted}
        _drop(cache, (_SOURCE,), done, samples)


def _verify_link(
    link: Link, samples: int, first: bool, results: Sequence[str], cache: ActivationCache, ends: dict[str, Comparison]
) -> SegmentError:
    with _unlike_the_source(link):
        model = link.load()
    isolated = {name: Comparison(name) for name in link.outputs}
    accumulated = {name: Comparison(name) for name in link.outputs}
    for index in range(samples):
        with _unlike_the_source(link):
            own = model.run({name: cache.get(_SOURCE, name, index) for name in link.inputs})
        # In front of the first segment both models see the same.
        chained = own if first else model.run({name: cache.get(_COMPILED, name, index) for name in link.inputs})
        for name in link.outputs:
            reference = cache.get(_SOURCE, name, index)
            isolated[name].add(reference, _output(own, name))
            accumulated[name].add(reference, _output(chained, name))
            cache.put(_COMPILED, name, index, _output(chained, name))
    del model
    give_back()
    ends.update({name: comparison for name, comparison in accumulated.items() if name in results})
    return SegmentError(
        link.name,
        max((c.result().relative_l2 for c in isolated.values()), default=0.0),
        max((c.result().relative_l2 for c in accumulated.values()), default=0.0),
    )


@contextlib.contextmanager
def _unlike_the_source(link: Link) -> Iterator[None]:
    """The source has run on these values: where what was made of it does not, it was made wrong, or sizes that are
    fixed now contradict each other, which a runtime may not notice while they are open."""
    try:
        yield
    except VerificationError as error:
        raise VerificationError(
            f"segment {link.name} does not do what the source model does: {error.message}",
            "if inputs of these shapes are right for the model, please report this",
        ) from None


def _output(made: dict[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
    if name not in made:
        raise VerificationError(f"output {name!r} is missing after compiling")
    if isinstance(made[name], (list, dict)):
        raise VerificationError(
            f"output {name!r} is not a tensor but a {type(made[name]).__name__} of them",
            "inputs and outputs of a bundle are dense tensors",
        )
    return np.asarray(made[name])
