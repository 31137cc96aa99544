"""Two labelled sets of text lines for PP-OCR recognition, and its score.

- printed: 200 lines rendered from a seed in the fonts of Debian's fonts-dejavu-core and fonts-liberation2, with
  noise, blur and lost resolution.
- handwritten: 200 strings of five digits put together from the labelled digits of Debian's opencv-doc.

Needs numpy, opencv-python-headless and pillow.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from targets.errors import TightfitError

# Debian 13 has Liberation 2 in `liberation`, earlier releases in `liberation2`.
FONT_FOLDERS = tuple(Path("/usr/share/fonts/truetype") / name for name in ("dejavu", "liberation2", "liberation"))
FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSans-Bold.ttf",
    "LiberationSans-Regular.ttf",
    "LiberationSerif-Italic.ttf",
)
DIGITS_FOLDER = Path("/usr/share/doc/opencv-doc")
ROAD_AND_PAPER = """
    speed limit road closed exit parking invoice total amount engine oil vehicle plate turn left right station service
    warning battery charge camera sensor Madrid Berlin Paris 50 km/h 2026 No. A7 B12 $19.90 kg MODEL VIN DATE
"""
WORDS = ROAD_AND_PAPER.split()
PLATE_LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"
"""Without I, O and Q, which number plates avoid because of 1 and 0."""

Pixels = NDArray[np.uint8]
"""An image as OpenCV has it: [height, width, 3], blue, green, red."""


class DataError(TightfitError):
    """Fonts or images that a data set is made from are not installed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One image with one line of text."""

    text: str
    image: Pixels


def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font of `FONTS`; raises DataError naming the package that brings it."""
    for folder in FONT_FOLDERS:
        if (folder / name).is_file():
            return ImageFont.truetype(str(folder / name), size)
    package = "fonts-dejavu-core" if name.startswith("DejaVu") else "fonts-liberation2 (or fonts-liberation)"
    raise DataError(f"font {name} is not installed", f"apt-get install {package}")


def printed_lines(count: int = 200, seed: int = 0) -> Iterator[Line]:
    """Rendered lines: every fourth a number plate, the others two to four words."""
    draw = random.Random(seed)
    for index in range(count):
        if index % 4 == 0:
            letters = "".join(draw.choice(PLATE_LETTERS) for _ in range(3))
            text = letters + "-" + "".join(draw.choice("0123456789") for _ in range(4))
        else:
            text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 4)))
        face = font(draw.choice(FONTS), draw.choice([20, 24, 32, 40]))
        paper, ink = draw.randint(150, 255), draw.randint(0, 90)
        pixels = render(text, face, paper, ink).astype(np.float32)
        noise = np.random.RandomState(seed * 1000 + index).randn(*pixels.shape)
        image = np.clip(pixels + noise * draw.choice([0, 8, 18]), 0, 255).astype(np.uint8)
        if draw.random() < 0.4:
            image = np.asarray(cv2.GaussianBlur(image, (3, 3), 0), np.uint8)
        if draw.random() < 0.3:
            small = cv2.resize(image, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
            image = np.asarray(cv2.resize(small, (image.shape[1], image.shape[0])), np.uint8)
        yield Line(text, image[:, :, ::-1].copy())


def render(text: str, face: ImageFont.FreeTypeFont, paper: int = 255, ink: int = 0) -> Pixels:
    """One line of grey text on a grey ground, with a margin."""
    _, _, width, height = face.getbbox(text)
    image = Image.new("RGB", (int(width) + 16, int(height) + 14), (paper,) * 3)
    ImageDraw.Draw(image).text((8, 5), text, font=face, fill=(ink,) * 3)
    return np.asarray(image)


def handwritten_digits(count: int = 200, seed: int = 1) -> Iterator[Line]:
    """Strings of five handwritten digits, dark on white.

    The source image has 50 rows of 100 digits of 20 x 20 pixels, white on black; five rows belong to each digit.
    """
    digits = _digits_image()
    draw = np.random.RandomState(seed)
    for _ in range(count):
        labels = draw.randint(0, 10, 5)
        tiles = []
        for label in labels:
            row, column = 5 * label + draw.randint(5), draw.randint(100)
            tiles.append(digits[20 * row : 20 * row + 20, 20 * column : 20 * column + 20])
        strip = np.pad(np.hstack(tiles), 4)
        grey = 255 - cv2.resize(strip, None, fx=3, fy=3, interpolation=cv2.INTER_CUBIC)
        image = cv2.cvtColor(grey, cv2.COLOR_GRAY2BGR)
        yield Line("".join(map(str, labels)), np.asarray(image, np.uint8))


def _digits_image() -> Pixels:
    found = sorted([*DIGITS_FOLDER.rglob("digits.png"), *DIGITS_FOLDER.rglob("digits.png.gz")])
    if not found:
        raise DataError(f"no digits.png under {DIGITS_FOLDER}", "apt-get install opencv-doc")
    data = found[0].read_bytes()
    if found[0].suffix == ".gz":
        data = gzip.decompress(data)
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
    if image is None or image.shape != (1000, 2000):
        raise DataError(f"{found[0]} is not the expected image of 2000 x 1000 pixels", "reinstall opencv-doc")
    return np.asarray(image, np.uint8)


def encoded(line: Line) -> bytes:
    """The image as a PNG file, which loses nothing."""
    return bytes(cv2.imencode(".png", line.image)[1])


def edit_distance(a: str, b: str) -> int:
    """Levenshtein: insertions, deletions and substitutions that turn `a` into `b`."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]


def character_error_rate(pairs: Sequence[tuple[str, str]]) -> float:
    """Sum of edit distances over the sum of lengths, for (expected, read) pairs."""
    return sum(edit_distance(*pair) for pair in pairs) / sum(len(expected) for expected, _ in pairs)
