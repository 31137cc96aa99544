"""Runs of a model that may not take more than so much memory."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from compile.backends.base import Model, Tensors


@dataclasses.dataclass(frozen=True)
class BoundedModel:
    """A loaded model whose runs take at most so much memory of their own.

    That can depend on the data, and is known no sooner. Allocations beyond the bound fail, which onnxruntime says in
    its own words. RLIMIT_DATA is what bounds them: mapped weights do not count.
    """

    model: Model
    nbytes: int

    def run(self, inputs: Tensors) -> dict[str, npt.NDArray[Any]]:
        with _bounded(max(self.nbytes, _LEAST)):
            return self.model.run(inputs)


# Whatever compiling may take, the compiler itself takes more than this.
_LEAST = 100 << 20


@contextlib.contextmanager
def _bounded(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    found = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    wanted = (int(found[1]) << 10) + nbytes if found else hard
    bounds = [each for each in (soft, hard, wanted) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds, default=soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
