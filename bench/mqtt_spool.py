"""What it costs to keep a message through a power cut: `python -m bench.mqtt_spool`.

Records of 1 KB are appended and made durable by a process of its own: by the spool, a bare file, and SQLite. Bytes
written are those that the kernel counts for the process (`write_bytes` of /proc/self/io, pages that it sends to the
storage; what the file system's journal adds is in none of them). Rounds are interleaved, so that each figure had the
same neighbours; a figure is the median of its rounds, but for the processor's time, which is the least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from agent.mqtt.spool.gaps import Gap
from agent.mqtt.spool.keeper import Keeper
from agent.mqtt.spool.policy import Limits, Policy
from agent.mqtt.spool.spool import Gaps, Spool
from bench.machine import describe_machine, measured_on

RESULTS = Path(__file__).parent / "results" / "mqtt_spool.md"
BODY = os.urandom(1000)
STREAM = "reader/m/result"


def opened(folder: Path) -> Spool:
    """With the limits that it has by itself."""
    policies = {"m": Policy(1 << 30), "e": Policy(1 << 20)}
    return Spool.open(folder / "spool", "s1", policies, Gaps("e", "gap", told), time.monotonic(), "boot", Limits())


def told(gap: Gap, now: float) -> bytes:
    """Nothing is dropped here."""
    raise AssertionError(gap, now)


def spool(folder: Path, records: int, group: int) -> None:
    """Append, and sync each group."""
    kept = opened(folder)
    for number in range(1, records + 1):
        kept.append("m", STREAM, BODY, 0.0)
        if number % group == 0:
            kept.sync(0.0)
    kept.close(0.0)


def spool_delivered(folder: Path, records: int, group: int) -> None:
    """The same, and each group is taken and acknowledged, so that segments go."""
    kept = opened(folder)
    kept.connected()
    for number in range(1, records + 1):
        kept.append("m", STREAM, BODY, 0.0)
        if number % group == 0:
            kept.sync(0.0)
            for entry in kept.live(group, 0.0):
                kept.delivered(entry.position, 0.0)
    kept.close(0.0)


def spool_loop(folder: Path, records: int, group: int) -> None:
    """On an event loop, while a thread syncs; a producer waits for each group."""

    async def main() -> None:
        keeper = Keeper(opened(folder), time.monotonic)
        keeper.start()
        for _ in range(records // group):
            for _ in range(group - 1):
                keeper.put("m", STREAM, BODY)
            await keeper.append("m", STREAM, BODY)
        await keeper.stop()

    asyncio.run(main())


def bare_file(folder: Path, records: int, group: int) -> None:
    """A length, a CRC and the record, nothing else."""
    file = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for _ in range(records // group):
        record = len(BODY).to_bytes(4, "little") + zlib.crc32(BODY).to_bytes(4, "little") + BODY
        os.write(file, b"".join([record] * group))
        os.fdatasync(file)
    os.close(file)


def sqlite(folder: Path, records: int, group: int) -> None:
    """A table in a WAL, synchronous=FULL."""
    database = sqlite3.connect(folder / "queue.db", isolation_level=None)
    database.execute("pragma journal_mode=wal")
    database.execute("pragma synchronous=full")
    database.execute("create table queue(id integer primary key, body blob)")
    for _ in range(records // group):
        database.execute("begin")
        database.executemany("insert into queue(body) values(?)", [(BODY,)] * group)
        database.execute("commit")
    database.close()


# Title, how, records in a group, share of the records: those that sync each take long.
CASES: dict[str, tuple[Callable[[Path, int, int], None], int, float]] = {
    "spool, 50 a sync": (spool, 50, 1.0),
    "spool, 50 a sync, all delivered": (spool_delivered, 50, 1.0),
    "spool, 50 a sync, on a loop with a thread": (spool_loop, 50, 1.0),
    "spool, a sync each": (spool, 1, 0.05),
    "bare file, 50 a sync": (bare_file, 50, 1.0),
    "bare file, a sync each": (bare_file, 1, 0.05),
    "SQLite WAL FULL, 50 a transaction": (sqlite, 50, 1.0),
    "SQLite WAL FULL, a transaction each": (sqlite, 1, 0.05),
}
BASE = "spool, 50 a sync"


def written_bytes() -> int:
    """What this process has sent to the storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


def run_case(title: str, records: int, folder: Path) -> None:
    """In a process of its own: print seconds and bytes."""
    how, group, share = CASES[title]
    records = max(int(records * share) // group, 1) * group
    before, started, cpu = written_bytes(), time.perf_counter(), time.process_time()
    how(folder, records, group)
    seconds = time.perf_counter() - started
    cpu_us = (time.process_time() - cpu) * 1e6 / records
    print(json.dumps([records / seconds, cpu_us, (written_bytes() - before) / (records * len(BODY))]))


def measure(title: str, records: int) -> tuple[float, float, float]:
    """Records a second, microseconds of the processor for each, and bytes written for each byte."""
    with tempfile.TemporaryDirectory(prefix="spool") as folder:
        command = [sys.executable, "-m", "bench.mqtt_spool", "--case", title, "--records", str(records), "--in", folder]
        rate, cpu_us, amplification = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        return rate, cpu_us, amplification


def report(found: dict[str, list[tuple[float, float, float]]], records: int) -> str:
    """The table, and what the spool is beside each of the others."""
    rates = {title: statistics.median(rate for rate, _, _ in rounds) for title, rounds in found.items()}
    cpu = {title: min(cpu_us for _, cpu_us, _ in rounds) for title, rounds in found.items()}
    written = {
        title: statistics.median(amplification for _, _, amplification in rounds) for title, rounds in found.items()
    }
    lines = [
        f"# {(__doc__ or '').strip()}",
        "",
        f"{records} records a round (a twentieth where each is synced), {len(next(iter(found.values())))} rounds.",
        "",
        "| way | records/s | CPU, µs each | bytes written a byte | rate, to the spool's | bytes, to the spool's |",
        "|---|---|---|---|---|---|",
    ]
    for title in found:
        ratios = f"{rates[title] / rates[BASE]:.2f} | {written[title] / written[BASE]:.2f}"
        lines.append(f"| {title} | {rates[title]:,.0f} | {cpu[title]:.1f} | {written[title]:.2f} | {ratios} |")
    return "\n".join([*lines, "", measured_on(describe_machine("msgspec")), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to keep a message through a power cut.")
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--in", dest="folder", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} too")
    arguments = parser.parse_args()
    if arguments.case:
        run_case(arguments.case, arguments.records, arguments.folder)
        return
    found: dict[str, list[tuple[float, float, float]]] = {title: [] for title in CASES}
    for _ in range(arguments.rounds):
        for title, rounds in found.items():
            rounds.append(measure(title, arguments.records))
    text = report(found, arguments.records)
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
