"""Results as they are kept for those who follow them, as bodies of messages."""

from __future__ import annotations

from collections.abc import Sequence

from agent.http.following import Shown
from agent.mqtt.results import Origin, Tensor, body_of, chosen, digest_of, figure_of
from agent.mqtt.rules import Rule, Withheld

_NONE = Withheld()


def tensors_of(shown: Shown) -> list[Tensor]:
    """Its outputs."""
    return [Tensor(each.spec, each.shape, each.data) for each in shown.outputs]


def told(
    shown: Shown, epoch: str, number: int, tensors: Sequence[Tensor], inline_bytes: int, withheld: Withheld = _NONE,
    figure: float | None = None,
) -> dict[str, object]:  # fmt: skip
    """The body of `result/1`."""
    timing = {
        "queue_us": shown.timing.queue_us,
        "compute_us": shown.timing.compute_us,
        "total_us": shown.timing.total_us,
    }
    origin = Origin(shown.name, shown.version, epoch, number, shown.id, timing)
    body = body_of(origin, tensors, withheld, inline_bytes, figure)
    return {**body, "too_large": shown.too_large} if shown.too_large else body


def judged(rule: Rule, shown: Shown, epoch: str, number: int, now: float) -> dict[str, object] | None:
    """The body of a result that the rule takes; None of one that it does not. May take long: of large tensors."""
    options = rule.options
    tensors = tensors_of(shown)
    figure = figure_of(tensors, options) if options.needs_figure else None
    told_of = chosen(tensors, options)
    withheld = rule.takes(figure, digest_of(told_of) if options.when.value == "change" else b"", now)
    return None if withheld is None else told(shown, epoch, number, told_of, options.inline_bytes, withheld, figure)
