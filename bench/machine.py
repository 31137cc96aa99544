"""What a benchmark ran on: processor, cores and versions, never the name of a machine or a path."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path


def threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine(*packages: str) -> dict[str, str]:
    """Processor, cores, memory, Python and the named packages, as text."""
    described = {
        "CPU": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": str(threads()),
        "memory": f"{int(_field(Path('/proc/meminfo'), 'MemTotal').split()[0]) / (1 << 20):.0f} GiB",
        "Python": platform.python_version(),
    }
    return described | {package: metadata.version(package) for package in packages}


def measured_on(machine: Mapping[str, str]) -> str:
    """The line that ends every table of results."""
    return "Measured on: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + "."


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
