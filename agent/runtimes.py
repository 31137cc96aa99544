"""Which runtimes a bundle may ask for. Names only, so that the gateway can judge a bundle without loading one."""

from __future__ import annotations

from importlib import metadata

from targets.errors import BundleError, did_you_mean

BACKENDS: dict[str, str] = {"onnxruntime": "agent.backends.ort"}
"""Runtime name -> module, imported by the engine process when first asked for."""

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {"onnxruntime": ("onnxruntime", "onnxruntime-gpu")}
"""Runtime name -> the packages that bring it, one of which is installed."""


def installed(runtime: str) -> str:
    """Name and version of an installed runtime, as its backend describes it, without loading it.

    Raises BundleError when there is none.
    """
    for distribution in DISTRIBUTIONS[runtime]:
        try:
            return f"{runtime} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue
    raise BundleError(f"{runtime} is not installed", "pip install 'tightfit[agent,cpu]'")


def backend_module(runtime: str) -> str:
    """Module that drives the runtime; raises BundleError naming those that there are."""
    if runtime == "tensorrt":
        raise BundleError(
            "the bundle needs TensorRT, and this version has no TensorRT backend",
            "compile it for a board whose runtime is onnxruntime",
        )
    if runtime not in BACKENDS:
        raise BundleError(f"the bundle needs runtime {runtime!r}", did_you_mean(runtime, BACKENDS))
    return BACKENDS[runtime]
