"""Asks a model in a process of its own, without the agent: `python -m scripts.demo_yardstick MODEL LABELS`.

MODEL is an ONNX file, whose alphabet is written to LABELS, or a bundle. Prints what it read and the median time as
JSON. A process of its own, because memory that the demo shares with the engine would not be counted fully there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bench.bundle_runner import Array, BundleRunner, session_of
from scripts.demo import IMAGE, decode, measure, preprocess, read_labels, read_png


def main() -> None:
    model, labels = map(Path, sys.argv[1:])
    threads = len(os.sched_getaffinity(0))
    feeds: dict[str, Array] = {"x": preprocess(read_png(IMAGE))}
    ask: Callable[[], Array]
    if model.is_dir():
        runner = BundleRunner(model, threads)
        output = runner.manifest.contract.outputs[0].name
        ask = lambda: runner.run(feeds)[output]  # noqa: E731 - as short as it is clear
    else:
        session = session_of(model, threads)
        # Class 0 is CTC's blank, the last is a space; the alphabet between stands in the model's metadata.
        character = session.get_modelmeta().custom_metadata_map["character"].removesuffix("\n")
        labels.write_text(f"\n{character}\n \n", encoding="utf-8")
        ask = lambda: session.run(None, feeds)[0]  # noqa: E731 - as short as it is clear
    alphabet = read_labels(labels)
    answer = measure(lambda: decode(ask()[0], alphabet))
    sys.stdout.write(json.dumps({"text": answer.text, "milliseconds": answer.milliseconds}) + "\n")


if __name__ == "__main__":
    main()
