"""LitServe, with onnxruntime inside: `python -m bench.rivals.litserve FOLDER` installs it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from bench.rivals.server import Server, install_command, make_venv, script_listening
from bench.served_models import ServedModel

WANTED = "litserve==0.2.19"
_SCRIPT = Path(__file__).with_name("served") / "litserve_api.py"


def install(venv: Path) -> None:
    """Make the virtual environment from the package index. Raises ServerError with pip's last words."""
    make_venv(venv, WANTED)


def serving(venv: Path, model: ServedModel, onnx: Path, folder: Path) -> AbstractContextManager[Server]:
    """A server with this model under its name; `folder` takes its log. Raises ServerError."""
    log = folder / "litserve.log"
    return script_listening("LitServe", venv / "bin" / "python", _SCRIPT, "/health", model.name, onnx, log)


if __name__ == "__main__":
    sys.exit(install_command("litserve", __doc__, install))
