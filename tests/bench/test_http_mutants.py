"""Damaged requests have one answer, whichever lane they come to."""

from __future__ import annotations

from pathlib import Path

from bench.http_mutants import mutants, run
from tests.support import bundles
from tests.support.agents import serving


def test_both_lanes_answer_damaged_requests_alike(tmp_path: Path) -> None:
    cases = list(mutants(seed=1, count=100))
    with serving(bundles.adding(tmp_path / "adding.tfb"), tmp_path / "log") as agent:
        findings, statuses = run(agent, cases)
    assert findings == []
    # Some are still whole, and most are not.
    assert {"200", "400", "200 400"} <= statuses.keys()
