"""What was done and what it cost, as JSON for scripts and as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from compile import picture
from compile.partition.cuts import Cuts
from targets.arena import Arena
from targets.budget import KINDS, MemoryPlan
from targets.bundle import Manifest, Quantization, Verification
from targets.tensor import TensorSpec, human


def report_json(
    name: str,
    target: str,
    options: Mapping[str, str],
    quantization: Quantization,
    verification: Verification,
    plan: MemoryPlan,
    said: Sequence[str],
    cuts: Cuts | None = None,
) -> bytes:
    """The report file of a bundle; `said` is what was said on the terminal, of the model and of the figures;
    `cuts` says how segments were chosen, None where one was enough."""
    report: dict[str, Any] = {
        "model": name,
        "target": target,
        "options": options,
        "quantization": quantization,
        "verification": verification,
        "memory": memory_summary(plan),
        "cuts": cuts,
        "warnings": said,
    }
    return msgspec.json.format(msgspec.json.encode(report, order="sorted"), indent=1) + b"\n"


def warnings(verification: Verification) -> list[str]:
    """What a reader of the figures must know."""
    if verification.inputs != "random":
        return []
    return ["Verified on random inputs: the errors say little about accuracy on real data. Give --calib."]


def memory_summary(plan: MemoryPlan) -> dict[str, Any]:
    """Every phase by term, its total and its share of the budget."""
    return {
        "budget_bytes": plan.budget_bytes,
        "arena": {
            "height": plan.arena.height,
            "lower_bound": plan.arena.lower_bound,
            "buffers": len(plan.arena.buffers),
        },
        "phases": {
            phase.name: {
                "total_bytes": phase.total_bytes,
                "terms": {term.name: {"kind": term.kind, "bytes": term.nbytes} for term in phase.terms},
                **{kind: phase.kind_bytes(kind) for kind in KINDS},
            }
            for phase in plan.phases
        },
    }


def print_report(manifest: Manifest, console: Console) -> None:
    """The tables of `inspect`, and of the end of a compilation."""
    q, v = manifest.quantization, manifest.verification
    console.print(f"[bold]{manifest.name}[/] version {manifest.version} for {manifest.target} ({manifest.runtime})")
    console.print(f"takes  {_specs(manifest.contract.inputs)}")
    console.print(f"gives  {_specs(manifest.contract.outputs)}")
    for name, dim in manifest.contract.dims.items():
        batch = ", the batch" if name == manifest.contract.batch else ""
        if manifest.contract.pad and name == manifest.contract.pad.dim:
            batch = ", padded where requests run together"
        buckets = ", ".join(map(str, dim.buckets))
        console.print(f"       {escape(name)} = {dim}{batch}, fastest at {dim.opt}, in buckets of {buckets}")
    if split := manifest.contract.split:
        console.print(
            f"       {escape(split.dim)} up to {split.longest} in windows of {split.window} that share {split.overlap}"
        )
    if states := manifest.contract.states:
        pairs = f"{len(states)} pairs of state, {states[0].output} to {states[0].input} the first of them"
        console.print(f"keeps  {escape(pairs)}")
    if generation := manifest.generation:
        ends = ", ".join(map(str, generation.eos)) or "none"
        console.print(f"writes text with {escape(generation.tokenizer)}; tokens that end it: {ends}")
    ratio = q.source_weight_bytes / max(q.weight_bytes, 1)
    console.print(
        f"scheme {q.scheme}{_blocks(manifest.options)}: weights {human(q.source_weight_bytes)} -> "
        f"{human(q.weight_bytes)} ({ratio:.2f}x smaller)"
    )
    _print_operators(q, console)
    _print_errors(v, console)
    _print_memory(manifest.plan, console)


def _blocks(options: Mapping[str, str]) -> str:
    """How a scheme that quantizes in blocks was told to, for people."""
    if "block" not in options:
        return ""
    return f", blocks of {options['block']} {'without' if options['symmetric'] == 'true' else 'with'} zero points"


def _specs(specs: tuple[TensorSpec, ...]) -> str:
    more = f"; and {len(specs) - 8} more" if len(specs) > 8 else ""
    return escape("; ".join(spec.describe() for spec in specs[:8])) + more


def _print_operators(q: Quantization, console: Console) -> None:
    table = Table(
        "operator", "count", "weights", "what became of it", title="Operators with weights", title_justify="left"
    )
    for op, count in q.quantized.items():
        table.add_row(escape(op), str(count), "", "quantized")
    for left in q.left:
        table.add_row(escape(left.op), str(left.count), human(left.weight_bytes), f"left: {left.reason}")
    console.print(table)


def _print_errors(v: Verification, console: Console) -> None:
    title = f"Against the source model, {v.samples} samples ({escape(v.inputs)})"
    table = Table("output", "max abs", "relative L2", "cosine", "equal argmax", title=title, title_justify="left")
    for e in v.outputs[:12]:
        agreement = "" if e.top1_agreement is None else f"{e.top1_agreement:.4f}"
        table.add_row(escape(e.output), f"{e.max_abs:.3g}", f"{e.relative_l2:.3g}", f"{e.cosine:.6f}", agreement)
    console.print(table)
    if len(v.outputs) > 12:
        console.print(f"and {len(v.outputs) - 12} more outputs in report.json")
    for text in warnings(v):
        console.print(f"[yellow]warning:[/] {text}")


def _print_memory(plan: MemoryPlan, console: Console) -> None:
    table = Table(
        "phase", "term", "kind", "bytes", title=f"Memory, budget {human(plan.budget_bytes)}", title_justify="left"
    )
    for phase in plan.phases:
        for term in phase.terms:
            table.add_row(phase.name, term.name, term.kind, human(term.nbytes))
        share = phase.total_bytes / plan.budget_bytes
        table.add_row(phase.name, "total", "", f"[bold]{human(phase.total_bytes)}[/] = {share:.1%} of the budget")
    console.print(table)
    arena = plan.arena
    gap = arena.height - arena.lower_bound
    above = f", {gap / arena.lower_bound:.1%} above the largest load" if gap else ""
    console.print(f"arena: {len(arena.buffers)} buffers in {human(arena.height)}{above}; {plan.slots} request slots")


_COLOURS = {"anonymous": "red", "file": "blue", "shared": "magenta"}
# Rows of the drawing of what is live.
_ROWS = 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def print_plan(manifest: Manifest, console: Console) -> None:
    """`inspect --plan`: memory over time, a bar for each phase or turn, and what is live in the arena over a run."""
    plan = manifest.plan
    columns = picture.columns(plan, [f"{step:02d}" for step in range(len(manifest.segments))])
    most = max(plan.budget_bytes, *(column.nbytes for column in columns))
    left = max(len(column.label) for column in columns)
    width = max(console.width - left - 24, 10)
    key = Text("Memory over time: ")
    for kind in KINDS:
        key.append("█", _COLOURS[kind]).append(f" {kind}  ")
    console.print(key.append(f"▏ budget {human(plan.budget_bytes)}"))
    limit = plan.budget_bytes * width // most
    for column in columns:
        line = Text(f"{column.label:{left}} ")
        drawn = upto = 0
        for kind in KINDS:
            upto += column.of(kind)
            cells = round(upto * width / most)
            line.append("█" * (cells - drawn), _COLOURS[kind])
            drawn = cells
        line.append(" " * (limit - drawn) + ("▏" if drawn <= limit else "") + " " * (width - max(limit, drawn)))
        share = column.nbytes / plan.budget_bytes
        console.print(line.append(f" {human(column.nbytes):>10} {share:4.0%}"), no_wrap=True, overflow="crop")
    if plan.sweep:
        sweep = plan.sweep
        console.print(
            f"a pass reads {human(sweep.pass_bytes)} of {human(sum(sweep.segment_bytes))} from storage; a page cache "
            f"would read {human(sweep.lru_bytes)}, and none less than {human(sweep.belady_bytes)}"
        )
    _print_live(plan.arena, console)


def _print_live(arena: Arena, console: Console) -> None:
    profile = picture.live(arena)
    if not profile or not arena.height:
        return
    width = min(max(console.width - 2, 10), profile[-1].end)
    scale = profile[-1].end / width
    most = [0] * width
    for each in profile:
        for at in range(int(each.start / scale), min(int((each.end - 1) / scale), width - 1) + 1):
            most[at] = max(most[at], each.nbytes)
    console.print(f"Activations over a run of {profile[-1].end} steps, up to {human(arena.height)}")
    eighths = [round(nbytes * _ROWS * 8 / arena.height) for nbytes in most]
    for row in reversed(range(_ROWS)):
        cells = (_EIGHTHS[min(max(filled - row * 8, 0), 8)] for filled in eighths)
        console.print(Text("".join(cells), "green"), no_wrap=True, overflow="crop")
