"""Marks of the tests that take longer than the rest together."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes many seconds; left out by scripts/test --fast")
