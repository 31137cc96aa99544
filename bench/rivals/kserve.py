"""KServe's Python model server, with onnxruntime inside: `python -m bench.rivals.kserve FOLDER` installs it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from bench.rivals.server import Server, install_command, make_venv, script_listening
from bench.served_models import ServedModel

WANTED = "kserve==0.21.0"
_SCRIPT = Path(__file__).with_name("served") / "kserve_model.py"


def install(venv: Path) -> None:
    """Make the virtual environment from the package index. Raises ServerError with pip's last words."""
    make_venv(venv, WANTED)


def serving(venv: Path, model: ServedModel, onnx: Path, folder: Path) -> AbstractContextManager[Server]:
    """A server with this model under its name; `folder` takes its log. Raises ServerError."""
    log = folder / "kserve.log"
    return script_listening("KServe", venv / "bin" / "python", _SCRIPT, "/v2/health/ready", model.name, onnx, log)


if __name__ == "__main__":
    sys.exit(install_command("kserve", __doc__, install))
