"""Random valid graphs through every scheme: what is emitted runs, and gives what the source gives."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.graphs import Random, compile_and_compare, models
from tests.support.models import SCHEME_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEME_NAMES)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], max_examples=50)
@given(drawn=models())
def test_a_random_model_is_emitted_valid_and_gives_what_its_source_gives(scheme: str, drawn: Random) -> None:
    compile_and_compare(drawn, scheme)
