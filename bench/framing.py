"""What a record of a stream costs besides its run: `python -m bench.framing`.

From bytes that came to a checked request, and from the outputs of a run to bytes that go; the transport and the engine
are left out. Records come 64 KiB at a time, as they do from a socket that is kept full. Each figure is the least of
many short rounds: on a busy machine all others hold the work of somebody else.
"""

from __future__ import annotations

import argparse
import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent.http.codecs import OutputTensor, decode_infer, encode_infer
from agent.http.framing.decoder import Decoder, Message
from agent.http.framing.encoder import Encoder
from agent.http.framing.formats import decoder_of, encoder_of
from agent.http.framing.records import Timing, answer
from agent.http.framing.requests import RequestReader
from bench.machine import describe_machine, measured_on
from targets.tensor import Contract, DType, TensorSpec

RESULTS = Path(__file__).parent / "results" / "framing.md"
CHUNK_BYTES = 64 << 10
LIMIT = 8 << 20
LINES = "application/x-ndjson"
FRAMES = "application/vnd.tightfit.frames"
PARTS = "multipart/x-mixed-replace; boundary=frame"
TIMING = Timing(40, 910, 1003)


@dataclass(frozen=True)
class Case:
    """Records of one kind: their framing, their bytes, and the contract of the model that they ask."""

    title: str
    content_type: str
    records: list[bytes]
    contract: Contract
    images: Contract | None = None


def contract_of(name: str, count: int) -> Contract:
    return Contract(
        (TensorSpec(name, DType.FLOAT32, (1, count), 4 * count),), (TensorSpec("y", DType.FLOAT32, (1, 8), 32),), {}
    )


def lines(count: int) -> Case:
    """JSON requests with numbers of six digits, each with an id of its own."""
    contract, random = contract_of("x", count), np.random.default_rng(7)
    records = []
    for index in range(CHUNK_BYTES // (10 * count)):
        data = [round(float(value), 6) for value in random.standard_normal(count)]
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, count], "data": data}
        records.append(json.dumps({"id": f"r{index}", "inputs": [tensor]}, separators=(",", ":")).encode() + b"\n")
    return Case("JSON line", LINES, records, contract)


def frames(count: int, with_id: bool) -> Case:
    """Frames with a tensor of so many numbers."""
    contract, records = contract_of("pcm", count), []
    for index in range(max(CHUNK_BYTES // (4 * count), 1)):
        parameters = {"binary_data_size": 4 * count}
        head = {"inputs": [{"name": "pcm", "datatype": "FP32", "shape": [1, count], "parameters": parameters}]}
        text = json.dumps({"id": f"r{index}", **head} if with_id else head, separators=(",", ":")).encode()
        tensor = np.full(count, index, np.float32).tobytes()
        records.append(struct.pack("<II", 4 + len(text) + len(tensor), len(text)) + text + tensor)
    return Case(f"frame{', each with an id' if with_id else ''}", FRAMES, records, contract)


def parts(nbytes: int, with_length: bool) -> Case:
    """Images as a camera sends them; bytes at random, as a JPEG's are."""
    body = np.random.default_rng(7).bytes(nbytes)
    length = f"Content-Length: {nbytes}\r\n" if with_length else ""
    record = f"\r\n--frame\r\nContent-Type: image/jpeg\r\n{length}\r\n".encode() + body
    image = Contract((TensorSpec("image", DType.STRING, (1,), LIMIT, "encoded"),), contract_of("x", 1).outputs, {})
    title = f"image part {'with' if with_length else 'without'} Content-Length"
    return Case(title, PARTS, [record] * 2, contract_of("x", 1), image)


def least_us(work: Callable[[], int], seconds: float) -> float:
    """Microseconds for one of the records that a call of `work` says it did."""
    best, end = float("inf"), time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        records = work()
        best = min(best, (time.perf_counter() - started) / records)
    return best * 1e6


def messages(decoder: Decoder, data: bytes) -> Iterator[Message]:
    """All that comes of the data, given 64 KiB at a time."""
    for at in range(0, len(data), CHUNK_BYTES):
        decoder.feed(data[at : at + CHUNK_BYTES])
        while (message := decoder.next()) is not None:
            yield message


def measure(case: Case, seconds: float) -> tuple[float, float]:
    """Microseconds for (reading a record, writing its answer)."""
    data = b"".join(case.records)
    decoder = decoder_of(case.content_type, LIMIT)
    encoder = encoder_of("", case.content_type, "e")
    reader = RequestReader(case.contract, case.images, encoder)

    def read() -> int:
        # The last part without a length is only complete with the delimiter behind it.
        return max(len([reader.read(message) for message in messages(decoder, data)]), 1)

    read()
    return least_us(read, seconds), least_us(lambda: write(case, encoder), seconds)


def write(case: Case, encoder: Encoder) -> int:
    """Write a hundred answers."""
    data = np.arange(8, dtype=np.float32).view(np.uint8) / 3
    outputs = [OutputTensor(case.contract.outputs[0], (1, 8), data.astype(np.uint8), encoder.binary)]
    for seq in range(100):
        record, raw = answer(seq, None, "m", "1", outputs, TIMING)
        b"".join([encoder.encode(record, raw), *raw])
    return 100


def alone(case: Case, seconds: float) -> tuple[float, float]:
    """The same for requests of their own: what the codec takes, HTTP itself left out."""
    found = list(messages(decoder_of(case.content_type, LIMIT), b"".join(case.records)))
    binary = case.content_type == FRAMES
    outputs = [OutputTensor(case.contract.outputs[0], (1, 8), np.arange(8, dtype=np.float32).view(np.uint8), binary)]

    def read() -> int:
        return len([decode_infer(item.body, item.header_length, case.contract) for item in found])

    def written() -> int:
        return len([encode_infer("m", "1", None, outputs) for _ in range(100)])

    return least_us(read, seconds), least_us(written, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args(arguments)
    rows = [
        "| record | bytes | read | answer | read, as a request of its own | answer |",
        "|---|---|---|---|---|---|",
    ]
    small = [lines(99), frames(79, with_id=False), frames(79, with_id=True)]
    large = [frames(150_528, with_id=False), parts(100_000, with_length=True), parts(100_000, with_length=False)]
    for case in [*small, *large]:
        figures = [*measure(case, options.seconds)]
        figures += alone(case, options.seconds) if case.content_type != PARTS else []
        cells = [f"{figure:.1f}" for figure in figures] + [""] * (4 - len(figures))
        rows.append(f"| {case.title} | {len(case.records[0])} | {' | '.join(cells)} |")
    table = "\n".join([*rows, "", measured_on(describe_machine("msgspec", "numpy"))])
    print(table)
    if options.write:
        title, _, text = (__doc__ or "").partition("\n\n")
        RESULTS.write_text(f"# {title}\n\n{text}\nMicroseconds a record.\n\n{table}\n")


if __name__ == "__main__":
    main()
