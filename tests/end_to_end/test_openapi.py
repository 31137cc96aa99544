"""A program that knows nothing of the agent but its description asks it everything that this allows, and what not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support import bundles
from tests.support.agents import Agent, serving
from tests.support.wire import LANES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from schemathesis import GenerationMode, openapi
    from schemathesis.checks import CHECKS, load_all_checks

load_all_checks()
# A schema cannot say that dimensions agree, or how much data a shape needs.
UNSAID = CHECKS.get_by_names(["positive_data_acceptance"])
# What goes on for days has tests of its own.
ENDLESS = r"/(events|results|stream|generate_stream)$"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("openapi")
    with serving(bundles.picking(folder / "pick.tfb"), folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_operation_does_what_is_described(agent: Agent, mode: GenerationMode, lane: str) -> None:
    description = openapi.from_url(f"{agent.url}/v2/openapi.json").exclude(path_regex=ENDLESS)
    operations = [each.ok() for each in description.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:
        # What has no body has nothing to be wrong but its path, and of shared memory no body is read.
        operations = [each for each in operations if each.method == "post" and "sharedmemory" not in each.path]
    assert len(operations) >= 10
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=2, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        def ask(case: Any) -> None:
            case.call_and_validate(excluded_checks=UNSAID, headers=LANES[lane])

        ask()
