"""What a stream gains over requests of their own: `python -m bench.streams`.

One small model that takes rows of several requests together, and whose run takes next to nothing, so that what is
measured is the way to it: records of raw tensors as frames, and of JSON as lines, over one stream with so many
unanswered ones; and the same as infer requests, one after the other on a keep-alive connection, and on so many
connections at once. Interleaved rounds; medians over them. Client and agent share the machine.
"""

from __future__ import annotations

import argparse
import re
import selectors
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agent.http.codecs import HEADER_LENGTH
from agent.load.samples import Message
from bench.machine import describe_machine, measured_on
from bench.rivals import tightfit
from bench.rivals.server import Server
from bench.served_models import TINY
from bench.traffic import Target, connect, raw

RESULTS = Path(__file__).parent / "results" / "streams.md"
LINES, FRAMES = "application/x-ndjson", "application/vnd.tightfit.frames"
IN_FLIGHT = 16
SETTINGS = f"[streams]\nin_flight = {IN_FLIGHT}\n"
RESULT = b'{"type":"result"'
_LENGTH = re.compile(rb"(?i)content-length: (\d+)")


def record_of(message: Message, content_type: str) -> bytes:
    """An infer request as a record of a stream."""
    if content_type == LINES:
        return message.body + b"\n"
    header = int(message.headers.get(HEADER_LENGTH, len(message.body)))
    return struct.pack("<II", 4 + len(message.body), header) + message.body


def over_stream(server: Server, model: str, content_type: str, record: bytes, window: int, seconds: float) -> float:
    """Records per second over one stream with `window` of them unanswered."""
    with connect(server) as connection:
        connection.sendall(
            f"POST /v2/models/{model}/stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        chunk = b"%x\r\n%b\r\n" % (len(record), record)
        connection.sendall(chunk * window)
        answered, tail = 0, b""
        started = time.perf_counter()
        while (now := time.perf_counter()) < started + seconds:
            data = connection.recv(1 << 18)
            if not data:
                raise RuntimeError(f"the stream ended: {tail!r}")
            data = tail + data
            came = data.count(RESULT)
            tail = data[-len(RESULT) + 1 :]
            answered += came
            if b'{"type":"error"' in data:
                raise RuntimeError(data.decode("latin-1"))
            connection.sendall(chunk * came)
        return answered / (now - started)


def as_requests(server: Server, request: bytes, connections: int, seconds: float) -> float:
    """Requests per second, one at a time on each of so many keep-alive connections."""
    selector = selectors.DefaultSelector()
    sockets = [connect(server) for _ in range(connections)]
    for each in sockets:
        selector.register(each, selectors.EVENT_READ, bytearray())
        each.sendall(request)
    answered = 0
    started = time.perf_counter()
    while (now := time.perf_counter()) < started + seconds:
        for key, _ in selector.select():
            connection, data = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            data += connection.recv(1 << 18)
            head = data.find(b"\r\n\r\n")
            length = _LENGTH.search(data, 0, head) if head >= 0 else None
            if length is None or len(data) < head + 4 + int(length[1]):
                continue
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data.decode("latin-1"))
            data.clear()
            answered += 1
            connection.sendall(request)
    for each in sockets:
        each.close()
    selector.close()
    return answered / (now - started)


def measure(windows: Sequence[int], seconds: float, rounds: int) -> dict[tuple[str, str, int], float]:
    """(form, way, unanswered at once) -> records per second, medians over the rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = tightfit.bundle_of(TINY, TINY.write(folder), folder)
        with tightfit.serving([bundle], folder / "agent", SETTINGS) as server:
            target = Target("ours", server, TINY.name, TINY)
            ways: dict[tuple[str, str, int], Callable[[], float]] = {}
            for form, binary, content_type in (("raw tensors", True, FRAMES), ("JSON", False, LINES)):
                message = target.message(binary=binary)
                request, record = raw(message), record_of(message, content_type)
                for window in windows:
                    ways[form, "stream", window] = partial(
                        over_stream, server, TINY.name, content_type, record, window, seconds
                    )
                    ways[form, "requests", window] = partial(as_requests, server, request, window, seconds)
            seen: dict[tuple[str, str, int], list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, run in ways.items():
                    seen[way].append(run())
    return {way: statistics.median(rates) for way, rates in seen.items()}


def table(figures: dict[tuple[str, str, int], float]) -> str:
    rows = [
        "| record | unanswered at once | one stream | requests, a connection each | stream : one request at a time |",
        "|---|---|---|---|---|",
    ]
    for (form, way, window), rate in figures.items():
        if way == "stream":
            alone = figures[form, "requests", 1]
            others = figures[form, "requests", window]
            rows.append(f"| {form} | {window} | {rate:.0f}/s | {others:.0f}/s | {rate / alone:.2f} |")
    return "\n".join([*rows, "", measured_on(describe_machine("aiohttp", "uvloop", "msgspec"))])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", default="1,4,16,64", help="records that are unanswered at once")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args(arguments)
    windows = sorted({1, *map(int, options.windows.split(","))})
    text = table(measure(windows, options.seconds, options.rounds))
    print(text)
    if options.write:
        title, _, body = (__doc__ or "").partition("\n\n")
        RESULTS.write_text(f"# {title}\n\n{body}\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
