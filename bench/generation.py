"""Text as the agent generates it beside `session.run` in a loop: `python -m bench.generation`.

SmolLM2-135M, compiled with its KV cache. Every prompt is answered by the agent over one connection
(`/generate_stream`, temperature 0), and by a loop around onnxruntime that feeds `present` back as `past` and takes the
most likely token, on the source model and with as many threads; by turns, in interleaved rounds. All tokens must be
equal where nothing is quantized. The first token is timed from when it was asked for, the others by what lies between
the first and the last. Client and agent share the machine, and what is said of others is only comparable within a run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

from bench.machine import describe_machine, measured_on
from bench.model_smollm2 import HEAD_DIM, KV_HEADS, LAYERS
from bench.models import fetch, fetch_tokenizer
from bench.rivals import tightfit
from bench.rivals.server import Server
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from compile.text import read_tokenizer
from targets.board import load_board
from targets.bundle import read_manifest

RESULTS = Path(__file__).parent / "results" / "generation.md"
NAME, BOARD = "smollm2-135m", "raspberry-pi-5-4gb"
PIECE, CONTEXT = 32, 512
SHAPES = (f"input_ids=1,1..{PIECE}", f"past.0.k=1,{KV_HEADS},0..64..{CONTEXT},{HEAD_DIM}")
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "1 2 3 4 5 6",
    "<|im_start|>user\nName three parts of a car.<|im_end|>\n<|im_start|>assistant\n",
    "Les élèves étudient à l'école où",
    "The engine control unit (ECU) reads the sensors of the engine and decides how much fuel is injected. "
    "In a modern vehicle there are many such units, joined by a bus. When one of them fails, the others",
)


@dataclass(frozen=True)
class Text:
    """Tokens that were generated, and seconds to the first of them and from there to the last."""

    tokens: tuple[int, ...]
    first_s: float
    rest_s: float

    @property
    def rate(self) -> float:
        """Tokens per second behind the first."""
        return (len(self.tokens) - 1) / self.rest_s


def compiled(folder: Path, scheme: str) -> Path:
    """The bundle."""
    out = folder / f"{NAME}.tfb"
    shapes = tuple(map(parse_shape, SHAPES))
    tokenizer = read_tokenizer(fetch_tokenizer(NAME))
    compile_model(fetch(NAME), load_board(BOARD), out, Options(scheme=scheme, shapes=shapes, tokenizer=tokenizer))
    return out


class Agent:
    """A client of the agent, on one connection."""

    def __init__(self, server: Server, model: str) -> None:
        self._path = f"/v2/models/{model}/generate_stream"
        self._connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=600)

    def close(self) -> None:
        self._connection.close()

    def generate(self, prompt: str, most: int) -> Text:
        asked = {"text_input": prompt, "temperature": 0, "max_tokens": most, "details": True}
        asked["timeout"] = 600_000_000
        started = time.perf_counter()
        self._connection.request("POST", self._path, json.dumps(asked))
        response = self._connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        tokens, times = [], []
        for line in response:
            if line.startswith(b"data: "):
                said = json.loads(line[6:])
                if "error" in said:
                    raise RuntimeError(said["error"])
                times.append(time.perf_counter())
                tokens.append(said["details"]["token"]["id"])
        return Text(tuple(tokens), times[0] - started, times[-1] - times[0])


class Loop:
    """onnxruntime alone."""

    def __init__(self, path: Path, tokenizer: Tokenizer, eos: Sequence[int]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._tokenizer, self._eos = tokenizer, frozenset(eos)
        self._names = [f"past.{layer}.{kind}" for layer in range(LAYERS) for kind in "kv"]
        presents = [name.replace("past", "present") for name in self._names]
        self._outputs = ["logits", *presents]

    def generate(self, prompt: str, most: int) -> Text:
        started = time.perf_counter()
        new = self._tokenizer.encode(prompt).ids
        past = [np.zeros((1, KV_HEADS, 0, HEAD_DIM), np.float32) for _ in self._names]
        tokens: list[int] = []
        times: list[float] = []
        while len(tokens) < most and not (tokens and tokens[-1] in self._eos):
            feeds = {"input_ids": np.array([new], np.int64), **dict(zip(self._names, past, strict=True))}
            logits, *past = self._session.run(self._outputs, feeds)
            new = [int(logits[-1].argmax())]
            tokens += new
            times.append(time.perf_counter())
        return Text(tuple(tokens), times[0] - started, times[-1] - times[0])


@dataclass(frozen=True)
class Row:
    """One prompt: tokens of it, and what both made of it, in every round."""

    tokens: int
    ours: list[Text]
    loop: list[Text]

    @property
    def equal(self) -> int:
        """How many tokens are equal before the first that is not."""
        pairs = zip(self.ours[0].tokens, self.loop[0].tokens, strict=False)
        return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(self.ours[0].tokens))


def measure(scheme: str, most: int, rounds: int, bundle: Path | None) -> list[Row]:
    """Each prompt by both, in every round."""
    tokenizer = Tokenizer.from_file(str(fetch_tokenizer(NAME)))
    loop = Loop(fetch(NAME), tokenizer, read_tokenizer(fetch_tokenizer(NAME)).eos)
    rows = [Row(len(tokenizer.encode(prompt).ids), [], []) for prompt in PROMPTS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = bundle or compiled(folder, scheme)
        settings = "[requests]\ntimeout_s = 600.0\n"
        with (
            tightfit.serving([bundle], folder / "agent", settings) as server,
            contextlib.closing(Agent(server, read_manifest(bundle).name)) as agent,
        ):
            for _ in range(rounds):
                for row, prompt in zip(rows, PROMPTS, strict=True):
                    row.ours.append(agent.generate(prompt, most))
                    row.loop.append(loop.generate(prompt, most))
    return rows


def table(rows: Sequence[Row], scheme: str) -> str:
    lines = [
        f"Scheme {scheme}, one thread, pieces of up to {PIECE} tokens; medians over {len(rows[0].ours)} rounds.",
        "",
        "| prompt tokens | generated | equal | first token, ms | loop | ratio | tokens/s | loop | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    firsts, rates = [], []
    for row in rows:
        first, first_loop = (statistics.median(each.first_s for each in texts) for texts in (row.ours, row.loop))
        rate, rate_loop = (statistics.median(each.rate for each in texts) for texts in (row.ours, row.loop))
        firsts.append(first / first_loop)
        rates.append(rate / rate_loop)
        lines.append(
            f"| {row.tokens} | {len(row.ours[0].tokens)} | {row.equal} | {first * 1e3:.0f} | {first_loop * 1e3:.0f} "
            f"| {firsts[-1]:.2f} | {rate:.1f} | {rate_loop:.1f} | {rates[-1]:.2f} |"
        )
    generated = sum(len(row.ours[0].tokens) for row in rows)
    lines += [
        "",
        f"{sum(row.equal for row in rows)} of {generated} tokens are those of the loop. First token: "
        f"{statistics.geometric_mean(firsts):.2f} times that of the loop; tokens a second: "
        f"{statistics.geometric_mean(rates):.2f} times (geometric means).",
        "",
        measured_on(describe_machine("onnxruntime", "tokenizers", "aiohttp")),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="fp32", help="of the bundle")
    parser.add_argument("--bundle", type=Path, help="one that was compiled before, instead")
    parser.add_argument("--tokens", type=int, default=64, help="at most, for each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args(arguments)
    rows = measure(options.scheme, options.tokens, options.rounds, options.bundle)
    text = table(rows, options.scheme)
    print(text)
    if options.save:
        title, _, body = (__doc__ or "").partition("\n\n")
        RESULTS.write_text(f"# {title}\n\n{body}\n{text}\n", encoding="utf-8")
    unequal = options.scheme == "fp32" and any(row.ours[0].tokens != row.loop[0].tokens for row in rows)
    if unequal:
        print("bench.generation: error: tokens differ from those of the loop", file=sys.stderr)
    return int(unequal)


if __name__ == "__main__":
    sys.exit(main())
