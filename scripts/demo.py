"""The demo behind `scripts/demo`: fetch, compile, serve, ask, measure, stop. Any failure is one line and exit 1."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import platform
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from agent.memory import pss_by_kind
from bench.models import cache_folder, fetch
from targets.bundle import Manifest, read_manifest
from targets.errors import TightfitError
from targets.tensor import human

MODEL = "ppocr-v6-rec"
RECIPE = "ppocr-rec"
"""How an image of a line becomes the input, and the output a text: targets/recipes."""
SHAPE = "x=1,3,48,320..1600"
"""One line of text, 48 pixels high; the width is free between 320 and 1600."""
SCHEME = "int4"
"""Smallest, and on this model no less accurate than INT8: see bench/results/ocr_accuracy.md."""
TARGET = "raspberry-pi-5-4gb"
IMAGE = Path(__file__).with_name("demo.png")
EXPECTED = "Speed limit 50 km/h - exit A7 Madrid"
WARM_UP, REQUESTS = 5, 50
# Compiling takes seconds and starting less than one; past these something hangs.
STEP_TIMEOUT_S, START_TIMEOUT_S, STOP_TIMEOUT_S, REQUEST_TIMEOUT_S = 600.0, 60.0, 30.0, 30.0

console = Console(highlight=False)


class DemoError(TightfitError):
    """A step of the demo failed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model read, and the median time of one request."""

    text: str
    milliseconds: float


def main() -> int:
    """Run the demo; exit status 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Compile a real OCR model for a board and serve it."
    )
    parser.add_argument(
        "--scheme", default=SCHEME, help=f"how to quantize: fp32, int8-dynamic, int8-weights, int4 ({SCHEME})"
    )
    parser.add_argument(
        "--target", default=TARGET, metavar="BOARD", help=f"a board of `tightfit-targets list` ({TARGET})"
    )
    arguments = parser.parse_args()
    try:
        demo(arguments.scheme, arguments.target)
    except TightfitError as error:
        sys.stderr.write(f"scripts/demo: error: {' '.join(str(error).split())}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("scripts/demo: interrupted\n")
        return 130
    return 0


def demo(scheme: str, target: str) -> None:
    """All steps in order."""
    with step(f"Fetching {MODEL} (PP-OCRv6, reads a line of text)"):
        source = fetch(MODEL)
    folder = cache_folder().parent / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    bundle = folder / f"{MODEL}-{scheme}.tfb"
    with step(f"Compiling it for {target}, scheme {scheme}"):
        compile_bundle(source, target, scheme, bundle)
    with step("Asking the source model, without the agent"):
        original = ask_directly(source, bundle)
    with step("Asking the compiled model, without the agent"):
        direct = ask_directly(bundle, bundle)
    manifest = read_manifest(bundle)
    with step("Asking the compiled model, over HTTP"), serve(bundle) as (process, url):
        served = ask_agent(url, manifest)
        memory = memory_of(process.pid)
    console.print()
    report_answers({"source": original, "compiled": direct, "compiled, over HTTP": served})
    before, after = source.stat().st_size, bundle_bytes(bundle)
    console.print(f"size    source {human(before)}, bundle {human(after)} ({after / before:.0%})")
    report_memory(memory, manifest)
    if served.text != original.text:
        raise DemoError(f"the compiled model reads {served.text!r}, the source model {original.text!r}")
    if original.text != EXPECTED:
        raise DemoError(f"the source model reads {original.text!r} instead of {EXPECTED!r}")


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what happens and how long it took."""
    start = time.perf_counter()
    with console.status(f"{what} ..."):
        yield
    console.print(f"[green]\N{CHECK MARK}[/] {what} [dim]{time.perf_counter() - start:.1f} s[/]")


def run_module(*arguments: str) -> str:
    """Standard output of `python -m ...`; raises DemoError with the last thing it said."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DemoError(f"{arguments[0]} took more than {STEP_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise DemoError(f"{arguments[0]} failed with {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def ask_directly(model: Path, bundle: Path) -> Answer:
    """What a model reads, with the bundle's recipe, when the runtime is called in one process."""
    return Answer(**json.loads(run_module("scripts.demo_yardstick", str(model), str(bundle))))


def ask_agent(url: str, manifest: Manifest) -> Answer:
    """What the served model reads, over one connection that is kept open."""
    image, client = IMAGE.read_bytes(), Client(url)
    try:
        return measure(lambda: client.read(manifest.name, image))
    finally:
        client.close()


def compile_bundle(source: Path, target: str, scheme: str, bundle: Path) -> None:
    """Run tightfit-compile as a person would, over whatever an earlier run left."""
    shutil.rmtree(bundle, ignore_errors=True)
    command = ["compile", str(source), "--target", target, "--shape", SHAPE, "--scheme", scheme]
    run_module(*command, "--recipe", RECIPE, "-o", str(bundle))


@contextlib.contextmanager
def serve(bundle: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The agent on a free loopback port, and its address; stopped by SIGTERM at the end."""
    log = bundle.with_suffix(".log")
    command = [sys.executable, "-m", "agent", "serve", "--bundle", str(bundle), "--host", "127.0.0.1", "--port", "0"]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True)
    try:
        yield process, wait_until_ready(process, log)
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the agent did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None
        if status:
            raise DemoError(f"the agent ended with {status}: {last_line(log.read_text())}")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def wait_until_ready(process: subprocess.Popen[str], log: Path) -> str:
    """The address out of the line `serving MODEL at http://...`."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        # Goes on to the end, so that the agent never blocks on a full pipe.
        with contextlib.suppress(ValueError):
            for line in process.stdout or ():
                lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        if not line:
            raise DemoError(f"the agent ended before it was ready: {last_line(log.read_text())}")
        if line.startswith("serving "):
            return line.split()[-1]
    raise DemoError(f"the agent was not ready within {START_TIMEOUT_S:.0f} s: {last_line(log.read_text())}")


class Client:
    """Sends image files, with the standard library's HTTP/1.1 client."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S)

    def read(self, model: str, image: bytes) -> str:
        """The text of one image."""
        try:
            self._connection.request("POST", f"/v2/models/{model}/image", image, {"Content-Type": "image/png"})
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise DemoError(f"the agent did not answer: {error or type(error).__name__}") from None
        if response.status != http.client.OK:
            raise DemoError(f"the agent answered {response.status}: {body[:300].decode(errors='replace')}")
        (text,) = json.loads(body)["text"]
        return str(text)

    def close(self) -> None:
        self._connection.close()


def measure(ask: Callable[[], str]) -> Answer:
    """Median over `REQUESTS` questions, from file to text, one after the other; the last answer stands for all."""
    for _ in range(WARM_UP):
        ask()
    times: list[float] = []
    text = ""
    for _ in range(REQUESTS):
        start = time.perf_counter()
        text = ask()
        times.append((time.perf_counter() - start) * 1000)
    return Answer(text, statistics.median(times))


def memory_of(gateway: int) -> dict[str, dict[str, int]]:
    """PSS in bytes by kind, of the gateway and of its engine processes together."""
    engine: dict[str, int] = {}
    for pid in children_of(gateway):
        for kind, nbytes in pss_by_kind(pid).items():
            engine[kind] = engine.get(kind, 0) + nbytes
    return {"gateway": pss_by_kind(gateway), "engine": engine}


def children_of(pid: int) -> list[int]:
    """Direct children: the field after the command's name in /proc/PID/stat is the state, the next the parent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == pid:
                    found.append(int(entry.name))
    return found


def report_answers(answers: dict[str, Answer]) -> None:
    """What each read, and in what time."""
    table = Table("model", "reads", "ms", title=f"{IMAGE.name}, median of {REQUESTS} requests", title_justify="left")
    table.columns[2].justify = "right"
    for name, answer in answers.items():
        table.add_row(name, answer.text, f"{answer.milliseconds:.1f}")
    console.print(table)


def report_memory(memory: dict[str, dict[str, int]], manifest: Manifest) -> None:
    """What the service used, beside what the plan promised and the board's budget."""
    plan = manifest.plan
    kinds = ("anonymous", "file", "shared")
    table = Table("memory", *kinds, "sum", title="memory by kind", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {f"{name}, measured (PSS)": sizes for name, sizes in memory.items()}
    rows["both, measured"] = {kind: sum(sizes.get(kind, 0) for sizes in memory.values()) for kind in kinds}
    rows["plan, run phase"] = {kind: plan.phase("run").kind_bytes(kind) for kind in kinds}
    for name, sizes in rows.items():
        table.add_row(name, *(human(sizes.get(kind, 0)) for kind in kinds), human(sum(sizes.values())))
    console.print(table)
    console.print(f"budget  {human(plan.budget_bytes)} on {manifest.target}; measured here, on {platform.machine()}")


def bundle_bytes(folder: Path) -> int:
    """Bytes of all files of a bundle."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def last_line(text: str) -> str:
    """What a program said last, which in ours is the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it said nothing"


if __name__ == "__main__":
    sys.exit(main())
