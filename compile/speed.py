"""How fast a service answers, and what a pass costs the disk: counters of the agent and the kernel, before and after.

A pass is one way through all segments, of one request or, where weights are streamed, of all that wait. What it opens
and what it reads tell different things: pages that are still in memory are opened and not read, pages that the kernel
gave up too early are read twice.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import msgspec

from compile.processes import tree_of
from compile.serving import Requests, Service
from targets.bundle import Manifest


class Speed(msgspec.Struct, frozen=True):
    """Requests of the largest shape, all slots full. Bytes are those of one pass, the mean.

    `passes` answered the `requests`, fewer where some shared one. `pass_s`: a pass in the engine, the median of the
    rounds' means; `request_s`: from a request's last byte to its answer's last, waiting for the other slots included,
    the median; `opened_bytes`: the files that were opened for the turns of streamed segments; `disk_bytes`: what the
    engine had the kernel fetch from the disk, page faults and read-ahead included, None where the kernel does not say.
    """

    requests: int
    passes: int
    pass_s: float
    request_s: float
    opened_bytes: int
    disk_bytes: int | None


class Counters(msgspec.Struct, frozen=True):
    """What has been counted since the service started: passes, seconds and bytes."""

    passes: int
    run_s: float
    opened_bytes: int
    disk_bytes: int | None


def measure(service: Service, manifest: Manifest, requests: Requests, rounds: int, timeout_s: float) -> Speed:
    """Fill all slots `rounds` times, with other requests each time.

    Raises ServiceError with the first answer that is not 200.
    """
    counted = [counters(service)]
    waited: list[float] = []
    slots = manifest.plan.slots
    for at in range(rounds):
        bodies = [requests.body(at * slots + slot) for slot in range(slots)]
        waited += service.fill(manifest, bodies, requests.headers, timeout_s)
        counted.append(counters(service))
    return speed(counted, waited)


def counters(service: Service) -> Counters:
    """The counters now. Raises ServiceError."""
    metrics = service.metrics()
    return Counters(
        int(metrics["tightfit_pass_seconds_count"]),
        metrics["tightfit_pass_seconds_sum"],
        int(metrics["tightfit_streamed_bytes_total"]),
        read_bytes_of(tree_of(service.process.pid)[-1]),
    )


def speed(counted: list[Counters], waited: list[float]) -> Speed:
    """The counters before the first round and after each, and the seconds that every request took."""
    first, last = counted[0], counted[-1]
    passes = last.passes - first.passes
    of_rounds = [
        (after.run_s - before.run_s) / (after.passes - before.passes) for before, after in itertools.pairwise(counted)
    ]
    read = None if first.disk_bytes is None or last.disk_bytes is None else last.disk_bytes - first.disk_bytes
    return Speed(
        len(waited),
        passes,
        round(statistics.median(of_rounds), 6),
        round(statistics.median(waited), 6),
        (last.opened_bytes - first.opened_bytes) // passes,
        None if read is None else read // passes,
    )


def read_bytes_of(pid: int) -> int | None:
    """Bytes that the process made the kernel fetch from disks; None where that is not counted, or not for us."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)
