"""An engine without a process of its own: the same answers over HTTP, and what is lost is said."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.config import load_config
from agent.errors import ConfigError
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving

INLINE = "[engine]\ninline = true\n"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    config = tmp_path / "agent.toml"
    config.write_text(INLINE)
    bundle = bundles.picking(tmp_path / "picking.tfb", slots=4)
    with serving(bundle, tmp_path / "log", "--config", str(config)) as agent:
        yield agent
        assert agent.stop() == 0
        assert "Traceback" not in agent.log


def request_of(at: list[int]) -> dict[str, Any]:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [len(at), 8], "data": [0.5] * 8 * len(at)},
        {"name": "at", "datatype": "INT64", "shape": [len(at)], "data": at},
    ]
    return {"inputs": inputs, "outputs": [{"name": "picked", "parameters": {"binary_data": False}}]}


def test_it_answers_without_a_second_process(agent: Agent) -> None:
    assert agent.engine_pids == []
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda at: agent.post(request_of([at])), [*range(16)] * 4))
    for at, (status, body, _) in zip([*range(16)] * 4, answers, strict=True):
        assert status == 200, body
        assert f"{8 * at}.5,{8 * at + 1}.5".encode() in body
    assert agent.metric("tightfit_engine_up") == 1
    assert "what ends the runtime ends the agent" in agent.log


def test_a_run_that_fails_fails_alone(agent: Agent) -> None:
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda at: agent.post(request_of([at])), (3, 16, 4, 16)))
    assert [status for status, _, _ in answers] == [200, 500, 200, 500]


def test_the_gateway_answers_while_the_engine_computes(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(INLINE)
    with serving(bundles.slow(tmp_path / "slow.tfb"), tmp_path / "log", "--config", str(config)) as agent:
        inputs = [
            {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
            {"name": "turns", "datatype": "INT64", "shape": [1], "data": [10_000_000]},
        ]
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(agent.post, {"inputs": inputs})
            while agent.metric("tightfit_running") != 1:
                if answer.done():
                    # It was over before anybody looked.
                    answer = threads.submit(agent.post, {"inputs": inputs})
            assert agent.request("/v2/health/live")[0] == 200
            assert answer.result()[0] == 200


def test_a_bundle_that_does_not_load_is_said(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(INLINE)
    folder = bundles.picking(tmp_path / "picking.tfb")
    (folder / "sample" / "1.bin").write_bytes((16).to_bytes(8, "little"))
    bundles.rewrite(folder, bundles.read_manifest(folder))
    code, out, err = run_agent("serve", "--bundle", str(folder), "--port", "0", "--config", str(config))
    assert (code, out) == (2, "")
    assert "the bundle's own sample does not run" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "others", ['[[models]]\nbundle = "a"\n[[models]]\nbundle = "b"\n', 'bundle = "a"\n[repository]\ncontrol = true\n']
)
def test_it_is_for_one_model(tmp_path: Path, others: str) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(others + INLINE)
    with pytest.raises(ConfigError, match="an inline engine serves one model"):
        load_config(config, {})
