"""The scheduler's benchmark: its clients against a real agent, and what it says where the rival is missing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from bench import scenarios
from bench.rivals import tightfit, triton
from bench.rivals.server import ServerError
from bench.scheduler import OURS, check, main
from bench.scheduler_report import report
from bench.served_models import TINY
from bench.traffic import Target


@pytest.mark.slow
def test_every_scenario_of_one_server(tmp_path: Path) -> None:
    onnx = TINY.write(tmp_path)
    bundle = tightfit.bundle_of(TINY, onnx, tmp_path)
    with tightfit.serving([bundle], tmp_path / "agent", "[engine]\nhang_s = 1.0\n") as server:
        target = Target(OURS, server, TINY.name, TINY)
        check(target, onnx)
        idle = scenarios.idle(target, 1.0, 3)
        assert (idle["tries"], idle["refused"], idle["late"]) == (3, 0, 0)
        loaded, reasons = scenarios.at_load(target, 50, 5.0, 0.5, 0)
        assert loaded["requests"] > 0
        assert loaded["goodput_per_s"] == pytest.approx(loaded["offered_per_s"])
        assert not reasons
        before = server.count_executed(TINY.name)
        with scenarios.asking(target) as ask:
            took = scenarios.take_turns({OURS: ask}, 25)[OURS]
        assert len(took) == 25
        assert server.count_executed(TINY.name) == before + 26
        flood = scenarios.flood(target, 1.0, 0.6)
        assert flood["flood_per_s"] > 0
        killed, why = scenarios.fault(target, signal.SIGKILL, 3.0)
        assert killed["lost"] == killed["unanswered"] == 0
        assert killed["ok"] + killed["refused"] == killed["requests"]
        assert killed["back_s"] > 0
        start = server.start_s
    row = {"load": 0.5, "server": OURS, **loaded, "all_requests": loaded["requests"], "reasons": reasons}
    text = report(
        {
            "machine": {"cores": "2"},
            "effort": {"rounds": 1},
            "servers": {OURS: "the agent"},
            "notes": ["Triton was not measured: it is not there"],
            "load": {"tiny": {"capacities": {OURS: 100.0}, "capacity": 100.0, "deadline_ms": 5000.0, "rows": [row]}},
            "flood": {OURS: flood},
            "idle": {OURS: idle},
            "fault": {"SIGKILL, ours": {**killed, "start_s": start, "reasons": why}},
        }
    )
    assert text.count("| ours |") == 3
    assert "- Triton was not measured: it is not there" in text


def test_where_the_rival_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match="has no bin/python") as caught:
        triton.find(tmp_path)
    assert caught.value.hint == f"python -m bench.rivals.triton {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["bench.scheduler", "--rounds", "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
