"""Fixtures of the compiler's tests, which these are too."""

from __future__ import annotations

from tests.compile.conftest import _small_heap, unobserved

__all__ = ["_small_heap", "unobserved"]
