"""Settings of all tests."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Generator
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


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Behind the last test, before pytest-cov combines what processes have measured: one that was killed while it wrote
    that down left half a database, which could fail the run."""
    result = yield
    for file in session.config.rootpath.glob(".coverage.*"):
        if not _is_whole(file):
            file.unlink(missing_ok=True)
    return result


def _is_whole(database: Path) -> bool:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        try:
            return connection.execute("pragma quick_check").fetchall() == [("ok",)]
        except sqlite3.Error:
            return False
