"""Settings of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine must not fail a property test, and a run must be repeatable. To look for new counterexamples:
# HYPOTHESIS_PROFILE=explore scripts/test --fast
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes many seconds; left out by scripts/test --fast")


# Where scripts/test wants to know which tests failed. Taken out, so that no test that runs pytest notes its own.
_failed_tests = os.environ.pop("TIGHTFIT_FAILED_TESTS", None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and _failed_tests:
        with Path(_failed_tests).open("a", encoding="utf-8") as noted:
            noted.write(f"{report.nodeid}\n")
