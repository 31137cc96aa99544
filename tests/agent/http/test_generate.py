"""Text generation over HTTP: equal to what the runtime alone does, bounded, and given up when nobody listens."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support import bundles
from tests.support.agents import Agent, serving, until
from tests.support.decoders import EOS, LONGEST, decoder, greedy, recurrent, write_tokenizer

FOREVER = 1 << 16
PROMPTS = ["the end", "in", "the other one and another", "é€😀", " the" * LONGEST]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generate")


@pytest.fixture(scope="module")
def agent(folder: Path) -> Iterator[Agent]:
    """`decoder` looks back on 48 tokens, `forever` on all, `add` generates nothing; two slots each."""
    models = [
        decoder(folder / "decoder.tfb"),
        recurrent(folder / "forever.tfb"),
        bundles.add(folder / "add.tfb"),
    ]
    config = folder / "agent.toml"
    config.write_text("".join(f'[[models]]\nbundle = "{path}"\n' for path in models))
    with serving(None, folder / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(write_tokenizer(folder)))


def generate(agent: Agent, text: str, model: str = "decoder", **parameters: Any) -> dict[str, Any]:
    asked = {"text_input": text, "parameters": {"temperature": 0, **parameters}}
    status, body, headers = agent.post(asked, path=f"/v2/models/{model}/generate")
    assert status == 200, body
    assert headers["Content-Type"] == "application/json"
    answer: dict[str, Any] = json.loads(body)
    return answer


def events(agent: Agent, text: str, model: str = "decoder", **parameters: Any) -> list[dict[str, Any]]:
    asked = {"text_input": text, "parameters": {"temperature": 0, **parameters}}
    status, body, headers = agent.post(asked, path=f"/v2/models/{model}/generate_stream")
    assert status == 200, body
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    lines = body.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refused(agent: Agent, body: bytes | dict[str, Any], model: str = "decoder", status: int = 400) -> str:
    for path in ("generate", "generate_stream"):
        code, answer, headers = agent.post(body, path=f"/v2/models/{model}/{path}")
        assert code == status, answer
        assert headers["Content-Type"] == "application/json"
    return str(json.loads(answer)["error"])


# --- what is generated


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_are_those_of_the_runtime_alone(prompt: str, agent: Agent, tokenizer: Tokenizer, folder: Path) -> None:
    prompt = tokenizer.decode(tokenizer.encode(prompt).ids[:LONGEST])
    tokens = tokenizer.encode(prompt).ids
    # The first is made of the prompt, and each after that of one more, while no more than LONGEST are behind it.
    room = LONGEST + 2 - len(tokens)
    expected = greedy(folder / "decoder.onnx", tokens, room)
    if EOS in expected:
        expected = expected[: expected.index(EOS) + 1]
    answer = generate(agent, prompt, max_tokens=1000, details=True)
    details = answer["details"]
    assert [token["id"] for token in details["logprobs"]] == expected
    assert details["finish_reason"] == ("eos_token" if expected[-1] == EOS else "length")
    assert (details["prompt_tokens"], details["generated_tokens"]) == (len(tokens), len(expected))
    whole = tokenizer.decode(tokens + expected)
    assert (tokenizer.decode(tokens) + answer["text_output"]).rstrip("\ufffd") == whole.rstrip("\ufffd")
    assert all(token["logprob"] <= 0 for token in details["logprobs"])


def test_a_stream_says_the_same_piece_by_piece(agent: Agent) -> None:
    whole = generate(agent, "the end", max_tokens=12, details=True)
    pieces = events(agent, "the end", max_tokens=12, details=True)
    assert "".join(piece["text_output"] for piece in pieces) == whole["text_output"]
    assert [piece["details"]["token"] for piece in pieces] == whole["details"]["logprobs"]
    assert [piece["details"].get("finish_reason") for piece in pieces] == [None] * 11 + ["length"]
    assert all(piece["model_name"] == "decoder" for piece in pieces)
    short = events(agent, "the end", max_tokens=12)
    assert "".join(piece["text_output"] for piece in short) == whole["text_output"]
    assert short[-1]["details"] == {"finish_reason": "length", "prompt_tokens": 5, "generated_tokens": 12}
    assert all("details" not in piece for piece in short[:-1])


def test_state_begins_anew_with_every_text(agent: Agent) -> None:
    first = generate(agent, "the end", "forever", max_tokens=30)["text_output"]
    generate(agent, "in the", "forever", max_tokens=7)
    assert generate(agent, "the end", "forever", max_tokens=30)["text_output"] == first


def test_texts_at_once_do_not_mix(agent: Agent) -> None:
    alone = {text: generate(agent, text, "forever", max_tokens=200)["text_output"] for text in ("the", "other")}
    with open_stream(agent, "the", max_tokens=200) as stream:
        assert generate(agent, "other", "forever", max_tokens=200)["text_output"] == alone["other"]
        text = stream.read().decode()
    pieces = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-1]]
    assert "".join(piece["text_output"] for piece in pieces) == alone["the"]


def test_a_stop_string_ends_it_and_is_not_shown(agent: Agent) -> None:
    whole = generate(agent, "the end", "forever", max_tokens=200)["text_output"]
    stop = next(whole[at : at + 2] for at in range(20, len(whole)) if "\ufffd" not in whole[at : at + 2])
    answer = generate(agent, "the end", "forever", max_tokens=200, stop=[stop, "never said"])
    assert answer["text_output"] == whole[: whole.index(stop)]
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert generate(agent, "the end", "forever", max_tokens=200, stop=stop)["text_output"] == answer["text_output"]


def test_equal_seeds_give_equal_texts(agent: Agent) -> None:
    said = [generate(agent, "the", temperature=1.5, seed=seed, max_tokens=20)["text_output"] for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_twenty_tokens_where_nobody_says_and_parameters_beside_the_text(agent: Agent) -> None:
    assert generate(agent, "the", "forever")["details"]["generated_tokens"] == 20
    body = {"text_input": "the", "max_tokens": 3, "stream": False}
    status, answer, _ = agent.post(body, path="/v2/models/forever/versions/" + version(agent) + "/generate")
    assert (status, json.loads(answer)["details"]["generated_tokens"]) == (200, 3)


def version(agent: Agent) -> str:
    return str(json.loads(agent.request("/v2/models/forever")[1])["versions"][0])


# --- what is refused


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not a valid generate request"),
        (b'{"text_input": "\xff"}', "not a valid generate request: Invalid UTF-8"),
        (b'{"text_input": "\\ud800"}', "not a valid generate request"),
        (b'["the"]', "not a valid generate request"),
        ({"parameters": {}}, "text_input is missing"),
        ({"text_input": 3}, "text_input is missing, or is no string"),
        ({"text_input": ""}, "text_input has no tokens"),
        ({"text_input": "the", "parameters": []}, "parameters are no object"),
        ({"text_input": "the", "parameters": {"max_tokes": 3}}, "did you mean 'max_tokens'"),
        ({"text_input": "the", "top_q": 3}, "unknown parameter 'top_q'"),
        ({"text_input": "the", "max_tokens": 0}, "parameter max_tokens is '0' (it must be a whole number from 1"),
        ({"text_input": "the", "max_tokens": FOREVER + 1}, "parameter max_tokens is '65537'"),
        ({"text_input": "the", "max_tokens": True}, "parameter max_tokens is 'True'"),
        ({"text_input": "the", "temperature": -1}, "parameter temperature is '-1'"),
        ({"text_input": "the", "top_p": 1.5}, "parameter top_p is '1.5' (it must be a number from 0 to 1)"),
        ({"text_input": "the", "stop": [""]}, "parameter stop"),
        ({"text_input": "the", "stop": ["a"] * 17}, "parameter stop"),
        ({"text_input": "the", "priority": 256}, "parameter priority is '256'"),
        ({"text_input": "x" * (LONGEST + 1)}, f"{LONGEST + 1} tokens, the model can look back on {LONGEST}"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(body: bytes | dict[str, Any], why: str, agent: Agent) -> None:
    assert why in refused(agent, body)


def test_a_model_that_generates_no_text(agent: Agent) -> None:
    assert "model 'add' generates no text: it has no state pairs" in refused(agent, {"text_input": "the"}, "add")
    refused(agent, {"text_input": "the"}, "nobody", 404)


def test_a_body_that_no_prompt_needs(agent: Agent) -> None:
    assert "1.0 MiB" in refused(agent, b" " * ((1 << 20) + 1), status=413)


def test_a_deadline_that_cannot_be_met(agent: Agent) -> None:
    refused(agent, {"text_input": "the", "timeout": 1}, "forever", 504)


# --- the end of a client


@contextlib.contextmanager
def open_stream(agent: Agent, text: str, path: str = "generate_stream", **parameters: Any) -> Iterator[Any]:
    """A client that has asked what the model says that goes on forever; it goes when the block ends."""
    body = json.dumps({"text_input": text, "parameters": {"temperature": 0, **parameters}})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", agent.port, timeout=120)) as connection:
        connection.request("POST", f"/v2/models/forever/{path}", body)
        if path == "generate":
            yield None
            return
        with connection.getresponse() as response:
            yield response


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_the_slot_of_a_client_that_goes_is_free(path: str, agent: Agent) -> None:
    with open_stream(agent, "the", path, max_tokens=FOREVER) as stream:
        until(lambda: agent.metric("tightfit_in_flight", model="forever") == 1)
        if path == "generate_stream":
            assert stream.readline().startswith(b"data: ")
    until(lambda: agent.metric("tightfit_in_flight", model="forever") == 0)
    assert generate(agent, "the", "forever", max_tokens=3)["details"]["generated_tokens"] == 3


def test_others_have_their_turn_meanwhile(agent: Agent) -> None:
    with open_stream(agent, "the", max_tokens=FOREVER) as stream:
        assert stream.readline().startswith(b"data: ")
        assert generate(agent, "the end", max_tokens=10)["details"]["generated_tokens"] == 10
        values = {"shape": [1, 8], "datatype": "FP32", "data": [1.0] * 8}
        status, _, _ = agent.post({"inputs": [{"name": n, **values} for n in "ab"]}, path="/v2/models/add/infer")
        assert status == 200
        assert stream.readline() == b"\n"
    until(lambda: agent.metric("tightfit_in_flight") == 0)


def test_what_ends_a_text_before_it_is_done(tmp_path: Path) -> None:
    recurrent(tmp_path / "forever.tfb")
    config = tmp_path / "agent.toml"
    config.write_text(f'bundle = "{tmp_path / "forever.tfb"}"\n[requests]\ndrain_s = 0.5\n')
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        with open_stream(agent, "the", max_tokens=FOREVER) as stream:
            assert stream.readline().startswith(b"data: ")
            os.kill(agent.engine_pid, signal.SIGKILL)
            assert "the engine process was killed by SIGKILL" in last_error(stream)
        until(lambda: agent.metric("tightfit_engine_up") == 1)
        with open_stream(agent, "the", max_tokens=FOREVER) as stream:
            assert stream.readline().startswith(b"data: ")
            agent.process.send_signal(signal.SIGTERM)
            assert last_error(stream) == "the agent stopped before it was done"
        assert agent.process.wait(60) == 0
    assert "Traceback" not in agent.log


def last_error(stream: http.client.HTTPResponse) -> str:
    """What the last event of a stream says."""
    last = stream.read().decode().rstrip("\n").rsplit("\n", 1)[-1]
    return str(json.loads(last.removeprefix("data: "))["error"])
