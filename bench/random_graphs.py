"""Random valid models through every scheme: `python -m bench.random_graphs --save`.

    python -m bench.random_graphs                  # 10,000 models, about an hour on two cores
    python -m bench.random_graphs --count 500      # less

Each model is emitted under each scheme and run beside its source (tests/support/graphs.py says what is drawn and what
is compared). The first that fails is shrunk and printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import multiprocessing
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

from bench.machine import describe_machine, measured_on
from tests.support.graphs import Random, compile_and_compare, models
from tests.support.models import SCHEME_NAMES

RESULT = Path(__file__).parent / "results" / "random_graphs.md"


def explore(which: int, count: int) -> collections.Counter[str]:
    """`count` models from seed `which`: how often each operator and opset occurred."""
    seen: collections.Counter[str] = collections.Counter()

    @seed(which)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(models())
    def check(drawn: Random) -> None:
        seen["models"] += 1
        seen[f"opset {drawn.proto.opset_import[0].version}"] += 1
        seen.update(node.op_type for node in drawn.proto.graph.node)
        for scheme in SCHEME_NAMES:
            compile_and_compare(drawn, scheme)

    check()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULT.name}")
    options = parser.parse_args()
    started = time.monotonic()
    batch = 125
    seen: collections.Counter[str] = collections.Counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        batches = [min(batch, options.count - at) for at in range(0, options.count, batch)]
        futures = [pool.submit(explore, options.seed + at, size) for at, size in enumerate(batches)]
        for done in concurrent.futures.as_completed(futures):
            try:
                seen += done.result()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                pool.shutdown(cancel_futures=True)
                sys.exit(f"{type(error).__name__}: {error}\n{' '.join(getattr(error, '__notes__', ()))}")
            print(f"{seen['models']} of {options.count} models", file=sys.stderr, flush=True)
            if options.save:
                # What has been run so far, should the rest not be.
                RESULT.write_text(report(seen, time.monotonic() - started))
    print(report(seen, time.monotonic() - started))


def report(seen: collections.Counter[str], seconds: float) -> str:
    """What was explored, for people."""
    opsets = {key: n for key, n in sorted(seen.items()) if key.startswith("opset ")}
    operators = {key: n for key, n in seen.most_common() if key != "models" and key not in opsets}
    return "\n".join(
        [
            "# Random models through every scheme",
            "",
            f"{seen['models']} models under {', '.join(SCHEME_NAMES)}: every one was emitted, loaded, run, and gave",
            f"outputs of its source's shapes and types, fp32 its source's values. {seconds:.0f} s. Made by",
            "`python -m bench.random_graphs --save`.",
            "",
            "Models of each opset: "
            + ", ".join(f"{key.removeprefix('opset ')}: {n}" for key, n in opsets.items())
            + ".",
            "",
            "Operators: " + ", ".join(f"{key} {n}" for key, n in operators.items()) + ".",
            "",
            measured_on(describe_machine("onnxruntime", "onnx", "numpy")),
            "",
        ]
    )


if __name__ == "__main__":
    main()
