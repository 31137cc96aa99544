"""An engine that is killed or stopped under load: every connection stays, every request has one answer, its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import bundles
from tests.support.agents import asking, serving, until

CLIENTS, EACH_PER_S = 8, 25


@dataclass
class Client:
    """Sends requests at a steady rate on one connection, which is never opened again."""

    number: int
    port: int
    answers: list[int] = field(default_factory=list)
    """The status of every request in turn."""
    wrong: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.connect()
        connection.auto_open = False
        due = time.monotonic()
        try:
            while not stop.is_set():
                self._ask(connection, len(self.answers))
                due = max(due + 1 / EACH_PER_S, time.monotonic())
                stop.wait(due - time.monotonic())
        except (OSError, http.client.HTTPException) as error:
            self.wrong.append(f"the connection was lost: {error!r}")
        finally:
            connection.close()

    def _ask(self, connection: http.client.HTTPConnection, turn: int) -> None:
        value, row = 1000 * self.number + turn, turn % 16
        inputs = [
            {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [value] * 8},
            {"name": "at", "datatype": "INT64", "shape": [1], "data": [row]},
        ]
        body = json.dumps({"id": f"{self.number}.{turn}", "inputs": inputs, "outputs": [{"name": "picked"}]})
        connection.request("POST", "/v2/models/picking/infer", body)
        response = connection.getresponse()
        answer = json.loads(response.read())
        self.answers.append(response.status)
        if response.status == 200:
            expected = [8 * row + column + value for column in range(8)]
            if answer["id"] != f"{self.number}.{turn}" or answer["outputs"][0]["data"] != expected:
                self.wrong.append(f"{turn}: {answer}")
        elif response.status != 503 or "the engine" not in answer["error"]:
            self.wrong.append(f"{turn}: {response.status} {answer}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill -9", "kill -STOP"])
def test_no_connection_is_lost_and_each_request_is_answered_once(tmp_path: Path, number: signal.Signals) -> None:
    """Answered with what it asked for, or that the engine is gone; and the next engine answers all."""
    config = tmp_path / "agent.toml"
    config.write_text("[engine]\nhang_s = 3.0\n")
    bundle = bundles.picking(tmp_path / "picking.tfb")
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        clients = [Client(each, agent.port) for each in range(CLIENTS)]
        with asking(clients):
            until(lambda: all(len(client.answers) >= 20 for client in clients))
            before = [len(client.answers) for client in clients]
            os.kill(agent.engine_pid, number)
            until(lambda: agent.metric("tightfit_engine_restarts_total") == 1)
            until(lambda: agent.metric("tightfit_engine_up") == 1)
            back = [len(client.answers) for client in clients]
            until(lambda: all(c.wrong or len(c.answers) >= at + 20 for c, at in zip(clients, back, strict=True)))
        assert [client.wrong for client in clients] == [[]] * CLIENTS
        for client, first, at in zip(clients, before, back, strict=True):
            assert set(client.answers[:first]) == {200}
            assert set(client.answers[at + 1 :]) == {200}
        assert agent.stop() == 0
        assert "Traceback" not in agent.log
