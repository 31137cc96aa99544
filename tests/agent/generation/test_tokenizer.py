"""A bundle's tokenizer: loaded when there is one, and refused when it is not the model's."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from agent.errors import AgentError
from agent.generation.tokenizer import load_text
from agent.models import Model, open_model
from targets.bundle import read_manifest
from targets.errors import BundleError
from targets.generation import Generation
from targets.tensor import DType
from tests.support.bundles import identity, rewrite
from tests.support.decoders import EOS, decoder, vocabulary

BUDGET = 4 << 30


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return open_model(decoder(tmp_path / "decoder.tfb"), BUDGET)


def test_text_to_tokens_and_back(model: Model) -> None:
    text = load_text(model)
    assert text is not None
    assert text.eos == (EOS,)
    tokens = text.encode("the é<|end|>")
    assert tokens[0] == vocabulary()["the"]
    assert tokens[-1] == EOS
    assert text.decode(tokens) == "the é"
    assert text.spell(EOS) == ("<|end|>", True)
    assert text.spell(tokens[0]) == ("the", False)


def test_a_bundle_without_one(tmp_path: Path) -> None:
    assert load_text(open_model(identity(tmp_path / "x.tfb", DType.FLOAT32), BUDGET)) is None


def test_without_the_library(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(AgentError, match=r"generates text, and tokenizers is not installed .*\[agent,cpu,text\]"):
        load_text(model)


def changed(model: Model, **changes: object) -> Model:
    rewrite(model.folder, read_manifest(model.folder), **changes)
    return open_model(model.folder, BUDGET)


def test_a_tokenizer_that_is_none(model: Model) -> None:
    (model.folder / "assets/tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"assets/tokenizer.json is no tokenizer"):
        load_text(changed(model))


def test_a_tokenizer_that_is_not_the_models(model: Model) -> None:
    with pytest.raises(BundleError, match=r"has more tokens than the 265 that the model scores"):
        load_text(changed(model, generation=Generation("assets/tokenizer.json", (265,))))
    with pytest.raises(BundleError, match=r"has no assets/other.json"):
        load_text(changed(model, generation=Generation("assets/other.json")))


def test_a_tokenizer_of_a_model_without_state(model: Model) -> None:
    contract = msgspec.structs.replace(model.contract, states=msgspec.UNSET)
    with pytest.raises(BundleError, match=r"decoder has a tokenizer, but the model has no state pairs"):
        load_text(changed(model, contract=contract))
