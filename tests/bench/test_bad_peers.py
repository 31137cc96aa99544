"""Who behaves is served beside those who do not: a short form of `bench.bad_peers`, without its milliseconds."""

from __future__ import annotations

from pathlib import Path

from bench.bad_peers import RATE, one_round, reasons_of, served

SETTINGS = """
[http]
keepalive_s = 60
send_s = 2
[limits]
head_s = 2
"""


def test_who_behaves_is_served_beside_all_others(tmp_path: Path) -> None:
    with served(tmp_path, SETTINGS) as agent:
        measured = one_round(agent, "all", 6)
        reasons = reasons_of(agent)
        assert "Traceback" not in agent.log
    assert measured.failures == {}
    # Arrivals are random, and always the same.
    assert measured.answered > 6 * RATE * 0.7
    # Large bodies are answered, half heads are ended with a reason, and connections that say nothing make room.
    assert measured.ends["bodies"]["200"] > 0
    assert measured.ends["heads"].keys() == {"408"}
    assert reasons["slow_head"] >= measured.ends["heads"].total() > 0
    assert measured.ends["connections"].keys() <= {"503", "429", "closed"}
    assert reasons["slow_reader"] + reasons["disconnected"] > 0
