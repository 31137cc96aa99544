"""A sample of the onnx package's conformance models through the whole compiler; all of them: `bench.conformance`."""

from __future__ import annotations

import pytest

from bench.conformance import Outcome, conformance_models, run_all, run_compiled
from tests.support.models import SCHEME_NAMES

EVERY = 27
SERVED_LATER = "inputs and outputs of a bundle are dense tensors"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_27th_model_compiles_under_every_scheme_and_gives_what_is_expected() -> None:
    cases = conformance_models()
    assert len(cases) == 1905
    sample = cases[::EVERY]
    ran = 0
    for source, *compiled in run_all(sample, SCHEME_NAMES, 2, plan=True):
        for result in compiled:
            assert result.outcome is not Outcome.CRASHED, result
            if source.outcome is Outcome.EQUAL and SERVED_LATER not in result.reason:
                assert result.outcome is Outcome.EQUAL, result
                ran += 1
    assert ran > len(sample) * len(SCHEME_NAMES) // 2


def test_a_branch_that_the_inputs_do_not_take_may_be_wrong_for_them() -> None:
    (case,) = (each for each in conformance_models() if each.name == "node/test_affine_grid_3d_expanded")
    result = run_compiled(case, "fp32")
    assert result.outcome is Outcome.EQUAL, result
