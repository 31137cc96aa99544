"""Converted models say what the originals say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.bundle_runner import session_of
from bench.models import fetch

# "The capital of France is", and what must come next: " Paris" and "."
PROMPT, EXPECTED = [504, 3575, 282, 4649, 314], [7042, 30]
LAYERS = 30


@pytest.mark.slow
def test_smollm2_knows_paris_with_and_without_its_cache() -> None:
    session = session_of(fetch("smollm2-135m"), 2)
    names = [output.name for output in session.get_outputs()]
    empty: dict[str, NDArray[Any]] = {
        f"past.{layer}.{kind}": np.zeros((1, 3, 0, 64), np.float32) for layer in range(LAYERS) for kind in "kv"
    }

    def step(tokens: list[int], past: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return dict(zip(names, session.run(None, {"input_ids": np.array([tokens], np.int64), **past}), strict=True))

    tokens, past, said = PROMPT, empty, []
    for _ in EXPECTED:
        out = step(tokens, past)
        tokens = [int(out["logits"][-1].argmax())]
        past = {name.replace("present", "past"): value for name, value in out.items() if name != "logits"}
        said += tokens
    assert said == EXPECTED
    whole = step([*PROMPT, EXPECTED[0]], empty)
    np.testing.assert_allclose(whole["logits"][-1], out["logits"][-1], atol=2e-3)


@pytest.mark.slow
def test_minilm_tells_near_from_far() -> None:
    session = session_of(fetch("minilm"), 2)
    # [CLS] the cat [SEP], [CLS] a kitten [SEP], [CLS] engineers [SEP] [PAD]
    tokens = np.array([[101, 1996, 4937, 102], [101, 1037, 18401, 102], [101, 6145, 102, 0]], np.int64)
    mask = (tokens != 0).astype(np.int64)
    (embedding,) = session.run(None, {"input_ids": tokens, "attention_mask": mask})
    near = embedding @ embedding.T
    np.testing.assert_allclose(np.diag(near), 1, atol=1e-5)
    assert near[0, 1] > 0.5 > near[0, 2]
    # Padding changes nothing.
    (alone,) = session.run(None, {"input_ids": tokens[2:, :3], "attention_mask": mask[2:, :3]})
    np.testing.assert_allclose(alone[0], embedding[2], atol=1e-4)
