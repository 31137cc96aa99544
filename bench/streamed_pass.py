"""What a pass over a streamed bundle takes, beside the floor: `python -m bench.streamed_pass BUNDLE`.

Three figures of one run: a pass as the plan has it, under the board's budget, which the kernel enforces; a pass of the
same bundle with all weights in memory and no limit (computing alone); and the storage's rate, read by dd, cold, from
the laid-out files. No pass can be faster than the larger of computing and reading, if the two overlap fully.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.dd import drop_caches, read_seconds
from bench.machine import describe_machine, measured_on
from compile.limits import limited
from compile.serving import Requests, finalise_command, serve_command, started
from compile.speed import Speed, measure
from targets.bundle import Manifest, Residency, read_manifest

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 3600.0
# Requests in all, and rounds of all slots full at the least.
REQUESTS, ROUNDS = 10, 2


def streamed_pass(bundle: Path) -> dict[str, Any]:
    """The figures, in seconds and bytes; `ratio` is the pass over its floor. The bundle must be streamed in part."""
    manifest = read_manifest(bundle)
    sweep = manifest.plan.sweep
    if sweep is None:
        raise SystemExit(f"{bundle} is not streamed: all of it stays in memory")
    with tempfile.TemporaryDirectory(prefix=".tightfit-pass-", dir=bundle.parent) as name:
        folder = Path(name)
        cache = folder / "finalised"
        with started(finalise_command(bundle, cache), None, folder) as finalising:
            finalising.wait_end(TIMEOUT_S)
        files = sorted(cache.rglob("*.bin"))
        nbytes = sum(path.stat().st_size for path in files)
        rate = nbytes / sum(read_seconds(path) for path in files)
        drop_caches()
        streamed = served(bundle, manifest, cache, folder, None)
        computed = served(bundle, manifest, cache, folder, Residency.MAPPED)
    # Requests share a pass where it is streamed, and compute one after the other all the same.
    shared = streamed.requests / streamed.passes
    computing_s = computed.pass_s * shared
    floor = max(computing_s, sweep.pass_bytes / rate)
    return {
        "pass_s": streamed.pass_s,
        "requests": round(shared, 3),
        "computing_s": round(computing_s, 6),
        "storage_bytes_per_s": round(rate),
        "reading_s": round(sweep.pass_bytes / rate, 3),
        "ratio": round(streamed.pass_s / floor, 3),
        "planned_bytes": sweep.pass_bytes,
        "opened_bytes": streamed.opened_bytes,
        "disk_bytes": streamed.disk_bytes,
        "all_bytes": sum(sweep.segment_bytes),
        "lru_bytes": sweep.lru_bytes,
        "belady_bytes": sweep.belady_bytes,
        "segments": len(manifest.segments),
        "streamed_segments": len(sweep.streamed),
    }


def served(bundle: Path, manifest: Manifest, cache: Path, folder: Path, residency: Residency | None) -> Speed:
    """Requests of the largest shape, all slots full: under the budget as planned, or without a limit where every
    segment has another residency than the plan's."""
    command = serve_command(bundle, folder, cache, TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        limit = stack.enter_context(limited(manifest.plan.budget_bytes)) if residency is None else None
        if residency is not None:
            command += ["--residency", residency.value]
        service = stack.enter_context(started(command, limit, folder))
        service.wait_ready(TIMEOUT_S)
        rounds = max(ROUNDS, REQUESTS // manifest.plan.slots)
        requests = Requests(bundle, manifest, manifest.plan.slots * (rounds + 1))
        # The first round shows what a pass reads for the most part, and brings in what stays.
        measure(service, manifest, requests, 1, TIMEOUT_S)
        return measure(service, manifest, requests, rounds, TIMEOUT_S)


def report(figures: dict[str, Any]) -> list[str]:
    """The figures for people."""
    mib = {key: f"{figures[key] / 2**20:,.0f} MiB" for key in figures if key.endswith("_bytes") and figures[key]}
    read, planned = figures["opened_bytes"], figures["planned_bytes"]
    return [
        f"A pass of {figures['requests']:g} requests takes {figures['pass_s']:.3g} s: {figures['ratio']} times the "
        f"larger of computing ({figures['computing_s']:.3g} s with all weights in memory) and reading "
        f"({figures['reading_s']:.3g} s at {figures['storage_bytes_per_s'] / 1e6:,.0f} MB/s, dd, cold). It brings in "
        f"{mib['opened_bytes']} "
        f"({mib.get('disk_bytes', 'nobody counted what')} from the disk), {read / planned:.3f} times the plan's "
        f"{mib['planned_bytes']}, of {mib['all_bytes']}: {figures['streamed_segments']} of {figures['segments']} "
        f"segments are streamed. A page cache of the same size would read {mib.get('lru_bytes', 'nothing')}, and none "
        f"less than {mib.get('belady_bytes', 'nothing')}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--save", action="store_true", help="write results/streamed_pass.md and .json")
    options = parser.parse_args()
    made = {"bundle": options.bundle.stem, "machine": describe_machine("onnxruntime", "numpy")}
    made |= streamed_pass(options.bundle)
    print(json.dumps(made, indent=1))
    print("\n".join(report(made)))
    if options.save:
        save(made)


def save(made: dict[str, Any]) -> None:
    """Keep the figures."""
    (RESULTS / "streamed_pass.json").write_text(json.dumps(made, indent=1) + "\n")
    lines = [
        "# A pass over a streamed bundle, beside its floor",
        "",
        f"`{made['bundle']}`, by `python -m bench.streamed_pass BUNDLE --save`.",
        "",
    ]
    lines += [*report(made), measured_on(made["machine"]), ""]
    (RESULTS / "streamed_pass.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
