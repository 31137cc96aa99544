"""Makes scripts/demo.png, the line of text that scripts/demo sends: `python -m bench.demo_image`.

The image is committed so that the demo needs neither fonts nor an image library.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np

from bench.ocr_data import Pixels, font, render

HEIGHT = 48
TEXT = "Speed limit 50 km/h - exit A7 Madrid"
WANTED = Path(__file__).resolve().parent.parent / "scripts" / "demo.png"


def draw() -> Pixels:
    """A slightly noisy, slightly blurred sign, 48 pixels high; red, green, blue."""
    sign = render(TEXT, font("DejaVuSans.ttf", 32), paper=225, ink=40)
    width = round(sign.shape[1] * HEIGHT / sign.shape[0])
    small = cv2.resize(sign, (width, HEIGHT), interpolation=cv2.INTER_AREA).astype(np.float32)
    shade = np.linspace(1.0, 0.8, width, dtype=np.float32)[None, :, None]
    noise = np.random.RandomState(7).randn(HEIGHT, width, 3) * 8
    return np.clip(small * shade + noise, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    WANTED.write_bytes(bytes(cv2.imencode(".png", draw()[..., ::-1])[1]))
    sys.stdout.write(f"{WANTED}\n")
