"""The processor as far as it decides how weights are laid out, from /proc/cpuinfo."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

CPUINFO = Path("/proc/cpuinfo")
# Which kernels a runtime picks, and so the layout of their weights, follows from vector and matrix instructions.
# x86 lists a hundred other flags, some of them only since a kernel update, which must not make a cache stale.
_X86_FLAGS = re.compile(r"(sse|ssse3|avx|fma|f16c|amx|bmi|gfni).*")
_MODEL_FIELDS = (
    *("vendor_id", "cpu family", "model", "stepping", "model name"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)


class Cpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Architecture, every model of core there is, and the instructions that all of them have."""

    architecture: str
    models: tuple[str, ...]
    features: tuple[str, ...]


def this_cpu() -> Cpu:
    """The processor that this process runs on."""
    return parse_cpuinfo(platform.machine(), CPUINFO.read_text(encoding="utf-8", errors="replace"))


def parse_cpuinfo(architecture: str, text: str) -> Cpu:
    """Read the kernel's text: one block a core; boards with two kinds of core show both."""
    blocks = [dict(_fields(block.splitlines())) for block in text.strip().split("\n\n")]
    models = {" ".join(block[name] for name in _MODEL_FIELDS if name in block) for block in blocks}
    features = [_features(block) for block in blocks if "flags" in block or "Features" in block]
    common = set.intersection(*features) if features else set()
    return Cpu(architecture, tuple(sorted(models - {""})), tuple(sorted(common)))


def _fields(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip(), value.strip()


def _features(block: dict[str, str]) -> set[str]:
    if "flags" in block:
        return {flag for flag in block["flags"].split() if _X86_FLAGS.fullmatch(flag)}
    return set(block["Features"].split())
