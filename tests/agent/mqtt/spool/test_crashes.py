"""Against a model in memory: whatever happens in whatever order, and wherever the power goes, the promises hold."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import agent.mqtt.spool.spool as spool_module
from agent.mqtt.spool.gaps import Gap
from agent.mqtt.spool.lane import Entry
from agent.mqtt.spool.policy import Drop, Limits, Policy
from agent.mqtt.spool.spool import Gaps, Spool
from agent.mqtt.spool.work import Work
from tests.support.spools import paged

POLICIES = {
    "m": Policy(64 << 10, 0, Drop.OLDEST),
    "d": Policy(64 << 10, 500, Drop.DECIMATE),
    "e": Policy(64 << 10, 0, Drop.NEWEST),
}
LIMITS = Limits(free_floor_bytes=0, segment_bytes=4096, notes_bytes=1024, ranges=40)
GAPS = Gaps("e", "gap", lambda gap, _: json.dumps([getattr(gap, name) for name in gap.__struct_fields__]).encode())
PAGE = 4096
# What is synced here is not slow: the test says what is on disk.
MEMORY = Path("/dev/shm")  # noqa: S108  mkdtemp makes a folder of its own in it

Key = tuple[str, str, int]


class PowerCut(BaseException):
    """Nothing that happens after it happens."""


class Disk:
    """What is certainly on disk, and what may be."""

    def __init__(self) -> None:
        self.synced: dict[Path, bytes] = {}
        self.notes_inode = 0
        # After so many steps of work the power goes, or the disk is full for one; -1: it does not.
        self.cut_after = self.full_after = -1
        self.random = random.Random(0)

    def step(self) -> None:
        if self.cut_after == 0:
            raise PowerCut
        self.cut_after -= 1
        self.full_after -= 1
        if self.full_after == 0:
            raise OSError(errno.ENOSPC, "full")

    def cut(self, folder: Path) -> None:
        """The power is gone: leave of the files what may be left of them."""
        files = [*folder.glob("*/*.log"), folder / "notes"]
        for path in sorted({*files, *self.synced}):
            if path.suffix == ".new":
                continue
            data, sure = path.read_bytes() if path.exists() else None, self.synced.get(path)
            left = self._left(folder, data, sure, in_place=path.name == "notes")
            if left is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(left)
        self.synced = {path: path.read_bytes() for path in files if path.exists()}
        self.cut_after = self.full_after = -1

    def _left(self, folder: Path, data: bytes | None, sure: bytes | None, *, in_place: bool) -> bytes | None:
        if data is None or sure is None:
            # It went, or came, and the folder was not synced since.
            return self.random.choice([data, sure])
        if in_place:
            if len(data) == len(sure) and self.notes_inode == (folder / "notes").stat().st_ino:
                other = [at for at in range(len(data)) if data[at] != sure[at]]
                cut = self.random.randint(other[0], other[-1] + 1) if other else 0
                return data[:cut] + sure[cut:]
            return self.random.choice([data, sure])
        left = data[: self.random.randint(len(sure), len(data))] if len(data) > len(sure) else sure
        if self.random.random() < 0.3:
            # The size was written, and the last page was not.
            torn = min(len(left) - len(sure), self.random.randint(0, PAGE))
            left = left[: len(left) - torn] + bytes(torn)
        return left


DISK = Disk()


def path_of(file: int) -> Path:
    return Path(f"/proc/self/fd/{file}").readlink()


class TracedWork(Work):
    """The work itself, in steps that the disk hears of."""

    def _write(self, file: int, data: bytes, at: int) -> None:
        try:
            DISK.step()
        except PowerCut:
            super()._write(file, data[: DISK.random.randint(0, len(data))], at)
            raise
        except OSError:
            super()._write(file, data[: len(data) // 2], at)
            raise
        super()._write(file, data, at)

    def _sync(self, file: int) -> None:
        DISK.step()
        super()._sync(file)
        path = path_of(file)
        # A file without its folder is nowhere.
        if path in DISK.synced or path.name == "notes":
            DISK.synced[path] = path.read_bytes()
        else:
            DISK.synced[path.with_suffix(".new")] = path.read_bytes()

    def _sync_folder(self, folder: Path) -> None:
        DISK.step()
        super()._sync_folder(folder)
        for path in [each for each in DISK.synced if each.parent == folder]:
            data = DISK.synced.pop(path)
            if path.with_suffix(".log").exists() and path.suffix == ".new":
                DISK.synced[path.with_suffix(".log")] = data
            elif path.exists():
                DISK.synced[path] = data
        notes = folder / "notes"
        if notes.exists():
            DISK.synced[notes], DISK.notes_inode = notes.read_bytes(), notes.stat().st_ino
        DISK.step()


class Spooling(RuleBasedStateMachine):
    """Appends, takes, acknowledges, forgets; and remembers what it was promised."""

    def __init__(self) -> None:
        super().__init__()
        DISK.__init__()  # type: ignore[misc]
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(spool_module, "Work", TracedWork)
        self.folder = Path(tempfile.mkdtemp(prefix="spool", dir=MEMORY if MEMORY.is_dir() else None))
        self.now, self.starts = 0.0, 0
        self.bodies: dict[Key, bytes] = {}
        # Positions of this session, and which of them are acknowledged.
        self.given: dict[int, Key] = {}
        self.acknowledged: set[Key] = set()
        self.delivered: set[Key] = set()
        self.gaps: set[Gap] = set()
        self.delivered_here: set[Key] = set()
        self.spool: Spool | None = None

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        DISK.random = random.Random(seed)
        self.open()

    def teardown(self) -> None:
        if self.spool is not None:
            self.spool.abandon()
        self.patch.undo()
        shutil.rmtree(self.folder)

    @property
    def session(self) -> str:
        return f"s{self.starts}"

    def open(self) -> None:
        """As a producer does when it starts, until it succeeds."""
        while True:
            self.starts += 1
            self.given.clear()
            self.delivered_here.clear()
            try:
                self.spool = Spool.open(self.folder, self.session, POLICIES, GAPS, self.now, "boot", LIMITS)
            except PowerCut:
                release_locks(self.folder)
                DISK.cut(self.folder)
                continue
            break
        for path in self.folder.glob("*/*.log"):
            DISK.synced[path] = path.read_bytes()
        self.check()

    @rule(
        kind=st.sampled_from("mde"),
        stream=st.sampled_from("tu"),
        size=st.sampled_from([0, 10, 3000]),
        n=st.integers(1, 12),
    )
    def append(self, kind: str, stream: str, size: int, n: int) -> None:
        for _ in range(n):
            body = DISK.random.randbytes(4) * (size // 4)
            name = f"{kind}/{stream}"
            seq = self.spool._seqs.get(name, 0)
            position = self.spool.append(kind, name, body, self.now)
            if position is not None:
                key = (self.session, name, seq)
                self.bodies[key] = body
                self.given[position] = key

    @rule()
    def sync(self) -> None:
        self.work()

    @rule(after=st.integers(0, 12))
    def power_cut_in_work(self, after: int) -> None:
        DISK.cut_after = after
        try:
            self.work()
        except PowerCut:
            self.crash()
        DISK.cut_after = -1

    @rule(after=st.integers(1, 6))
    def full_disk_in_work(self, after: int) -> None:
        DISK.full_after = after
        self.work()
        DISK.full_after = -1

    @rule(after=st.integers(-1, 5))
    def power_cut(self, after: int) -> None:
        self.crash(after)

    def crash(self, in_open_after: int = -1) -> None:
        self.spool.abandon()
        DISK.cut(self.folder)
        DISK.cut_after = in_open_after
        self.open()
        DISK.cut_after = -1

    @rule()
    def killed(self) -> None:
        """The process alone is gone: what was written is there."""
        self.spool.abandon()
        self.open()

    @rule()
    def close(self) -> None:
        DISK.cut_after = -1
        self.spool.close(self.now)
        self.acknowledge()
        delivered = set(self.delivered_here)
        self.open()
        gone = delivered & {key_of(each) for each in self.waiting()}
        assert not gone, f"delivered before a clean end, and there again: {gone}"

    def work(self) -> None:
        for _ in range(200):
            work = self.spool.take(self.now)
            if work is None:
                break
            work.run()
            self.spool.finish(work, self.now)
            self.now = max(self.now, self.spool._retry_at)
            self.acknowledge()

    def acknowledge(self) -> None:
        lost, durable = set(self.spool.lost()), self.spool.durable()
        for position in [each for each in self.given if each <= durable]:
            key = self.given.pop(position)
            if position not in lost:
                self.acknowledged.add(key)

    @rule(seed=st.integers(0, 2**16), most=st.integers(1, 40), share=st.sampled_from([0.3, 1.0]))
    def deliver(self, seed: int, most: int, share: float) -> None:
        entries = [*self.spool.live(most, self.now), *self.spool.replay(most, self.now)]
        chooser = random.Random(seed)
        chooser.shuffle(entries)
        for entry in entries:
            if chooser.random() < share:
                assert self.spool.delivered(entry.position, self.now)
                self.note_gap(entry)
                self.delivered.add(key_of(entry))
                self.delivered_here.add(key_of(entry))

    @rule(most=st.integers(1, 5))
    def reject(self, most: int) -> None:
        for entry in self.spool.live(most, self.now):
            if entry.stream != "gap":
                assert self.spool.rejected(entry.position, "too_large", self.now)

    @rule()
    def connect(self) -> None:
        self.spool.connected()

    @rule(seconds=st.sampled_from([1, 20, 400]))
    def time_goes_on(self, seconds: int) -> None:
        self.now += seconds
        self.spool.expire(self.now)

    @invariant()
    def nothing_is_unaccounted_for(self) -> None:
        if self.spool is not None:
            for kind, counts in self.spool.figures.by_kind.items():
                assert counts.balanced, (kind, counts)
                most = POLICIES[kind].max_bytes + (128 << 10 if kind == "e" else 0) + 16 * PAGE
                assert self.spool.figures.bytes_by_kind[kind] <= most

    @precondition(lambda self: self.spool is not None)
    @rule()
    def look(self) -> None:
        self.check()

    def waiting(self) -> list[Entry]:
        replay = list(paged(self.spool.replay, self.now))
        live = list(paged(self.spool.live, self.now))
        for part in (replay, live):
            assert [each.position for each in part] == sorted({each.position for each in part})
        return [*replay, *live]

    def note_gap(self, entry: Entry) -> None:
        if entry.stream == "gap":
            self.gaps.add(Gap(*json.loads(entry.body)))

    def check(self) -> None:
        """What was promised."""
        entries = self.waiting()
        for entry in entries:
            self.note_gap(entry)
        waiting = {key_of(each): each.body for each in entries if each.stream != "gap"}
        assert len(waiting) == sum(each.stream != "gap" for each in entries), "something is there twice"
        for key, body in waiting.items():
            assert self.bodies[key] == body
        known = [*self.gaps, *self.spool.gaps]
        pending = set(self.given.values())
        here = {**dict.fromkeys(waiting), **dict.fromkeys(self.delivered)}
        for key in self.acknowledged:
            assert key in here or explained(key, known, but="damaged"), f"{key} was acknowledged and is lost"
        last: dict[tuple[str, str], int] = {}
        for session, stream, seq in here:
            last[session, stream] = max(seq, last.get((session, stream), -1))
        for (session, stream), upto in last.items():
            if stream == "gap":
                continue
            for seq in range(upto):
                key = (session, stream, seq)
                assert key in here or key in pending or explained(key, known), f"nobody says where {key} is"


def release_locks(folder: Path) -> None:
    """Of a spool that did not come to be; a process that is gone has none."""
    for link in list(Path("/proc/self/fd").iterdir()):
        if link.is_symlink() and folder in link.readlink().parents:
            os.close(int(link.name))


def key_of(entry: Entry) -> Key:
    return entry.session, entry.stream, entry.seq


def explained(key: Key, gaps: list[Gap], but: str = "") -> bool:
    session, stream, seq = key
    return any(
        gap.reason != but
        and gap.kind == stream[0]
        and (
            (gap.session, gap.stream) == ("*", "*")
            or ((gap.session, gap.stream) == (session, stream) and gap.first <= seq <= gap.last)
        )
        for gap in gaps
    )


PHASES = [Phase.explicit, Phase.generate] + [Phase.shrink] * ("TIGHTFIT_SPOOL_SHRINK" in os.environ)
EXAMPLES = int(os.environ.get("TIGHTFIT_SPOOL_EXAMPLES", "60"))


def test_promises_hold_wherever_the_power_goes() -> None:
    run_state_machine_as_test(
        Spooling,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
        ),
    )
