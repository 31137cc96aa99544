"""onnxruntime on a CPU: the backend's functions, each from the module that knows it."""

from __future__ import annotations

import platform
from pathlib import Path

from compile.backends import ort_footprint, ort_lowering, ort_observe, ort_session
from compile.errors import ModelError
from compile.graph import ir, nodes_of
from compile.quantize.schemes import CODE_THAT_FITS, Scheme

_CPUINFO = Path("/proc/cpuinfo")
prepare = ort_lowering.prepare
lower = ort_lowering.lower
weight_footprint = ort_footprint.weight_footprint
observe = ort_observe.observe
runs_within = ort_observe.runs_within
load = ort_session.load
version = ort_session.version


def check_operators(model: ir.Model) -> None:
    """Raise ModelError for operators that onnxruntime and the model's functions have not, or only in later opsets."""
    known = ort_session.known_operators()
    unknown: dict[str, str] = {}
    for node in nodes_of(model):
        domain = "" if node.domain == "ai.onnx" else node.domain
        opset = model.graph.opset_imports.get(domain)
        if node.op_identifier() not in model.functions and known.get((domain, node.op_type), 1 << 31) > (opset or 1):
            at = f" at opset {opset}" if opset and (domain, node.op_type) in known else ""
            unknown.setdefault(f"{domain or 'ai.onnx'}::{node.op_type}{at}", node.name or "")
    if unknown:
        listed = ", ".join(f"{name} (node {node!r})" for name, node in list(unknown.items())[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ModelError(
            f"onnxruntime {version()} has no operator {listed}{more}",
            "export the model with standard operators, or with these as functions of the model",
        )


def session_settings(scheme: Scheme) -> dict[str, str]:  # noqa: ARG001 - part of the Backend protocol
    """Settings that make memory predictable.

    One arena for all sessions holds activations only: weights bypass it, so that the plan's arena is the
    arena. Threads that wait do not spin: the gateway needs the core.
    """
    return {
        "session.use_env_allocators": "1",
        "session.use_device_allocator_for_initializers": "1",
        "session.intra_op.allow_spinning": "0",
    }


def verification_settings(scheme: Scheme) -> dict[str, str]:
    """Where this machine's kernels would saturate and the board's do not, what stands between codes runs in float."""
    saturates = ort_session.saturates(platform.machine(), _CPUINFO.read_text(encoding="utf-8", errors="replace"))
    if scheme.static and scheme.largest_code > CODE_THAT_FITS and saturates:
        return {"session.disable_quant_qdq": "1"}
    return {}


def load_mapped(model: ir.Model, folder: Path) -> ort_session.OrtModel:
    """Load a graph whose weights are files in `folder`: they stay mapped, no kernel lays them out anew."""
    return ort_session.load_mapped(ir.to_proto(model).SerializeToString(), folder)
