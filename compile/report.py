"""What was done and what it cost, as JSON for scripts and as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compile.partition.cuts import Cuts
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
    notes: Sequence[str],
    cuts: Cuts | None = None,
) -> bytes:
    """The report file of a bundle; `warnings` repeats what was said on the terminal, `notes` of the model included;
    `cuts` says how segments were chosen, None where one was enough."""
    report: dict[str, Any] = {
        "model": name,
        "target": target,
        "options": options,
        "quantization": quantization,
        "verification": verification,
        "memory": memory_summary(plan),
        "cuts": cuts,
        "warnings": [*notes, *warnings(verification)],
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
        buckets = ", ".join(map(str, dim.buckets))
        console.print(f"       {escape(name)} = {dim}{batch}, fastest at {dim.opt}, in buckets of {buckets}")
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
