"""The real agent as a child, and a client that fills all its slots at once with the largest requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from compile.calibrate.synthetic import indexed_rows
from compile.errors import OptionError
from compile.graph import load_model
from compile.limits import Limit
from targets.bundle import Manifest, Residency, safe_path
from targets.errors import TightfitError
from targets.tensor import DType, TensorSpec

# The agent of this very installation, whatever else the interpreter would find.
_ROOT = Path(__file__).parents[1]
_AGENT = (sys.executable, "-m", "agent")
_END_S = 30.0
# A reader's buffer: answers are thrown away, never held.
_READ_BYTES = 1 << 20
# Nothing is refused for being slow or large here: whether it fits is the question.
_CONFIG = """\
[http]
body_bytes = 2147483647
body_s = {seconds}
[requests]
timeout_s = {seconds}
[engine]
load_s = {seconds}
[memory]
os_reserve_mib = 0
[log]
format = "console"
"""


class ServiceError(TightfitError):
    """The agent did not start, ended, or did not answer."""


class Service:
    """A `tightfit-agent` under a limit; made by `started`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        self.url = ""

    def wait_ready(self, timeout_s: float) -> None:
        """Until the agent says its address. Raises ServiceError with what it said instead."""
        lines: queue.Queue[str] = queue.Queue()
        stdout = cast("IO[str]", self.process.stdout)
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        try:
            line = lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ServiceError(f"it was not ready within {timeout_s:g} s") from None
        if not line.startswith("serving "):
            self.process.wait(_END_S)
            raise ServiceError(self.last_words() or f"the agent ended with code {self.process.returncode}")
        self.url = line.split()[-1]

    def wait_end(self, timeout_s: float) -> None:
        """Until the command is done. Raises ServiceError when it failed, with what it said."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServiceError(f"it was not done within {timeout_s:g} s") from None
        if code:
            raise ServiceError(self.last_words() or f"the agent ended with code {code}")

    def fill(
        self, manifest: Manifest, bodies: Sequence[bytes], headers: dict[str, str], timeout_s: float
    ) -> list[float]:
        """A request for every slot at the same time; returns when all are answered, with their seconds.

        Each holds its last byte back until all have sent the rest, so that all slots are taken before one is free; its
        seconds are those from that byte to the last of its answer. Raises ServiceError with the first answer that is
        not 200, or with what became of the connection.
        """
        taken: queue.Queue[float] = queue.Queue()
        failures: queue.Queue[str] = queue.Queue()
        barrier = threading.Barrier(len(bodies))

        def one(body: bytes) -> None:
            try:
                taken.put(self._infer(f"/v2/models/{manifest.name}/infer", body, headers, timeout_s, barrier))
            except threading.BrokenBarrierError:
                pass  # another request failed, and said why
            except (OSError, http.client.HTTPException, ServiceError) as error:
                failures.put(str(error) or type(error).__name__)
                barrier.abort()

        threads = [threading.Thread(target=one, args=(body,), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not failures.empty():
            raise ServiceError(failures.get())
        return [taken.get() for _ in bodies]

    def _infer(
        self, path: str, body: bytes, headers: dict[str, str], timeout_s: float, barrier: threading.Barrier
    ) -> float:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=timeout_s)
        try:
            connection.putrequest("POST", path)
            for name, text in {**headers, "Content-Length": str(len(body))}.items():
                connection.putheader(name, text)
            connection.endheaders()
            connection.send(memoryview(body)[:-1])
            barrier.wait()
            started = time.perf_counter()
            connection.send(body[-1:])
            response = connection.getresponse()
            if response.status != 200:
                raise ServiceError(f"{response.status} {_error_in(response.read(_READ_BYTES))}")
            while response.read(_READ_BYTES):
                pass
            return time.perf_counter() - started
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """The agent's counters and gauges by name: it serves one model. Raises ServiceError."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=_END_S)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode("utf-8").splitlines()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(str(error) or type(error).__name__) from None
        finally:
            connection.close()
        values: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    @property
    def was_killed(self) -> bool:
        """Whether the gateway itself, not its engine, was ended by SIGKILL."""
        return self.process.poll() == -signal.SIGKILL

    def last_words(self) -> str:
        """The last error of the agent's log, without its decoration."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
        errors = [line for line in lines if "error" in line.lower() or "engine" in line.lower()] or lines
        last = next((line for line in reversed(errors) if line), "")
        return last.removeprefix("tightfit-agent: error: ")[:500]

    def end(self) -> None:
        """Stop the agent, politely first."""
        for stop in (self.process.terminate, self.process.kill):
            stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
                return


def _error_in(body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"])
    return body[:300].decode("utf-8", errors="replace")


def serve_command(bundle: Path, folder: Path, cache: Path | None, timeout_s: float) -> list[str]:
    """`tightfit-agent serve` on a free port, with a configuration in `folder` that refuses nothing for its size."""
    config = folder / "agent.toml"
    config.write_text(_CONFIG.format(seconds=min(timeout_s, 86_400.0)), encoding="utf-8")
    command = [*_AGENT, "serve", "--config", str(config), "--bundle", str(bundle), "--port", "0"]
    return [*command, "--cache", str(cache)] if cache else command


def finalise_command(bundle: Path, cache: Path, residency: Residency | None = None) -> list[str]:
    """`tightfit-agent finalise` into `cache`."""
    command = [*_AGENT, "finalise", str(bundle), "--cache", str(cache), "--os-reserve-mib", "0"]
    return [*command, "--residency", residency.value] if residency else command


@contextlib.contextmanager
def started(command: list[str], limit: Limit | None, folder: Path) -> Iterator[Service]:
    """The agent, starting; its log stands in `folder`. It is ended with the context."""
    log = folder / "agent.log"
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            limit.command(command) if limit else command,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    service = Service(process, log)
    try:
        yield service
    finally:
        service.end()
        cast("IO[str]", process.stdout).close()


def needs_finalise(manifest: Manifest) -> bool:
    """Whether weights must be laid out anew on the board before the bundle can be served."""
    return any(segment.residency.needs_finalise for segment in manifest.segments)


def drop_from_page_cache(bundle: Path, manifest: Manifest) -> None:
    """Let the kernel forget the bundle's files: a page that is cached already would be charged to somebody else."""
    for entry in manifest.files:
        fd = os.open(safe_path(bundle, entry.path), os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Requests:
    """Open Inference Protocol requests with every dimension at its maximum, long sequences at their longest, binary in
    and out.

    Floats are standard normal. Integers that index a table are spread evenly over it, and each of the `count` requests
    takes other rows, so that tables are touched as widely as so many requests can; all others stay within those of the
    bundle's sample.
    """

    def __init__(self, bundle: Path, manifest: Manifest, count: int) -> None:
        """Raises OptionError for an input that the protocol cannot carry."""
        self._count = count
        self._rows = _indexed_rows(bundle, manifest)
        self._inputs: list[tuple[TensorSpec, list[int], bytes]] = []
        rng = np.random.default_rng(0)
        samples = {sample.name: sample.file for sample in manifest.sample}
        contract = manifest.contract.whole
        for spec in contract.inputs:
            shape = [dim if isinstance(dim, int) else contract.dims[dim].max for dim in spec.shape]
            sample = safe_path(bundle, samples[spec.name]) if spec.name in samples else None
            self._inputs.append((spec, shape, _values(rng, spec, shape, sample)))
        described = [
            {
                "name": spec.name,
                "datatype": spec.dtype.oip,
                "shape": shape,
                "parameters": {"binary_data_size": len(data)},
            }
            for spec, shape, data in self._inputs
        ]
        self._head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
        self.headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(self._head)),
        }

    def body(self, number: int) -> bytes:
        """The request of that number, from 0 to `count` - 1."""
        return self._head + b"".join(self._data(number, *each) for each in self._inputs)

    def _data(self, number: int, spec: TensorSpec, shape: list[int], data: bytes) -> bytes:
        rows = self._rows.get(spec.name)
        if rows is None:
            return data
        values = int(np.prod(shape, dtype=np.int64))
        at = np.arange(values, dtype=np.int64) * self._count + number % self._count
        return (at * rows // (values * self._count)).astype(np.dtype(spec.dtype.numpy)).tobytes()


def _indexed_rows(bundle: Path, manifest: Manifest) -> dict[str, int]:
    """Rows of the smallest table that each integer input indexes, by the graphs of all segments."""
    integers = {s.name for s in manifest.contract.inputs if s.dtype.numpy and np.dtype(s.dtype.numpy).kind in "iu"}
    rows: dict[str, int] = {}
    for segment in manifest.segments:
        for name, size in indexed_rows(load_model(safe_path(bundle, segment.file))).items():
            if name in integers:
                rows[name] = min(rows.get(name, size), size)
    return rows


def _values(rng: np.random.Generator, spec: TensorSpec, shape: list[int], sample: Path | None) -> bytes:
    if spec.dtype is DType.STRING:
        count = int(np.prod(shape, dtype=np.int64))
        size = max(spec.max_nbytes // max(count, 1) - 4, 0)
        return (struct.pack("<I", size) + b"x" * size) * count
    if spec.dtype.numpy is None or spec.dtype.oip is None:
        raise OptionError(f"input {spec.describe()} cannot be sent", "compile the model with float32 or integer inputs")
    dtype = np.dtype(spec.dtype.numpy)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype).tobytes()
    low, high = _range_of(sample, dtype)
    return rng.integers(low, high, shape, endpoint=True).astype(dtype).tobytes()


def _range_of(sample: Path | None, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Smallest and largest integer of the sample; 0 and 1, as masks and flags have them, where there is none."""
    values: npt.NDArray[Any] = np.fromfile(sample, dtype) if sample else np.zeros(0, dtype)
    return (int(values.min()), int(values.max())) if values.size else (0, 1)
