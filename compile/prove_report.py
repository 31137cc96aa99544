"""A proof for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compile.prove import PhaseProof, Proof, Verdict
from compile.speed import Speed
from targets.budget import KINDS
from targets.tensor import human

_COLOURS = {Verdict.FITS: "green", Verdict.OVER_PLAN: "yellow", Verdict.DOES_NOT_FIT: "red"}


def proof_json(proof: Proof) -> str:
    """One JSON object, every size in bytes; `ratio` is predicted / measured, null where nothing was measured."""
    fields = msgspec.to_builtins(proof)
    for phase, entry in zip(proof.phases, fields["phases"], strict=True):
        entry["predicted_total"] = phase.predicted_total
        entry["measured_total"] = phase.measured_total
        entry["ratio"] = ratio(phase.predicted_total, phase.measured_total)
    return msgspec.json.format(msgspec.json.encode(fields, order="sorted"), indent=1).decode()


def ratio(predicted: int, measured: int | None) -> float | None:
    """Predicted / measured; None where nothing was measured."""
    return round(predicted / measured, 3) if measured is not None and measured > 0 else None


def print_proof(proof: Proof, console: Console) -> None:
    """The table, what the cgroup counted, how to read both, and the verdict."""
    limit = f"{human(proof.limit_bytes)} ({proof.mechanism})"
    title = f"{escape(proof.model)} version {proof.version} under {limit}, {proof.slots} slots, {proof.rounds} rounds"
    table = Table("phase", "kind", title=title, title_justify="left")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    for phase in proof.phases:
        _add(table, phase)
    fixed = proof.fixed
    table.add_row("F_rt", "anonymous + libraries", human(fixed.predicted), human(fixed.measured), "not in the ratios")
    table.add_row("F_rt", "differs by", "", human(fixed.spread))
    if proof.speed:
        _add_speed(table, proof.speed)
    console.print(table)
    if proof.charged:
        _print_charged(proof.charged, console)
    for note in proof.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    colour = _COLOURS[proof.verdict]
    console.print(f"[bold {colour}]{proof.verdict.value}[/]: {escape(proof.reason)}", highlight=False)


def _add(table: Table, phase: PhaseProof) -> None:
    for kind in KINDS:
        seen = phase.measured[kind] if phase.measured else None
        if phase.predicted[kind] or seen:
            _row(table, phase, kind, phase.predicted[kind], seen)
    if phase.unseen:
        table.add_row(phase.name, "between samples", "", human(phase.unseen))
    _row(table, phase, "[bold]total", phase.predicted_total, phase.measured_total)
    table.add_section()


def _add_speed(table: Table, speed: Speed) -> None:
    """Time for every bundle; bytes where something is opened or read in every pass."""
    table.add_section()
    table.add_row("a request", "time, all slots full", "", f"{speed.request_s:.3g} s")
    table.add_row("a pass", "time in the engine", "", f"{speed.pass_s:.3g} s")
    if speed.passes < speed.requests:
        table.add_row("a pass", "requests, the mean", "", f"{speed.requests / speed.passes:.3g}")
    if speed.opened_bytes:
        table.add_row("a pass", "opened files", "", human(speed.opened_bytes))
    if speed.disk_bytes:
        table.add_row("a pass", "read from disk", "", human(speed.disk_bytes))


def _row(table: Table, phase: PhaseProof, kind: str, predicted: int, seen: int | None) -> None:
    size = "not reached" if seen is None else human(seen)
    if phase.complete:
        table.add_row(phase.name, kind, human(predicted), size, _ratio(predicted, seen))
    else:
        table.add_row(phase.name, kind, human(predicted), size, "" if seen is None else "not finished")


def _ratio(predicted: int, measured: int | None) -> str:
    value = ratio(predicted, measured)
    return "" if value is None else f"{value:.2f}"


def _print_charged(charged: Mapping[str, int], console: Console) -> None:
    kinds = ", ".join(f"{kind} {human(charged[kind])}" for kind in KINDS)
    console.print(f"cgroup: peak {human(charged['peak'])}; largest of each kind: {kinds} (page cache)", highlight=False)
