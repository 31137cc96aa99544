"""Real power cuts under the spool: `python -m bench.power_cuts`.

A Linux kernel (User-Mode-Linux, Debian's `user-mode-linux`) has a disk of its own with ext4 and runs a writer: it
appends alarms, events and measures, syncs, says what is durable, takes some and acknowledges it. At a random moment the
kernel is killed with all that it had not given to its disk. The next one mounts the same disk, and the writer says what
the spool still has before it goes on. Nothing that was said to be durable may be missing unless it was delivered, and
nothing may be there twice. As a control the same writer runs with syncs that do nothing. Needs `mke2fs`, and root or a
user who may read the host's files; the host is not changed.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.mqtt.spool.lane import Entry
from agent.mqtt.spool.policy import Drop, Limits, Policy
from agent.mqtt.spool.spool import Gaps, Spool
from bench.machine import describe_machine, measured_on

RESULTS = Path(__file__).parent / "results" / "power_cuts.md"
ROOT = Path(__file__).parents[1]
LINUX = "linux.uml"
DISK_BYTES = 96 << 20
CONTROL_CUTS = 2
# A kernel that says nothing for so long hangs.
BOOT_S = 120.0

# Small segments, so that cuts meet many that begin and end. There is room for all: nothing is dropped.
LIMITS = Limits(segment_bytes=32 << 10, notes_bytes=16 << 10, free_floor_bytes=0)
POLICIES = {kind: Policy(24 << 20, drop=Drop.NEWEST) for kind in "mea"}
GAPS = Gaps("e", "gap", lambda gap, _: repr(gap).encode())

Key = tuple[str, int]


def write(folder: Path, session: str, rounds: int, *, unsynced: bool) -> None:
    """Say what is there, then append, sync and deliver, so many times or until the power goes."""
    if unsynced:
        vars(os).update(fdatasync=lambda _: None, fsync=lambda _: None)
    spool = Spool.open(folder, session, POLICIES, GAPS, 0.0, "boot", LIMITS)
    entries = list(waiting(spool))
    for entry in entries:
        say("HAVE", entry.session, entry.body.split(b" ")[0].decode())
    figures = spool.figures
    balanced = all(counts.balanced for counts in figures.by_kind.values())
    positions = [entry.position for entry in entries]
    dropped = sum(sum(counts.dropped.values()) for counts in figures.by_kind.values())
    say("STATE", "balanced" if balanced and positions == sorted(positions) else "WRONG", str(dropped))
    spool.connected()
    number = 0
    for _ in range(rounds):
        for _ in range(20):
            kind = "mmmmmmea"[number % 8]
            spool.append(kind, f"{kind}/t", b"%d " % number + b"x" * (number * 37 % 1500), 0.0)
            number += 1
        spool.sync(0.0)
        say("DURABLE", session, str(number))
        for entry in [*spool.live(9, 0.0), *spool.replay(9, 0.0)]:
            say("DELIVERED", entry.session, entry.body.split(b" ")[0].decode())
            spool.delivered(entry.position, 0.0)
    say("END")


def waiting(spool: Spool) -> Iterable[Entry]:
    after = -1
    while entries := spool.replay(100, 0.0, after):
        yield from entries
        after = entries[-1].position


def say(*words: str) -> None:
    """A line on the console, whole or not at all as far as the host can tell: it ends with a full stop."""
    os.write(1, (" ".join(words) + " .\n").encode())


@dataclass
class Known:
    """What the writers said."""

    durable: dict[str, int] = field(default_factory=dict)
    delivered: set[Key] = field(default_factory=set)

    def missing(self, have: set[Key]) -> set[Key]:
        """Durable, not delivered, and not there."""
        all_durable = {(session, number) for session, upto in self.durable.items() for number in range(upto)}
        return all_durable - self.delivered - have


@dataclass(frozen=True)
class Cut:
    """What the kernel behind a cut found."""

    after_s: float
    durable: int
    waiting: int
    lost: int
    doubled: int
    dropped: int
    right: bool


def boot(
    disk: Path, folder: Path, session: str, rounds: int, cut_after_s: float | None, control: bool
) -> list[list[str]]:
    """What a kernel said, until it ended or was killed so long after its writer said something was durable."""
    script = folder / "init"
    python = " ".join(map(shlex.quote, [sys.executable, "-m", "bench.power_cuts", "--write", "/mnt/spool", session]))
    python += " --unsynced" * control
    script.write_text(
        "#!/bin/sh\nmount -t proc proc /proc\nmount -t ext4 /dev/ubda /mnt || echo 'FAILED mount .'\n"
        f"cd {shlex.quote(str(ROOT))}\nexport PYTHONDONTWRITEBYTECODE=1\n{python} --rounds {rounds}\n"
        "umount /mnt\nexec poweroff -f -f\n"
    )
    script.chmod(0o755)
    command = [LINUX, f"ubd0={disk}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "mem=256M"]
    command += [f"init={script}", "con=null", "con0=fd:0,fd:1", "quiet", f"uml_dir={folder}", f"umid={session}"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    said: list[list[str]] = []
    timer = threading.Timer(BOOT_S, kill, [process])
    timer.start()
    for line in process.stdout:
        words = line.decode(errors="replace").split()
        if not words or words[-1] != ".":
            continue
        said.append(words[:-1])
        if words[0] == "DURABLE" and cut_after_s is not None:
            timer.cancel()
            timer = threading.Timer(cut_after_s, kill, [process])
            timer.start()
            cut_after_s = None
    timer.cancel()
    kill(process)
    process.wait()
    return said


def kill(process: subprocess.Popen[bytes]) -> None:
    """The power is gone: the kernel and all its processes, which are one group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def judge(said: Sequence[Sequence[str]], known: Known, after_s: float) -> Cut:
    """Hold what a kernel found against what was said before; note what it says itself."""
    have = [(words[1], int(words[2])) for words in said if words[0] == "HAVE"]
    state = next((words for words in said if words[0] == "STATE"), ["STATE", "SILENT", "0"])
    durable = sum(known.durable.values())
    lost = known.missing(set(have))
    for words in said:
        if words[0] == "DURABLE":
            known.durable[words[1]] = int(words[2])
        elif words[0] == "DELIVERED":
            known.delivered.add((words[1], int(words[2])))
    doubled = len(have) - len(set(have))
    return Cut(after_s, durable, len(have), len(lost), doubled, int(state[2]), state[1] == "balanced")


def run(count: int, seed: int, *, control: bool) -> tuple[list[Cut], int]:
    """So many cuts of one disk; what was found behind each, and how many messages were delivered."""
    moments, known, cuts = random.Random(seed), Known(), list[Cut]()
    with tempfile.TemporaryDirectory(prefix="cuts") as name:
        folder = Path(name)
        disk = folder / "disk.img"
        with disk.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-F", str(disk)], check=True)
        after_s = 0.0
        for number in range(count + 1):
            last = number == count
            next_s = moments.uniform(0.0, 2.5)
            started = time.monotonic()
            said = boot(disk, folder, f"s{number}", 0 if last else 1_000_000, None if last else next_s, control)
            cut = judge(said, known, after_s)
            if number:
                cuts.append(cut)
            print(number, f"{time.monotonic() - started:.1f} s", cut, flush=True)
            after_s = next_s
    return cuts, len(known.delivered)


def report(cuts: Sequence[Cut], delivered: int, control: Sequence[Cut]) -> str:
    lines = [f"# {(__doc__ or '').strip()}", ""]
    lines += [
        "| cut | s after the first sync | durable so far | waiting | lost | twice | dropped | law holds |",
        "|" + "---|" * 8,
    ]
    for number, cut in enumerate(cuts, 1):
        figures = f"{cut.durable:,} | {cut.waiting:,} | {cut.lost} | {cut.doubled} | {cut.dropped}"
        lines.append(f"| {number} | {cut.after_s:.2f} | {figures} | {'yes' if cut.right else 'NO'} |")
    wrong = sum(bool(cut.lost or cut.doubled or not cut.right) for cut in cuts)
    lines += ["", f"{len(cuts)} power cuts, {delivered:,} messages delivered, {wrong} cuts with something wrong.", ""]
    lost = ", ".join(f"{cut.lost:,} of {cut.durable:,}" for cut in control)
    lines += [f"Control, with syncs that do nothing: lost {lost}.", ""]
    lines += ["`dropped` counts records that were torn before they were durable and stood before one that was whole."]
    return "\n".join([*lines, "", measured_on(describe_machine("msgspec")), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Real power cuts under the spool.")
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name} too")
    parser.add_argument("--write", nargs=2, metavar=("FOLDER", "SESSION"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=1_000_000, help=argparse.SUPPRESS)
    parser.add_argument("--unsynced", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(Path(arguments.write[0]), arguments.write[1], arguments.rounds, unsynced=arguments.unsynced)
        return
    cuts, delivered = run(arguments.cuts, arguments.seed, control=False)
    control, _ = run(CONTROL_CUTS, arguments.seed, control=True)
    text = report(cuts, delivered, control)
    print(text)
    if arguments.save:
        RESULTS.write_text(text)
    sys.exit(any(cut.lost or cut.doubled or not cut.right for cut in cuts))


if __name__ == "__main__":
    main()
