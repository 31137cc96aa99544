"""MLServer, with onnxruntime inside: `python -m bench.rivals.mlserver FOLDER` installs it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.rivals.server import Server, free_ports, install_command, listening, make_venv
from bench.served_models import ServedModel

WANTED = "mlserver==1.7.1"
_RUNTIME = Path(__file__).with_name("served") / "mlserver_runtime.py"


def install(venv: Path) -> None:
    """Make the virtual environment from the package index. Raises ServerError with pip's last words."""
    make_venv(venv, WANTED)


@contextlib.contextmanager
def serving(venv: Path, model: ServedModel, onnx: Path, folder: Path) -> Iterator[Server]:
    """A server with this model under its name; `folder` takes its settings and log. Raises ServerError."""
    port, grpc, metrics = free_ports(3)
    settings = {
        "host": "127.0.0.1", "http_port": port, "grpc_port": grpc, "metrics_port": metrics,
        "debug": False, "parallel_workers": 0, "metrics_dir": str(folder / "metrics"),
    }  # fmt: skip
    implementation = f"{_RUNTIME.stem}.OnnxModel"
    described = {"name": model.name, "implementation": implementation, "parameters": {"uri": str(onnx)}}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "model-settings.json").write_text(json.dumps(described), encoding="utf-8")
    command = [str(venv / "bin" / "mlserver"), "start", str(folder)]
    log, path = folder / "mlserver.log", str(_RUNTIME.parent)
    with listening("MLServer", command, port, "/v2/health/ready", log, PYTHONPATH=path) as server:
        yield server


if __name__ == "__main__":
    sys.exit(install_command("mlserver", __doc__, install))
