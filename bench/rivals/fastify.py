"""A service on fastify and onnxruntime-node, as one writes it oneself: `python -m bench.rivals.fastify FOLDER`."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.rivals.server import Server, ServerError, free_ports, install_command, listening, run_once
from bench.served_models import ServedModel

WANTED = ("fastify@5.12.8", "onnxruntime-node@1.30.0")
_SCRIPT = Path(__file__).with_name("served") / "fastify_app.cjs"


def install(folder: Path) -> None:
    """Install both from the npm registry. Raises ServerError with npm's last words."""
    # The package holds the library for the CPU; its script would fetch others.
    npm = ["npm", "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", *WANTED]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServerError(f"cannot make {folder}: {error}", "choose a folder that can be written") from None
    run_once([*npm, "--prefix", str(folder)], "npm install", "is Node there, and the registry reachable?", folder)


@contextlib.contextmanager
def serving(installed: Path, model: ServedModel, onnx: Path, folder: Path) -> Iterator[Server]:
    """A server with this model under its name; `folder` takes its log. Raises ServerError."""
    node = shutil.which("node")
    if node is None:
        raise ServerError("there is no node")
    (port,) = free_ports(1)
    command = [node, str(_SCRIPT), model.name, str(onnx), str(port)]
    modules = str(installed / "node_modules")
    log, ready = folder / "fastify.log", "/v2/health/ready"
    with listening("fastify", command, port, ready, log, NODE_PATH=modules, NODE_ENV="production") as server:
        yield server


if __name__ == "__main__":
    sys.exit(install_command("fastify", __doc__, install))
