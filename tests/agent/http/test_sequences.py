"""Sequences: the state that one request leaves is what the next goes on from, in a slot of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import Agent, serving, until
from tests.support.decoders import LONGEST, PIECE, decoder, greedy, summing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequences")


@pytest.fixture(scope="module")
def agent(folder: Path) -> Iterator[Agent]:
    """`summing` with three slots, `decoder` with two."""
    config = folder / "agent.toml"
    models = [summing(folder / "summing.tfb"), decoder(folder / "decoder.tfb")]
    config.write_text("".join(f'[[models]]\nbundle = "{path}"\n' for path in models))
    with serving(None, folder / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(autouse=True)
def _no_slot_is_lost(agent: Agent) -> Iterator[None]:
    yield
    until(lambda: agent.metric("tightfit_in_flight") == 0)


def ask(agent: Agent, values: list[float], **parameters: Any) -> tuple[int, Any]:
    x = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": values}
    status, body, _ = agent.post({"inputs": [x], "parameters": parameters}, path="/v2/models/summing/infer")
    return status, json.loads(body)


def total(agent: Agent, values: list[float], id_: int | str, **parameters: Any) -> list[float]:
    status, answer = ask(agent, values, sequence_id=id_, **parameters)
    assert status == 200, answer
    (output,) = answer["outputs"]
    assert output["name"] == "y"
    return list(output["data"])


def refused(agent: Agent, status: int = 400, **parameters: Any) -> str:
    code, answer = ask(agent, [1, 1], **parameters)
    assert code == status, answer
    return str(answer["error"])


def test_each_request_goes_on_from_the_one_before(agent: Agent) -> None:
    assert total(agent, [1, 2], 7, sequence_start=True) == [10, 20]
    assert total(agent, [1, 2], 7) == [20, 40]
    assert total(agent, [0, 1], 7) == [20, 50]
    assert total(agent, [1, 0], 7, sequence_end=True) == [30, 50]
    assert "no sequence 7 is open (begin it with sequence_start" in refused(agent, sequence_id=7)


def test_sequences_do_not_mix_and_may_have_names(agent: Agent) -> None:
    assert total(agent, [1, 1], "a", sequence_start=True) == [10, 10]
    assert total(agent, [2, 2], "b", sequence_start=True) == [20, 20]
    assert total(agent, [1, 1], "a", sequence_end=True) == [20, 20]
    assert total(agent, [2, 2], "b", sequence_end=True) == [40, 40]


def test_one_that_begins_again_begins_with_zeros(agent: Agent) -> None:
    assert total(agent, [1, 1], 1, sequence_start=True) == [10, 10]
    assert total(agent, [5, 5], 1, sequence_start=True) == [50, 50]
    assert total(agent, [5, 5], 1, sequence_end=True) == [100, 100]
    assert total(agent, [3, 3], 1, sequence_start=True, sequence_end=True) == [30, 30]


def test_one_slot_is_left_for_requests(agent: Agent) -> None:
    assert total(agent, [1, 1], 1, sequence_start=True) == total(agent, [1, 1], 2, sequence_start=True) == [10, 10]
    why = refused(agent, 503, sequence_id=3, sequence_start=True)
    assert "2 sequences of model 'summing' are open, as many as 3 slots allow" in why
    assert total(agent, [1, 1], 1) == [20, 20]
    both = [{"name": name, "shape": [1, 2], "datatype": "FP32", "data": [4, 4]} for name in "xh"]
    status, body, _ = agent.post({"inputs": both}, path="/v2/models/summing/infer")
    assert status == 200
    assert {each["name"]: each["data"] for each in json.loads(body)["outputs"]} == {"h_next": [8, 8], "y": [80, 80]}
    assert agent.metric("tightfit_in_flight", model="summing") == 2
    assert total(agent, [1, 1], 1, sequence_end=True) == [30, 30]
    assert total(agent, [1, 1], 2, sequence_end=True) == [20, 20]


def test_what_is_wrong_is_said_and_the_sequence_goes_on(agent: Agent) -> None:
    assert total(agent, [1, 1], 9, sequence_start=True) == [10, 10]
    assert "input 'h' is missing" in refused(agent)
    h = {"name": "h", "shape": [1, 2], "datatype": "FP32", "data": [1, 1]}
    status, body, _ = agent.post({"inputs": [h], "parameters": {"sequence_id": 9}}, path="/v2/models/summing/infer")
    assert (status, "unknown input 'h'" in json.loads(body)["error"]) == (400, True)
    assert "sequence_start is true without a sequence_id" in refused(agent, sequence_start=True)
    assert total(agent, [1, 1], 9, sequence_end=True) == [20, 20]


def tokens(agent: Agent, new: list[int], past: int, **parameters: Any) -> tuple[int, Any]:
    """Of a decoder: the most likely token behind these."""
    count = len(new)
    values = {
        "input_ids": new,
        "attention_mask": [1] * (past + count),
        "position_ids": list(range(past, past + count)),
    }
    inputs = [{"name": n, "shape": [1, len(v)], "datatype": "INT64", "data": v} for n, v in values.items()]
    body = {"inputs": inputs, "parameters": {"sequence_id": 5, **parameters}}
    status, answer, _ = agent.post(body, path="/v2/models/decoder/infer")
    if status != 200:
        return status, json.loads(answer)["error"]
    (logits,) = json.loads(answer)["outputs"]
    last = logits["data"][-logits["shape"][-1] :]
    return status, last.index(max(last))


def test_state_that_grows_and_a_past_that_is_too_long(agent: Agent, folder: Path) -> None:
    expected = greedy(folder / "decoder.onnx", [3, 4, 5], LONGEST)
    past, (status, token) = 3, tokens(agent, [3, 4, 5], 0, sequence_start=True)
    for wanted in expected[: LONGEST - 3]:
        assert (status, token) == (200, wanted)
        status, token = tokens(agent, [token], past)
        past += 1
    assert past == LONGEST
    assert tokens(agent, [1] * PIECE, past)[0] == 200
    status, why = tokens(agent, [1], past + PIECE - 1)
    assert (status, f"has size {LONGEST + PIECE} on axis 2" in why) == (400, True)
    # What its state is now nobody knows, so it has ended, and its slot is free.
    assert "no sequence 5 is open" in tokens(agent, [1], 3)[1]


def test_one_that_is_idle_or_whose_model_is_replaced_is_ended(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    bundle = summing(tmp_path / "summing.tfb")
    config.write_text(
        f'[[models]]\nbundle = "{bundle}"\n[requests]\nsequence_idle_s = 0.2\n[repository]\ncontrol = true\n'
    )
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        assert total(agent, [1, 1], 1, sequence_start=True) == [10, 10]
        until(lambda: agent.metric("tightfit_in_flight") == 0)
        assert "one that is idle for 0.2 s is ended" in refused(agent, sequence_id=1)
    config.write_text(config.read_text().replace("0.2", "3600"))
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        assert total(agent, [1, 1], 1, sequence_start=True) == [10, 10]
        assert agent.post(b"{}", path="/v2/repository/models/summing/unload")[0] == 200
        assert agent.post(b"{}", path="/v2/repository/models/summing/load")[0] == 200
        assert "no sequence 1 is open" in refused(agent, sequence_id=1)
        assert "Traceback" not in agent.log
