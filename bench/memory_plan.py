"""Memory that the plan predicts beside memory that the service used: `python -m bench.memory_plan`.

Each bundle is compiled and then proved as `tightfit-compile prove` does it: the real agent under the board's budget as
a hard limit, every slot filled with requests of the largest shape at the same time. The runtime's fixed cost F_rt is
measured once and taken off both sides, so that the ratio is about the model.

    python -m bench.memory_plan                        # all cases; writes bench/results/memory_plan.{md,json}
    python -m bench.memory_plan --only int4            # some of them; nothing is saved
    python -m bench.memory_plan --keep FOLDER          # bundles stay there, and are used again
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.big_model import generate, shape_for
from bench.machine import describe_machine, measured_on
from bench.models import fetch
from compile.options import Options
from compile.pipeline import compile_model
from compile.prove import FIXED_RUNS, PhaseProof, Proof, prove
from compile.prove_report import proof_json, ratio
from compile.shapes import parse_shape
from targets.board import load_board
from targets.budget import FINALISE, KINDS, PHASES
from targets.bundle import Residency, read_manifest

BOARD = "raspberry-pi-5-4gb"
RESULTS = Path(__file__).parent / "results" / "memory_plan"
BIG = "generated 500 MB"
BIG_BYTES = 500 * 10**6


DEFAULTS = Options()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is compiled, and what it is called in the table."""

    label: str
    model: str
    scheme: str
    shapes: tuple[str, ...]
    options: Options = DEFAULTS

    @property
    def name(self) -> str:
        """Model, scheme, and where the weights are asked to be."""
        residency = self.options.residency
        return "-".join([self.model or "big", self.scheme, *([residency.value] if residency else [])])


REC_SHAPES = ("x=1,3,48,320..1600",)
LLM_SHAPES = ("input_ids=1,1..16..64", "past.0.k=1,3,0..64..256,64")
MINILM_SHAPES = ("input_ids=1,1..64..256",)
BIG_SHAPES = ("x=1,1..16..64,512",)
# Little enough that the model is cut into several segments.
STREAMED_HOST_BYTES = 820 << 20
CASES = (
    Case("PP-OCRv6 rec", "ppocr-v6-rec", "fp32", REC_SHAPES),
    Case("PP-OCRv6 rec", "ppocr-v6-rec", "int4", REC_SHAPES),
    Case("PP-OCRv6 det", "ppocr-v6-det", "fp32", ("x=1,3,640,640",)),
    Case("SmolLM2-135M", "smollm2-135m", "fp32", LLM_SHAPES),
    Case("SmolLM2-135M", "smollm2-135m", "int8-weights", LLM_SHAPES),
    Case("SmolLM2-135M", "smollm2-135m", "int4", LLM_SHAPES),
    Case("MiniLM-L6", "minilm", "fp32", MINILM_SHAPES),
    Case("MiniLM-L6", "minilm", "int4", MINILM_SHAPES),
    Case(BIG, "", "fp32", BIG_SHAPES),
    Case(BIG, "", "int4", BIG_SHAPES),
    Case("SmolLM2-135M", "smollm2-135m", "int4", LLM_SHAPES, Options(residency=Residency.MAPPED)),
    Case("SmolLM2-135M", "smollm2-135m", "fp32", LLM_SHAPES, Options(residency=Residency.UNPACKED)),
    Case(
        *("SmolLM2-135M", "smollm2-135m", "fp32", LLM_SHAPES),
        Options(residency=Residency.STREAMED, host_memory=STREAMED_HOST_BYTES),
    ),
)


def source_of(case: Case, folder: Path) -> Path:
    """The ONNX file; the large one is generated into `folder`."""
    if case.model:
        return fetch(case.model)
    path = folder / "big.onnx"
    if not path.exists():
        generate(path, shape_for(BIG_BYTES, "float32"))
    return path


def build(folder: Path, case: Case) -> Path:
    """Compile one case, unless that was done before."""
    out = folder / f"{case.name}.tfb"
    if not out.exists():
        shapes = tuple(parse_shape(text) for text in case.shapes)
        options = dataclasses.replace(case.options, scheme=case.scheme, shapes=shapes)
        compile_model(source_of(case, folder), load_board(BOARD), out, options)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose model or scheme contains this; nothing is saved then")
    parser.add_argument("--keep", type=Path, help="folder for the bundles; by default they are removed again")
    chosen = parser.parse_args()
    cases = [case for case in CASES if chosen.only in case.name]
    with tempfile.TemporaryDirectory(prefix="tightfit-memory-") as name:
        folder = chosen.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for case in cases:
            bundle = build(folder, case)
            proof = prove(bundle)
            rows.append((case, sum(entry.nbytes for entry in read_manifest(bundle).files), proof))
            print(line(*rows[-1]), flush=True)
    if not chosen.only:
        save(rows)


Row = tuple[Case, int, Proof]


def save(rows: list[Row]) -> None:
    """Write the table and the figures behind it."""
    machine = describe_machine("onnxruntime", "numpy")
    figures: dict[str, Any] = {"board": BOARD, "machine": machine, "rows": []}
    for case, size, proof in rows:
        entry = {"model": case.label, "scheme": case.scheme, "shapes": case.shapes, "bundle_bytes": size}
        entry["residency"] = residency_of(case)
        figures["rows"].append({**entry, "proof": msgspec.json.decode(proof_json(proof))})
    RESULTS.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(table(machine, rows))


def residency_of(case: Case) -> str:
    """What was asked for; the compiler's own choice is the heap wherever the board has room."""
    return case.options.residency.value if case.options.residency else Residency.HEAP.value


def mib(nbytes: int) -> str:
    """Bytes in MiB."""
    return f"{nbytes / 2**20:,.1f}"


def line(case: Case, size: int, proof: Proof) -> str:
    """One row of the table."""
    cells = [case.label, case.scheme, residency_of(case), mib(size)]
    if len(proof.phases) < len((FINALISE, *PHASES)):
        cells += ["-", "-"]
    for phase in proof.phases:
        cells += phase_cells(phase)
    cells += [mib(proof.charged["peak"]) if proof.charged else "-", proof.verdict.value]
    return "| " + " | ".join(cells) + " |"


def phase_cells(phase: PhaseProof) -> list[str]:
    """Plan / measured for every kind and the total, and the ratio of the totals."""
    measured = phase.measured or dict.fromkeys(KINDS, 0)
    cells = [f"{mib(phase.predicted[kind])} / {mib(measured[kind])}" for kind in KINDS if phase.name == "run"]
    total = phase.measured_total or 0
    found = ratio(phase.predicted_total, total)
    return [*cells, f"{mib(phase.predicted_total)} / {mib(total)}", f"{found:.2f}" if found else "-"]


COLUMNS = (
    *("model", "scheme", "weights", "bundle", "finalise", "ratio", "load", "ratio"),
    *("run: anonymous", "run: file", "run: shared", "run", "ratio", "cgroup peak", "verdict"),
)


def table(machine: dict[str, str], rows: list[Row]) -> str:
    """The figures for people."""
    runtime = [proof.fixed for _, _, proof in rows]
    low, high = min(fixed.measured for fixed in runtime), max(fixed.measured for fixed in runtime)
    spread = max(fixed.spread for fixed in runtime)
    limit = rows[0][2].limit_bytes
    lines = [
        "# Memory: the plan beside the service",
        "",
        f"Bundles for `{BOARD}`, served by the real agent under the board's budget as a hard limit",
        f"({mib(limit)} MiB, {rows[0][2].mechanism}), every slot filled at the largest shape. MiB, plan / measured,",
        f"without the runtime's fixed cost F_rt: {mib(runtime[0].predicted)} in the plans, {mib(low)} to {mib(high)}",
        "measured (it depends on who shares the libraries). Ratio = plan / measured. Made by",
        "`python -m bench.memory_plan`.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|---|---|" + "---:|" * (len(COLUMNS) - 4) + "---|",
        *(line(*row) for row in rows),
        "",
        "file: resident pages of the bundle's weight files. Inputs that index a table are spread over it, other rows",
        "in each request, so that what the plan promises is touched. Processes stand still while they are read,",
        "whenever more is in memory than before; what the kernel saw in between is part of the totals. The cgroup's",
        "peak also holds F_rt and the page cache of files that were read once (digests), which the kernel drops when",
        f"memory is short. F_rt is the middle one of {FIXED_RUNS} measurements, {mib(spread)} MiB apart at most.",
        "Nothing is allowed for noise. A streamed plan holds however far the next segment is when one ends; here it",
        "was never the worst. In phases of less than 20 MiB the plan's fixed `service` term of 0.75 MiB, and its bytes",
        "per node, which are those of the largest nodes measured, can be more than 10 % together.",
        "",
        measured_on(machine),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
