"""Triton's own load generator against the agent: it must run unchanged, and what it prints is kept.

    python -m bench.perf_analyzer                     # fetches it (some 30 MB), serves a tiny model, prints

perf_analyzer is a package of the Python package index. It is linked against glibc 2.38; where that of the machine is
older, its libraries are taken out of Debian packages of a newer suite, from the mirror that apt uses here, into the
cache, and nothing is installed. Nothing that it needs is committed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.machine import describe_machine, measured_on
from bench.models import cache_folder
from bench.rivals.server import ServerError, run_once
from bench.rivals.tightfit import bundle_of, serving
from bench.served_models import TINY

RESULT = Path(__file__).parent / "results" / "perf_analyzer.md"
WHEEL, TAG = "perf-analyzer==2.60.0", "manylinux_2_38_x86_64"
_GLIBC = (2, 38)
_SUITE = "trixie"
_LIBRARIES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_HINT = "it needs pip and, on Debian before 13, apt"
# What it is asked to do.
RUNS: dict[str, tuple[str, ...]] = {
    "closed loop": ("--concurrency-range", "1:8:7"),
    "closed loop, asynchronous": ("--async", "--concurrency-range", "4"),
    "open loop, Poisson arrivals": ("--request-rate-range", "500", "--request-distribution", "poisson"),
    "batches of 4": ("-b", "4", "--concurrency-range", "2"),
    "JSON": ("--input-tensor-format", "json", "--output-tensor-format", "json", "--concurrency-range", "1"),
}
# Three measurements each, however much they differ: whether it runs is asked here, and bench.http measures.
_LIMITS = ("--measurement-interval", "1500", "--stability-percentage", "999")
_RUN_S = 120.0
_CELLS = (
    r"Throughput: ([\d.]+)", r"p50 latency: (\d+)", r"p99 latency: (\d+)", r"Avg request latency: (\d+)",
    r"overhead (\d+)", r"queue (\d+)", r"compute input (\d+)", r"compute infer (\d+)", r"compute output (\d+)",
)  # fmt: skip
_TABLE = """\
# Triton's perf_analyzer against the agent

{wheel}, unchanged, on a tiny model (FP32[n,64] times a matrix). Made by `python -m bench.perf_analyzer --save`.
It shows that it runs, and that what the server says of itself adds up; `bench.http` is what compares. Times are in
microseconds, the last six out of the server's statistics. The machine's load was {load:.0f}, this run's included.

| run | connections, or rate | inferences/s | p50 | p99 | in the server | overhead | queue | input | infer | output |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}

{machine}
"""


def command_in(cache: Path) -> list[str]:
    """How perf_analyzer is started, fetched before where it is not there. Raises ServerError."""
    folder = cache / "perf_analyzer"
    found = _program(folder)
    if found is None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--platform", TAG]
        run_once([*pip, "-d", str(folder / "pip"), WHEEL], "perf_analyzer cannot be fetched", _HINT)
        (wheel,) = (folder / "pip").glob("*.whl")
        run_once([sys.executable, "-m", "zipfile", "-e", str(wheel), str(folder / "wheel")], "unpacking failed", _HINT)
        found = _program(folder)
        if found is None:
            raise ServerError(f"{WHEEL} has no program perf_analyzer", _HINT)
    found.chmod(0o755)
    if tuple(map(int, platform.libc_ver()[1].split(".")[:2])) >= _GLIBC:
        return [str(found)]
    libraries = _libraries(folder / "debian") / "usr/lib/x86_64-linux-gnu"
    return [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(found)]


def _program(folder: Path) -> Path | None:
    return next((path for path in folder.glob("wheel/**/perf_analyzer") if path.is_file()), None)


def _libraries(folder: Path) -> Path:
    """The root that Debian's packages are unpacked in. Raises ServerError."""
    root = folder / "root"
    if (root / "complete").exists():
        return root
    targets = run_once(["apt-get", "indextargets", "--format", "$(REPO_URI)"], "apt names no mirror", _HINT).split()
    mirror = next((each for each in targets if re.search(r"/debian/?$", each)), None)
    if mirror is None:
        raise ServerError("apt has no Debian mirror here", _HINT)
    for name in ("state/lists/partial", "cache/archives/partial", "debs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    sources.write_text(f"deb [signed-by={_KEYRING}] {mirror} {_SUITE} main\n", encoding="utf-8")
    (folder / "status").touch()
    options = [
        f"Dir::Etc::sourcelist={sources}", "Dir::Etc::sourceparts=-", f"Dir::State={folder}/state",
        f"Dir::State::status={folder}/status", f"Dir::Cache={folder}/cache", "APT::Sandbox::User=root",
    ]  # fmt: skip
    apt = ["apt-get", "-qq", *(part for option in options for part in ("-o", option))]
    run_once([*apt, "update"], f"the packages of {_SUITE} cannot be listed", _HINT)
    run_once([*apt, "download", *_LIBRARIES], "the libraries cannot be fetched", _HINT, folder / "debs")
    for package in (folder / "debs").glob("*.deb"):
        run_once(["dpkg", "-x", str(package), str(root)], f"{package.name} cannot be unpacked", _HINT)
    (root / "complete").touch()
    return root


def analyze(command: Sequence[str]) -> str:
    """What one run says. Raises ServerError."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
    except subprocess.TimeoutExpired:
        raise ServerError(f"perf_analyzer did not end within {_RUN_S:g} s") from None
    if run.returncode:
        raise ServerError(f"perf_analyzer failed: {(run.stdout + run.stderr)[-2000:]}")
    return run.stdout


def rows_of(name: str, said: str) -> list[str]:
    """Rows of the table: throughput, latency as the client sees it, and where the server says that it went."""
    rows = []
    _, *parts = re.split(r"^Request (?:concurrency|Rate): (\d+)(?: .*)?$", said, flags=re.MULTILINE)
    for number, part in zip(parts[::2], parts[1::2], strict=True):
        found = [re.search(pattern, part) for pattern in _CELLS]
        cells = [f"{float(each[1]):.0f}" if each else "" for each in found]
        rows.append(f"| {name} | {number} | {' | '.join(cells)} |")
    return rows


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{RESULT.name}")
    save = parser.parse_args().save
    rows: list[str] = []
    try:
        command = command_in(cache_folder().parent)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            bundle = bundle_of(TINY, TINY.write(folder), folder)
            with serving([bundle], folder / "agent") as agent:
                asked = [*command, "-m", TINY.name, "-u", agent.address.removeprefix("http://")]
                for name, arguments in RUNS.items():
                    said = analyze([*asked, "-i", "http", *_LIMITS, *arguments])
                    print(f"## {name}\n\n{said}", flush=True)
                    rows += rows_of(name, said)
        if save:
            machine = measured_on(describe_machine("onnxruntime", "uvloop"))
            table = _TABLE.format(wheel=WHEEL, load=os.getloadavg()[0], rows="\n".join(rows), machine=machine)
            RESULT.write_text(table, encoding="utf-8")
    except ServerError as error:
        print(f"bench.perf_analyzer: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
