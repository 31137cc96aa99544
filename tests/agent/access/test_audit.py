"""The audit: a line for each act, and no flood of lines for who only tries."""

from __future__ import annotations

from typing import Any

import pytest

from agent.access import audit
from agent.access.audit import Audit


class Lines:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.all.append({"event": event, **fields})

    warning = info


def test_who_only_tries_fills_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, now = Lines(), [0.0]
    monkeypatch.setattr(audit.log, "get", lambda _: lines)
    made = Audit(lambda: now[0])
    for _ in range(1000):
        made.refused("load", "anonymous", "192.0.2.1", "unauthenticated", model="m")
    assert len(lines.all) == 20
    made.done("load", "root", "192.0.2.2", model="m")
    assert len(lines.all) == 21
    now[0] = 60.0
    for _ in range(2):
        made.refused("load", "anonymous", "192.0.2.1", "unauthenticated", model="m")
    assert [line.get("left_out") for line in lines.all[21:]] == [980, None]
