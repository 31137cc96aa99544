"""onnxruntime on a CPU: the backend's functions, each from the module that knows it."""

from __future__ import annotations

from pathlib import Path

from compile.backends import ort_footprint, ort_lowering, ort_observe, ort_session
from compile.graph import ir
from compile.quantize.schemes import Scheme

lower = ort_lowering.lower
weight_footprint = ort_footprint.weight_footprint
observe = ort_observe.observe
runs_within = ort_observe.runs_within
load = ort_session.load
version = ort_session.version


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


def load_mapped(model: ir.Model, folder: Path) -> ort_session.OrtModel:
    """Load a graph whose weights are files in `folder`: they stay mapped, no kernel lays them out anew."""
    return ort_session.load_mapped(ir.to_proto(model).SerializeToString(), folder)
