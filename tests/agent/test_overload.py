"""Under pressure the agent does less, says so, and comes back: with real engines and a flood."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.config import DegradationOptions
from agent.errors import Reason, RefusedError
from agent.overload import Overload
from agent.telemetry import Telemetry
from targets.bundle import read_manifest
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving, stopped, until
from tests.support.bundles import rewrite

LEVEL = "tightfit_degradation_level"


def request_of(turns: int, **parameters: Any) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
            {"name": "turns", "datatype": "INT64", "shape": [1], "data": [turns]},
        ],
    }


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """A model and its lighter variant, four places to wait, and little patience."""
    heavy, light = (bundles.slow(tmp_path / f"{name}.tfb", slots=1) for name in ("heavy", "light"))
    rewrite(light, read_manifest(light), options={"variant": "light"})
    config = tmp_path / "agent.toml"
    config.write_text(
        f"[requests]\nqueue_length = 4\ntimeout_s = 120\n[engine]\nhang_s = 120\n"
        f"[degradation]\nrise_s = 0.2\nhold_s = 1.0\n"
        f'[[models]]\nbundle = "{heavy}"\nname = "heavy"\nlighter = "light"\n'
        f'[[models]]\nbundle = "{light}"\nname = "light"\n',
        encoding="utf-8",
    )
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        agent.name = "heavy"
        yield agent
        assert "Traceback" not in agent.log


def test_a_full_queue_sheds_low_priorities_and_has_the_lighter_variant_answer(agent: Agent) -> None:
    assert (agent.metric(LEVEL), agent.metric("tightfit_frame_rate")) == (0, 1)
    version = json.loads(agent.request("/v2/models/heavy")[1])["versions"][0]
    # A version that is asked for by its number answers itself, so at every level these wait for the heavy one.
    exactly = f"/v2/models/heavy/versions/{version}/infer"
    with ThreadPoolExecutor(8) as threads:
        with stopped(agent.engine_pids[0]):
            running = threads.submit(agent.post, request_of(1))
            until(lambda: agent.metric("tightfit_running", model="heavy") == 1)
            waiting = [threads.submit(agent.post, request_of(1), path=exactly) for _ in range(4)]
            until(lambda: agent.metric(LEVEL) == 3)
            assert agent.metric("tightfit_frame_rate") == 0.25
            status, body, headers = agent.post(request_of(1), {"Priority": "u=4"})
            assert (status, headers["Retry-After"]) == (503, "30")
            told = json.loads(body)["error"]
            assert told.startswith("requests of priority 160 are not taken under pressure (queue)")
            status, body, _ = agent.post(request_of(1), path=exactly)
            assert (status, "the queue is full" in json.loads(body)["error"]) == (503, True)
            # The default priority never is shed, and the other engine's queue is empty.
            lighter = threads.submit(agent.post, request_of(1))
            until(lambda: agent.metric("tightfit_in_flight", model="light") == 1)
        status, body, _ = lighter.result()
        assert (status, json.loads(body).get("model_name")) == (200, "light"), body
        assert running.result()[0] == 200
        for status, body, _ in (answer.result() for answer in waiting):
            assert (status, json.loads(body).get("model_version")) == (200, version), body
    assert agent.metric("tightfit_requests_total", reason="shed") == 1
    assert agent.metric("tightfit_stood_in_total", model="heavy") >= 1
    until(lambda: agent.metric(LEVEL) == 0)
    status, body, _ = agent.post(request_of(1), {"Priority": "u=7"})
    assert (status, json.loads(body)["model_name"]) == (200, "heavy")
    assert agent.metric("tightfit_degradations_total", cause="queue", to="up") >= 1
    assert agent.metric("tightfit_degradations_total", to="down") == 3
    changes = [json.loads(line) for line in agent.log.splitlines() if '"degradation"' in line]
    assert [each["to"] for each in changes][-3:] == [2, 1, 0]
    assert changes[0]["cause"] == "queue"


def test_missed_deadlines_press(agent: Agent) -> None:
    """While one runs, others come whose deadlines pass: one by one, so that the queue is never half full."""
    with ThreadPoolExecutor(1) as threads:
        with stopped(agent.engine_pids[0]):
            long = threads.submit(agent.post, request_of(1))
            until(lambda: agent.metric("tightfit_running") == 1)
            while agent.metric(LEVEL) < 3:
                for _ in range(5):
                    assert agent.post(request_of(1), {"Request-Timeout-Ms": "20"})[0] == 504
        assert long.result()[0] == 200
    causes = {json.loads(line)["cause"] for line in agent.log.splitlines() if '"degradation"' in line}
    assert causes == {"misses"}


def test_a_deadline_that_nobody_could_meet_does_not(agent: Agent) -> None:
    """Its client is alone: less service for all would not help it."""
    for _ in range(20):
        assert agent.post(request_of(400_000, timeout=2000))[0] == 504
        until(lambda: not agent.metric("tightfit_in_flight"))
    time.sleep(0.5)
    assert agent.metric(LEVEL) == 0


def test_a_governor_presses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What heat or power ask for is a number; with the clock in hand."""
    asked = [0]
    overload = Overload(DegradationOptions(rise_s=1, hold_s=10), Telemetry(), lambda: 0.0, lambda: asked[0])
    overload.look(0.0)
    overload.check(255)
    asked[0] = 3
    for tick in range(5):
        overload.look(1 + tick / 4)
    overload.check(128)
    with pytest.raises(RefusedError, match=r"priority 129 .* \(governor\) \(from priority 129 on") as caught:
        overload.check(129)
    assert caught.value.reason is Reason.SHED
    asked[0] = 0
    for second in range(3, 40):
        overload.look(second)
    overload.check(255)


@pytest.mark.parametrize(
    ("lighter", "words"),
    [
        ("lite", "no model 'lite' to be the lighter variant of 'a'"),
        ("a", "no model 'a' to be"),
        ("b", "'b' cannot answer for 'a'"),
    ],
)
def test_a_lighter_variant_must_be_one(tmp_path: Path, lighter: str, words: str) -> None:
    a, b = bundles.slow(tmp_path / "a.tfb"), bundles.add(tmp_path / "b.tfb")
    config = tmp_path / "agent.toml"
    models = f'[[models]]\nbundle = "{a}"\nname = "a"\nlighter = "{lighter}"\n[[models]]\nbundle = "{b}"\nname = "b"\n'
    config.write_text(models, encoding="utf-8")
    code, _, told = run_agent("serve", "--config", str(config), "--port", "0")
    assert code == 2
    assert words in told
