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
from tests.support.agents import Agent, run_agent, serving
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
        f"[requests]\nqueue_length = 4\n[degradation]\nrise_s = 0.2\nhold_s = 1.0\n[engine]\nhang_s = 60\n"
        f'[[models]]\nbundle = "{heavy}"\nname = "heavy"\nlighter = "light"\n'
        f'[[models]]\nbundle = "{light}"\nname = "light"\n',
        encoding="utf-8",
    )
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        agent.name = "heavy"
        yield agent
        assert "Traceback" not in agent.log


def until(agent: Agent, level: int) -> None:
    end = time.monotonic() + 20
    while agent.metric(LEVEL) != level:
        assert time.monotonic() < end, agent.log
        time.sleep(0.02)


def test_a_full_queue_sheds_low_priorities_and_has_the_lighter_variant_answer(agent: Agent) -> None:
    assert (agent.metric(LEVEL), agent.metric("tightfit_frame_rate")) == (0, 1)
    with ThreadPoolExecutor(8) as threads:
        # One runs, four wait, and whoever gets none comes again.
        running = threads.submit(agent.post, request_of(1_000_000))
        waiting = [threads.submit(agent.post, request_of(1)) for _ in range(6)]
        until(agent, 3)
        status, body, headers = agent.post(request_of(1), {"Priority": "u=4"})
        assert (status, headers["Retry-After"]) == (503, "30")
        assert json.loads(body)["error"].startswith("requests of priority 160 are not taken under pressure (queue)")
        # The default priority never is shed, and the other engine has nothing to do.
        status, body, _ = agent.post(request_of(1))
        assert (status, json.loads(body).get("model_name")) == (200, "light"), body
        assert running.result()[0] == 200
        assert {answer.result()[0] for answer in waiting} <= {200, 503}
    assert agent.metric("tightfit_requests_total", reason="shed") == 1
    assert agent.metric("tightfit_stood_in_total", model="heavy") >= 1
    assert agent.metric("tightfit_frame_rate") == 0.25
    # A version that was asked for by its number answers itself.
    version = json.loads(agent.request("/v2/models/heavy")[1])["versions"][0]
    status, body, _ = agent.post(request_of(1), path=f"/v2/models/heavy/versions/{version}/infer")
    assert (status, json.loads(body)["model_version"]) == (200, version)
    until(agent, 0)
    status, body, _ = agent.post(request_of(1), {"Priority": "u=7"})
    assert (status, json.loads(body)["model_name"]) == (200, "heavy")
    assert agent.metric("tightfit_degradations_total", cause="queue", to="up") >= 1
    assert agent.metric("tightfit_degradations_total", to="down") == 3
    told = [json.loads(line) for line in agent.log.splitlines() if '"degradation"' in line]
    assert [each["to"] for each in told][-3:] == [2, 1, 0]
    assert told[0]["cause"] == "queue"


def test_missed_deadlines_press(agent: Agent) -> None:
    """While one runs, others come whose deadlines pass."""
    with ThreadPoolExecutor(8) as threads:
        long = threads.submit(agent.post, request_of(2_000_000))
        while agent.metric("tightfit_running") < 1:
            time.sleep(0.002)
        for _ in range(3):
            late = list(threads.map(agent.post, [request_of(1)] * 3, [{"Request-Timeout-Ms": "20"}] * 3))
            assert {status for status, _, _ in late} == {504}
        until(agent, 3)
        assert long.result()[0] == 200
    causes = {json.loads(line)["cause"] for line in agent.log.splitlines() if '"degradation"' in line}
    assert causes == {"misses"}


def test_a_deadline_that_nobody_could_meet_does_not(agent: Agent) -> None:
    """Its client is alone: less service for all would not help it."""
    for _ in range(20):
        assert agent.post(request_of(400_000, timeout=2000))[0] == 504
        while agent.metric("tightfit_in_flight"):
            time.sleep(0.002)
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
