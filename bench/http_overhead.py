"""What HTTP and the second process cost: `python -m bench.http_overhead`.

In one run and interleaved: the agent over a keep-alive connection on loopback (tensors as binary, and as JSON for the
tiny model), and onnxruntime's `session.run` on the same graph, in this process, with as many threads. One request at
a time. Each round gives a p50 and a p99; the table holds the medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from bench.machine import describe_machine
from targets.tensor import Contract, DType, TensorSpec
from tests.support.bundles import dense, model_of, write_bundle

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "http_overhead"
THREADS = 1
RANDOM = np.random.default_rng(7)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A model, its one input, and how many requests a round makes."""

    title: str
    graph: onnx.ModelProto
    input: TensorSpec
    output: TensorSpec
    requests: int
    with_json: bool


def tiny() -> Case:
    """One MatMul over 64 numbers: all that is measured is the way."""
    x, y = dense("x", DType.FLOAT32, 1, 64), dense("y", DType.FLOAT32, 1, 64)
    weight = RANDOM.standard_normal((64, 64), np.float32)
    graph = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [x], [y], {"w": weight})
    return Case("MatMul 1x64", graph, x, y, 1000, with_json=True)


def convolutions() -> Case:
    """Inverted-bottleneck blocks as in MobileNetV2 over a 1x3x224x224 image, about 10 ms on one x86 core."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Array] = {}

    def convolve(source: str, channels: int, filters: int, size: int, stride: int = 1, group: int = 1) -> str:
        name = f"c{len(nodes)}"
        weights[f"{name}_w"] = RANDOM.standard_normal((filters, channels // group, size, size), np.float32) * 0.1
        padding = [size // 2] * 4
        nodes.append(
            helper.make_node(
                "Conv",
                [source, f"{name}_w"],
                [name],
                strides=[stride] * 2,
                group=group,
                pads=padding,
            )
        )
        nodes.append(helper.make_node("Relu", [name], [f"{name}_r"]))
        return f"{name}_r"

    at, channels = convolve("x", 3, 32, 3, stride=2), 32
    for filters, stride in ((16, 1), (24, 2), (32, 2), (32, 1), (64, 2), (64, 1), (96, 1), (96, 1), (160, 2), (160, 1)):
        wide = channels * 6
        at = convolve(at, channels, wide, 1)
        at = convolve(at, wide, wide, 3, stride, group=wide)
        at, channels = convolve(at, wide, filters, 1), filters
    nodes.append(helper.make_node("GlobalAveragePool", [at], ["y"]))
    x, y = dense("x", DType.FLOAT32, 1, 3, 224, 224), dense("y", DType.FLOAT32, 1, channels, 1, 1)
    return Case("convolutions 1x3x224x224", model_of(nodes, [x], [y], weights), x, y, 150, with_json=False)


class Connection:
    """The least an HTTP/1.1 client can do, so that what is measured is the server."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 20)

    def exchange(self, request: bytes) -> bytes:
        """Send a request, return the body of its answer; anything but 200 is an error."""
        self._socket.sendall(request)
        view, size, need = memoryview(self._buffer), 0, None
        while need is None or size < need:
            size += self._socket.recv_into(view[size:])
            end = self._buffer.find(b"\r\n\r\n", 0, size)
            if need is None and end >= 0:
                head = bytes(view[:end])
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                if not head.startswith(b"HTTP/1.1 200") or length is None:
                    raise RuntimeError(head.decode())
                start, need = end + 4, end + 4 + int(length[1])
        return bytes(view[start:need])


def post_of(name: str, value: Array, binary: bool) -> bytes:
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(value.shape)}
    raw, header = b"", ""
    if binary:
        raw = value.tobytes()
        tensor["parameters"] = {"binary_data_size": len(raw)}
    else:
        tensor["data"] = value.ravel().tolist()
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary}}).encode()
    if binary:
        header = f"Inference-Header-Content-Length: {len(text)}\r\n"
    length = len(text) + len(raw)
    head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{header}\r\n"
    return head.encode() + text + raw


@contextlib.contextmanager
def agent(bundle: Path) -> Iterator[str]:
    """The address of a real agent."""
    command = [
        sys.executable,
        "-m",
        "agent",
        "serve",
        "--bundle",
        str(bundle),
        "--port",
        "0",
        "--threads",
        str(THREADS),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("serving "):
            raise RuntimeError("the agent did not start")
        yield line.split("http://")[1].strip()
    finally:
        process.terminate()
        process.wait(30)


def percentiles(call: Callable[[], object], count: int) -> tuple[float, float]:
    """(p50, p99) of `count` calls in microseconds."""
    for _ in range(max(count // 10, 3)):
        call()
    took = []
    for _ in range(count):
        started = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - started) / 1e3)
    took.sort()
    return took[len(took) // 2], took[int(len(took) * 0.99)]


def measure(case: Case, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Way -> p50 and p99 in microseconds, medians over the rounds."""
    bundle = write_bundle(folder / "bench.tfb", [case.graph], Contract((case.input,), (case.output,), {}))
    value = RANDOM.standard_normal([dim for dim in case.input.shape if isinstance(dim, int)], np.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        str(bundle / "segments" / "00.onnx"), options, providers=["CPUExecutionProvider"]
    )
    expected = session.run(None, {"x": value})[0]
    with agent(bundle) as address:
        connection = Connection(address)
        binary, text = post_of("bench", value, binary=True), post_of("bench", value, binary=False)
        raw = connection.exchange(binary)[-expected.nbytes :]
        np.testing.assert_allclose(np.frombuffer(raw, np.float32), expected.ravel(), rtol=1e-4, atol=1e-5)
        live = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        ways: dict[str, Callable[[], object]] = {
            "session.run": lambda: session.run(None, {"x": value}),
            "agent, binary": lambda: connection.exchange(binary),
        }
        if case.with_json:
            ways["agent, JSON"] = lambda: connection.exchange(text)
            ways["GET /v2/health/live"] = lambda: connection.exchange(live)
        seen: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, call in ways.items():
                seen[way].append(percentiles(call, case.requests))
    return {
        way: {"p50_us": statistics.median(p for p, _ in pairs), "p99_us": statistics.median(p for _, p in pairs)}
        for way, pairs in seen.items()
    }


def report(machine: str, rounds: int, figures: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "# What HTTP and the second process cost",
        "",
        f"{machine}. {THREADS} thread in the runtime, client on the same machine, one request at a time, "
        f"medians over {rounds} interleaved rounds. Made by `python -m bench.http_overhead`.",
        "",
        "| model | way | p50 | p99 | p50 more than session.run | ratio of p50 |",
        "|---|---|---|---|---|---|",
    ]
    for title, ways in figures.items():
        base = ways["session.run"]["p50_us"]
        for way, row in ways.items():
            more = f"{row['p50_us'] - base:.0f} us | {row['p50_us'] / base:.2f}"
            lines.append(f"| {title} | {way} | {row['p50_us']:.0f} us | {row['p99_us']:.0f} us | {more} |")
    lines += [
        "",
        "`GET /v2/health/live` is the same connection without inference: what HTTP alone costs here.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    figures = {}
    for case in (convolutions(), tiny()):
        with tempfile.TemporaryDirectory() as folder:
            figures[case.title] = measure(case, rounds, Path(folder))
    machine = describe_machine("onnxruntime", "aiohttp", "uvloop")
    text = report(", ".join(f"{name} {value}" for name, value in machine.items()), rounds, figures)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.with_suffix(".md").write_text(text, encoding="utf-8")
    fields = {"machine": machine, "threads": THREADS, "rounds": rounds, "figures": figures}
    RESULTS.with_suffix(".json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
