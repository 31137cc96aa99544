"""A process that lays out one segment, so that what it takes is given back whole: `python -m agent.engine.prepack`.

A JSON `Order` on standard input, a JSON `Outcome` on standard output. It dies with the process that started it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from agent.backends.base import ArenaOptions, SessionOptions, open_backend
from agent.engine.residency import give_freed_blocks_back, trim_heap
from agent.engine.worker import tie_to_parent
from agent.finalise import Order, Outcome
from agent.memory import peak_rss_bytes
from targets.bundle import Residency
from targets.errors import TightfitError


def lay_out(order: Order) -> Outcome:
    """Write the files, then load them as the engine will. Raises TightfitError."""
    backend = open_backend(order.runtime)
    # The runtime reserves no more than it needs here, and nothing runs: no plan bounds it but the finalise phase.
    backend.prepare(ArenaOptions(0, 0))
    source, target = Path(order.source), Path(order.target)
    backend.lay_out(source, target, SessionOptions(order.threads, order.settings))
    trim_heap()
    mapped = SessionOptions(order.threads, order.settings, Residency.MAPPED)
    backend.load_session(target, mapped).close()
    return Outcome(backend.describe(), peak_rss_bytes())


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    tie_to_parent(order.parent)
    give_freed_blocks_back()
    try:
        outcome = lay_out(order)
    except TightfitError as error:
        outcome = Outcome(error=error.message, hint=error.hint)
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
