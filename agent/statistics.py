"""What the versions of models have done, as Triton's statistics extension counts it (`extension_statistics.md`).

A request is counted once, when its call is settled; an execution (a batch on its way through the engine) when the pass
that it was part of has ended. What a version has done stays counted while it is not loaded, and goes on from there when
it is again: the numbers of one version only grow, as long as the agent runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.calls import Call

# Versions that are not served any more; the oldest are forgotten.
_KEPT_VERSIONS = 64
# Sizes of batches that are told apart; contracts have fewer as a rule.
_KEPT_SIZES = 256


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}


class Statistics:
    """Of one version. Seconds are sums over requests; `batches` are rows of an execution -> (how many, seconds of all).

    A successful request's time is cut in four where its call was let in, queued, begun and answered: its wait at the
    door and in the queue, reading and decoding its body into the slot, its passes, and encoding and sending its answer.
    Of one that needed no pass all but looking for its answer was waiting.
    """

    def __init__(self) -> None:
        self.ran = self.kept = self.failed = self.hits = self.misses = 0
        """Requests: computed, answered without that, without an answer; and with a kept answer, and without it."""
        self.inferences = self.executions = self.memory_bytes = 0
        self.success_s = self.fail_s = self.queue_s = self.input_s = self.infer_s = self.output_s = 0.0
        self.hit_s = self.miss_s = self.last_s = 0.0
        self.batches: dict[int, tuple[int, float]] = {}

    def settled(self, call: Call, ok: bool, now: float, wall_s: float) -> None:
        """One request has ended, at `now` of the monotonic clock, `wall_s` after the epoch."""
        total_s = now - call.arrived
        if not ok:
            self.failed += 1
            self.fail_s += total_s
            return
        self.success_s += total_s
        self.last_s = wall_s
        if call.cache_hit is not None:
            self._looked(call.cache_hit, call.cache_s)
        if not call.began:
            self.kept += 1
            self.queue_s += max(total_s - call.cache_s, 0.0)
            return
        self.ran += 1
        self.inferences += call.rows
        self.queue_s += call.queue_s
        self.input_s += call.queued - call.seated
        self.infer_s += call.compute_s
        self.output_s += now - call.ended

    def _looked(self, found: bool, seconds: float) -> None:
        if found:
            self.hits += 1
            self.hit_s += seconds
        else:
            self.misses += 1
            self.miss_s += seconds

    @property
    def sizes(self) -> dict[int, int]:
        """How many executions there were of so many rows; another thread may ask."""
        return {rows: count for rows, (count, _) in self.batches.copy().items()}

    def executed(self, rows: int, seconds: float) -> None:
        """One batch has been through the engine."""
        self.executions += 1
        if rows in self.batches or len(self.batches) < _KEPT_SIZES:
            count, sum_s = self.batches.get(rows, (0, 0.0))
            self.batches[rows] = count + 1, sum_s + seconds

    def shown(self, name: str, version: str) -> dict[str, Any]:
        """As the protocol has it. What the engine does to put inputs together and take outputs apart is part of
        `compute_infer` of a batch."""
        return {
            "name": name,
            "version": version,
            "last_inference": round(self.last_s * 1e3),
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {
                "success": _duration(self.ran + self.kept, self.success_s),
                "fail": _duration(self.failed, self.fail_s),
                "queue": _duration(self.ran + self.kept, self.queue_s),
                "compute_input": _duration(self.ran, self.input_s),
                "compute_infer": _duration(self.ran, self.infer_s),
                "compute_output": _duration(self.ran, self.output_s),
                "cache_hit": _duration(self.hits, self.hit_s),
                "cache_miss": _duration(self.misses, self.miss_s),
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": _duration(count, 0.0),
                    "compute_infer": _duration(count, seconds),
                    "compute_output": _duration(count, 0.0),
                }
                for rows, (count, seconds) in sorted(self.batches.items())
            ],
            "memory_usage": [{"type": "CPU", "id": 0, "byte_size": self.memory_bytes}] if self.memory_bytes else [],
        }


class Ledger:
    """Statistics by model and version."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], Statistics] = {}

    def of(self, name: str, version: str, served: Iterable[tuple[str, str]]) -> Statistics:
        """Those of a version, which are begun at zero unless there are some. Of those that are not `served` any more
        the ones are forgotten that were asked for the longest ago, where they become too many."""
        key = name, version
        found = self._versions.pop(key) if key in self._versions else Statistics()
        self._versions[key] = found
        keep = {key, *served}
        idle = [each for each in self._versions if each not in keep]
        for each in idle[: max(len(idle) - _KEPT_VERSIONS, 0)]:
            del self._versions[each]
        return found

    def sizes(self) -> list[tuple[str, dict[int, int]]]:
        """Of every version that is kept: (model, how many executions there were of so many rows)."""
        return [(name, statistics.sizes) for (name, _), statistics in self._versions.copy().items()]
