"""Models with state: what is found, what it is called, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from compile.states import terms_of
from targets.bundle import read_manifest
from targets.generation import Generation, roles
from targets.states import State, Sum
from tests.support.commands import Run, refused, runner
from tests.support.decoders import EOS, SHAPES, vocabulary, write_decoder, write_tokenizer
from tests.support.models import init, model, node, save, value

BOARD = "x86-64-dev"


@pytest.fixture
def tightfit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "decoder.onnx")


def shapes(*given: str) -> list[str]:
    return [word for each in given for word in ("--shape", each)]


@pytest.mark.usefixtures("unobserved")
def test_pairs_are_found_by_their_names_and_the_mask_follows(tightfit: Run, decoder: Path, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    out = tmp_path / "decoder.tfb"
    done = tightfit(decoder, "--target", BOARD, "-o", out, *shapes(*SHAPES), "--tokenizer", tokenizer)
    assert done.code == 0, done.err
    manifest = read_manifest(out)
    contract = manifest.contract
    assert contract.states == tuple(
        State(f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}", 2)
        for layer in range(2)
        for kind in ("key", "value")
    )
    assert contract.sums == (Sum("attention_mask_1", ("past", "t")),)
    assert (contract.dims["past"].min, contract.dims["past"].max, contract.batch) == (0, 48, None)
    assert manifest.generation == Generation("assets/tokenizer.json", (EOS,))
    assert (out / "assets/tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert roles(contract).vocabulary == len(vocabulary())
    slots = next(term for term in manifest.plan.phase("run").terms if term.name == "io_slots")
    assert slots.nbytes >= manifest.plan.slots * sum(map(sum, contract.places))


@pytest.mark.usefixtures("unobserved")
def test_state_that_keeps_its_shape_is_named_by_hand(tightfit: Run, tmp_path: Path) -> None:
    x, h = value("x", [1, 4]), value("h", [1, 4])
    graph = model([node("Add", ["x", "h"], ["hN"]), node("Mul", ["hN", "two"], ["y"])], [x, h],
                  [value("y", [1, 4]), value("hN", [1, 4])], [init("two", np.float32([2]))])  # fmt: skip
    source = save(tmp_path, graph)
    out = tmp_path / "recurrent.tfb"
    assert tightfit(source, "--target", BOARD, "-o", out).code == 0
    assert not read_manifest(out).contract.states
    assert b'"states"' not in (out / "manifest.json").read_bytes()
    assert tightfit(source, "--target", BOARD, "-o", out, "--overwrite", "--state", "h=hN").code == 0
    assert read_manifest(out).contract.states == (State("h", "hN"),)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--state", "h"], "--state 'h' is no pair .*INPUT=OUTPUT"),
        (["--state", "past=logits"], "--state: no input 'past'.*past_key_values.0.key"),
        (["--state", "past_key_values.0.key=present"], "--state: no output 'present'.*present.0.key"),
        (["--state", "input_ids=logits"], "--state input_ids=logits: .* are of two types"),
        (["--shape", "attention_mask=1,1..50"], r"'past \+ t' to 1..50, but it is past \+ t, which is 1..52"),
        (["--batch-axis", "t"], "--batch-axis: requests with state do not run together"),
    ],
)
def test_what_cannot_be(options: list[str], why: str, tightfit: Run, decoder: Path, tmp_path: Path) -> None:
    refused(tightfit, tmp_path, why, decoder, "--target", BOARD, *shapes(*SHAPES), *options)


def test_a_past_that_does_not_begin_empty_is_no_state(tightfit: Run, decoder: Path, tmp_path: Path) -> None:
    given = shapes(SHAPES[0], "past_key_values.*=1,2,1..48,8")
    lacking = "the model has no state pairs, and generates no text"
    refused(tightfit, tmp_path, lacking, decoder, "--target", BOARD, *given, "--tokenizer", write_tokenizer(tmp_path))


@pytest.mark.parametrize(
    ("text", "config", "why"),
    [
        ("[1]", None, "not a JSON object"),
        ("{}", None, "has no vocabulary"),
        ('{"model": {"vocab": {"a": "b"}}}', None, "has no vocabulary"),
        ('{"model": {"vocab": {"a": 265}}}', None, "--tokenizer knows 266 tokens, the model scores 265"),
        ('{"model": {"vocab": [["a", 0], ["b", -1]]}}', {"eos_token_id": [1, 2]}, "eos_token_id 2 is none of the 2"),
    ],
)
def test_what_is_no_tokenizer(
    text: str, config: dict[str, object] | None, why: str, tightfit: Run, decoder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    if config is not None:
        path.with_name("generation_config.json").write_text(json.dumps(config))
    refused(tightfit, tmp_path, why, decoder, "--target", BOARD, *shapes(*SHAPES), "--tokenizer", path)


@pytest.mark.usefixtures("unobserved")
def test_what_is_said_of_it(tightfit: Run, decoder: Path, tmp_path: Path) -> None:
    given = ["--target", BOARD, "-o", tmp_path / "o.tfb", *shapes(*SHAPES), "--tokenizer", write_tokenizer(tmp_path)]
    done = tightfit(decoder, *given)
    assert "keeps  4 pairs of state, present.0.key to past_key_values.0.key the first" in done.out.replace("\n", " ")
    assert "writes text with assets/tokenizer.json; tokens that end it: 0" in done.out


PAIRS = [("past.0.k", "present.0.k"), ("past.0.v", "present.0.v")]
AXES = {
    "input_ids": ["batch", "new"],
    "attention_mask": ["batch", "total"],
    "past.0.k": ["batch", 3, "old", 64],
    "past.0.v": ["batch", 3, "old", 64],
}


@pytest.mark.parametrize(
    ("symbol", "changed", "terms"),
    [
        ("past_sequence_length + sequence_length", {}, ("past_sequence_length", "sequence_length")),
        ("past+1", {}, ("past", 1)),
        ("total", {}, ("old", "new")),
        ("total", {"input_ids": ["batch", 1]}, ("old", 1)),
        ("old", {}, ()),
        ("batch", {}, ()),
        ("floor(n/2) + 1", {}, ()),
        ("total", {"attention_mask": ["batch", 1, "total", "other"]}, ()),
        ("total", {"past.0.v": ["batch", 3, "older", 64]}, ()),
        ("new", {"attention_mask": ["batch", "new"]}, ()),
    ],
)
def test_what_a_dimension_is_the_sum_of(
    symbol: str, changed: dict[str, list[int | str]], terms: tuple[int | str, ...]
) -> None:
    assert terms_of(symbol, AXES | changed, PAIRS) == terms
