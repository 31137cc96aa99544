"""Asks a model in a process of its own, without the agent: `python -m scripts.demo_yardstick MODEL BUNDLE`.

MODEL is BUNDLE, or the ONNX file that it was compiled from; the recipe is the bundle's. Prints what it read and the
median time as JSON. A process of its own, because memory that the demo shares with the engine would not be counted
fully there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from bench.bundle_runner import Asker, BundleRunner, runner_of, session_of
from scripts.demo import IMAGE, measure


def main() -> None:
    model, bundle = map(Path, sys.argv[1:])
    threads = len(os.sched_getaffinity(0))
    run = BundleRunner(model, threads).run if model.is_dir() else runner_of(session_of(model, threads))
    asker, image = Asker(bundle), IMAGE.read_bytes()

    def read() -> str:
        return str(asker.ask(image, run)["text"][0].decode())

    answer = measure(read)
    sys.stdout.write(json.dumps({"text": answer.text, "milliseconds": answer.milliseconds}) + "\n")


if __name__ == "__main__":
    main()
