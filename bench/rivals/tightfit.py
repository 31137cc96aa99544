"""This repository's agent, as it serves: a bundle made by the compiler, a configuration without any tuning."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.rivals.server import Server, ServerError, last_words, process
from bench.served_models import BATCH, ServedModel
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board

BOARD = "x86-64-dev"
SLOTS = 32
"""Requests in memory at once, a property of the bundle: twice the low-priority clients of the flood."""
_START_S = 60.0
_ROOT = Path(__file__).parents[2]


def bundle_of(model: ServedModel, onnx: Path, folder: Path, batched: bool = True) -> Path:
    """The compiled model, NAME.tfb, for requests that mostly have one row; where it is not batched, always one."""
    out = folder / f"{model.name}.tfb"
    rows = f"1..1..{model.max_batch}" if batched else "1"
    options = Options(shapes=(parse_shape(f"{BATCH}={rows}"),), slots=SLOTS)
    compile_model(onnx, load_board(BOARD), out, options)
    return out


@contextlib.contextmanager
def serving(bundles: Sequence[Path], folder: Path, settings: str = "") -> Iterator[Server]:
    """An agent with one thread in the runtime. `settings` is TOML beside that; more bundles than one are served under
    model control. `folder` takes configuration and log. Raises ServerError."""
    folder.mkdir()
    many = "".join(f"[[models]]\nbundle = {json.dumps(str(bundle))}\n" for bundle in bundles)
    models = f"[repository]\ncontrol = true\n{many}" if len(bundles) > 1 else ""
    single = f"bundle = {json.dumps(str(bundles[0]))}\n" if len(bundles) == 1 else ""
    config = folder / "agent.toml"
    config.write_text(f"{single}{settings}\n{models}", encoding="utf-8")
    log = folder / "agent.log"
    command = [sys.executable, "-m", "agent", "serve", "--config", str(config), "--port", "0", "--threads", "1"]
    began = time.monotonic()
    with process(command, log, PYTHONPATH=str(_ROOT)) as agent:
        assert agent.stdout is not None
        said, _, _ = select.select([agent.stdout], [], [], _START_S)
        line = agent.stdout.readline() if said else ""
        if not line.startswith("serving "):
            raise ServerError(f"the agent did not start: {last_words(log)}")
        address = line.split()[-1]
        start_s = time.monotonic() - began
        yield Server(address, agent.pid, start_s, address, "agent.engine.worker", "tightfit_executed_requests_total")
