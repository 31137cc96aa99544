"""What goes in comes out, in order and once, or is explained; over restarts too."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tracemalloc
from pathlib import Path

import pytest

from agent.mqtt.spool.counts import Counts
from agent.mqtt.spool.policy import Drop, Limits, Policy
from agent.mqtt.spool.spool import SpoolError
from tests.support.spools import LIMITS, POLICIES, balanced, opened, paged, waiting

KB = b"x" * 1000


def test_what_was_synced_is_there_again(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for number in range(30):
        assert spool.append("m", "c/m/t", b"%d" % number, 0.0) == number
    assert waiting(spool) == []
    assert spool.sync(0.0) == 29
    spool.append("m", "c/m/t", b"never synced", 0.0)
    spool.abandon()
    spool = opened(tmp_path, "s2")
    assert waiting(spool) == [("s1", "c/m/t", number, b"%d" % number) for number in range(30)]
    assert spool.live(10, 0.0) == []
    assert balanced(spool)


def test_numbers_begin_anew_with_a_session(tmp_path: Path) -> None:
    for session in ("s1", "s2"):
        spool = opened(tmp_path, session)
        spool.append("m", "c/m/t", b"", 0.0)
        spool.append("m", "c/m/u", b"", 0.0)
        spool.append("m", "c/m/t", b"", 0.0)
        spool.close(0.0)
    found = waiting(opened(tmp_path, "s3"))
    per_session = [("c/m/t", 0), ("c/m/u", 0), ("c/m/t", 1)]
    assert [each[:3] for each in found] == [(s, *rest) for s in ("s1", "s2") for rest in per_session]


def test_a_group_is_due_when_it_is_full_old_or_urgent(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.sync(5.0)
    assert spool.next_sync_at() is None
    spool.append("m", "t", b"", 5.0)
    assert not spool.due(5.09)
    assert spool.due(5.1)
    for _ in range(49):
        assert not spool.due(5.0)
        spool.append("m", "t", b"", 5.0)
    assert spool.due(5.0)
    spool.sync(5.0)
    spool.append("a", "t", b"", 6.0, urgent=True)
    assert spool.due(6.0)


def test_history_and_what_comes_are_each_in_order(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for number in range(6):
        spool.append("ma"[number % 2], "t", b"%d" % number, 0.0)
    spool.sync(0.0)
    spool.connected()
    for number in range(6, 12):
        spool.append("ma"[number % 2], "t", b"%d" % number, 0.0)
    spool.sync(0.0)
    assert [int(each.body) for each in spool.replay(100, 0.0)] == [*range(6)]
    assert [int(each.body) for each in spool.live(100, 0.0)] == [*range(6, 12)]
    first, second = spool.live(2, 0.0), spool.live(2, 0.0, after=7)
    assert [int(each.body) for each in (*first, *second)] == [6, 7, 8, 9]
    spool.connected()
    assert spool.live(100, 0.0) == []
    assert len(spool.replay(100, 0.0)) == 12


def test_acknowledgements_come_in_any_order(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for number in range(100):
        spool.append("m", "t", b"%d" % number, 0.0)
    spool.sync(0.0)
    entries = spool.live(100, 0.0)
    for entry in reversed(entries[1::2]):
        assert spool.delivered(entry.position, 0.0)
        assert not spool.delivered(entry.position, 0.0)
    spool.sync(0.0)
    spool.abandon()
    spool = opened(tmp_path, "s2")
    assert [each[2] for each in waiting(spool)] == [*range(0, 100, 2)]
    assert spool.figures.by_kind["m"] == Counts(100, 50, {}, 50)


def test_an_acknowledgement_that_was_not_noted_repeats_a_message(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.append("m", "t", b"", 0.0)
    spool.sync(0.0)
    [entry] = spool.live(1, 0.0)
    spool.delivered(entry.position, 0.0)
    spool.abandon()
    spool = opened(tmp_path, "s2")
    assert [each[:3] for each in waiting(spool)] == [("s1", "t", 0)]
    assert spool.figures.by_kind["m"] == Counts(1, 0, {}, 1)


def test_segments_that_are_done_go(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for number in range(100):
        spool.append("m", "t", KB, 0.0)
        if number % 10 == 9:
            spool.sync(0.0)
    before = len(list((tmp_path / "m").iterdir()))
    for entry in spool.live(60, 0.0):
        spool.delivered(entry.position, 0.0)
    spool.sync(0.0)
    assert 0 < len(list((tmp_path / "m").iterdir())) < before
    assert spool.figures.bytes_by_kind["m"] < 70_000
    spool.abandon()
    assert len(waiting(opened(tmp_path, "s2"))) == 40


def test_the_oldest_go_where_the_room_is_used_up(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for _ in range(1000):
        spool.append("m", "t", KB, 0.0)
        if spool.due(0.0):
            spool.sync(0.0)
    spool.sync(0.0)
    counts = spool.figures.by_kind["m"]
    assert counts.produced == 1000
    assert counts.dropped["oldest"] == 1000 - counts.queued
    assert spool.figures.bytes_by_kind["m"] <= POLICIES["m"].max_bytes
    # Gaps wait until somebody takes messages, and one is enough for all.
    spool.connected()
    spool.live(1, 0.0)
    spool.sync(0.0)
    [gap] = spool.live(10, 0.0)
    assert gap.stream == "agent/e/gap"
    assert json.loads(gap.body) == ["t", "s1", 0, counts.dropped["oldest"] - 1]
    assert [each[2] for each in waiting(spool)] == [*range(counts.dropped["oldest"], 1000)]
    assert balanced(spool)


def test_what_comes_is_refused_only_when_there_is_nothing_else_to_drop(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for _ in range(200):
        spool.append("m", "t", KB, 0.0)
    spool.sync(0.0)
    for _ in range(1000):
        spool.append("e", "e", KB, 0.0)
        if spool.due(0.0):
            spool.sync(0.0)
    spool.sync(0.0)
    by_kind = spool.figures.by_kind
    assert by_kind["m"].dropped == {"room": 200}
    assert by_kind["e"].dropped == {"full": 1000 - by_kind["e"].queued}
    # Its own room and that of m, but not that of alarms.
    most = POLICIES["m"].max_bytes + POLICIES["e"].max_bytes
    assert most * 0.8 < spool.figures.bytes_by_kind["e"] <= most
    assert spool.append("a", "t", KB, 0.0) is not None
    assert [each[2] for each in waiting(spool)] == [*range(by_kind["e"].queued)]
    assert balanced(spool)


def test_fewer_of_each_stream_are_taken_when_it_gets_full(tmp_path: Path) -> None:
    policies = {**POLICIES, "m": Policy(256 << 10, 0, Drop.DECIMATE)}
    spool = opened(tmp_path, policies=policies)
    for _ in range(400):
        for stream in ("t", "u"):
            spool.append("m", stream, KB, 0.0)
        if spool.due(0.0):
            spool.sync(0.0)
    spool.sync(0.0)
    counts = spool.figures.by_kind["m"]
    assert counts.dropped["decimated"] > 400
    seqs = {stream: [each[2] for each in waiting(spool) if each[1] == stream] for stream in ("t", "u")}
    for each in seqs.values():
        steps = {after - before for before, after in itertools.pairwise(each)}
        assert steps <= {1, 2, 4, 8}
        assert {2, 4} <= steps
    spool.abandon()
    # What was refused is found with what was not.
    again = opened(tmp_path, "s2", policies=policies)
    found = again.figures.by_kind["m"]
    assert found.queued == counts.queued
    last = seqs["u"][-1]
    # What was dropped because it was old is not on disk, but noted when its file went.
    assert found.dropped["oldest"] == counts.dropped["oldest"]
    assert found.produced >= 2 * last + 1
    assert balanced(again)
    assert {(gap.stream, gap.reason) for gap in again.gaps} == {
        (stream, reason) for stream in ("t", "u") for reason in ("decimated", "oldest")
    }


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    spool = opened(tmp_path, now=100.0)
    spool.append("m", "t", b"old", 100.0)
    spool.append("e", "t", b"any age", 100.0)
    spool.sync(100.0)
    spool.append("m", "t", b"young", 2000.0)
    spool.sync(2000.0)
    assert len(waiting(spool, 3000.0)) == 3
    assert [each[3] for each in waiting(spool, 3701.0)] == [b"any age", b"young"]
    spool.expire(5601.0)
    assert spool.figures.by_kind["m"] == Counts(2, 0, {"age": 2}, 0)
    spool.close(5601.0)
    # Another boot: its clock begins anew, and the age goes on.
    spool = opened(tmp_path, "s2", now=3.0, boot="b2")
    [entry] = [each for each in spool.replay(10, 3.0) if each.stream == "t"]
    assert spool.age_s(entry, 4.0) == pytest.approx(5502.0, abs=0.01)
    assert balanced(spool)


def test_rejected_is_dropped_with_its_reason(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.append("m", "t", b"", 0.0)
    spool.sync(0.0)
    [entry] = spool.live(1, 0.0)
    assert spool.rejected(entry.position, "not_authorized", 0.0)
    assert not spool.delivered(entry.position, 0.0)
    assert spool.figures.by_kind["m"] == Counts(1, 0, {"not_authorized": 1}, 0)
    spool.sync(0.0)
    spool.abandon()
    spool = opened(tmp_path, "s2")
    assert spool.figures.by_kind["m"] == Counts(1, 0, {"not_authorized": 1}, 0)
    assert [(gap.stream, gap.first, gap.last, gap.reason) for gap in spool.gaps] == [("t", 0, 0, "not_authorized")]


def test_damage_in_the_middle_is_explained(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for number in range(9):
        spool.append("m", "tu"[number % 2], b"%d" % number * 100, 0.0)
    spool.close(0.0)
    [path] = (tmp_path / "m").iterdir()
    path.write_bytes(path.read_bytes().replace(b"4" * 100, b"4" * 99 + b"5"))
    spool = opened(tmp_path, "s2")
    assert [each[3][:1] for each in waiting(spool)] == [b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"8"]
    assert spool.figures.by_kind["m"] == Counts(9, 0, {"damaged": 1}, 8)
    assert [(gap.stream, gap.session, gap.first, gap.last) for gap in spool.gaps] == [("t", "s1", 2, 2)]
    spool.close(0.0)
    assert opened(tmp_path, "s3").figures.by_kind["m"] == Counts(9, 0, {"damaged": 1}, 8)


def test_damage_that_comes_later_is_met_when_it_is_read(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for number in range(9):
        spool.append("m", "t", b"%d" % number * 100, 0.0)
    spool.sync(0.0)
    [path] = (tmp_path / "m").iterdir()
    data = path.read_bytes().replace(b"4" * 100, b"5" * 100)
    with path.open("r+b") as file:
        file.write(data)
    spool.append("m", "t", b"9" * 100, 0.0)
    spool.sync(0.0)
    assert [each[3][:1] for each in waiting(spool)] == [b"%d" % number for number in range(10) if number != 4]
    assert spool.figures.by_kind["m"] == Counts(10, 0, {"damaged": 1}, 9)


def test_notes_are_written_anew_before_they_are_long(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, notes_bytes=2048)
    spool = opened(tmp_path, limits=limits)
    for _ in range(500):
        spool.append("m", "t", b"", 0.0)
        spool.sync(0.0)
        [entry] = spool.live(1, 0.0)
        spool.delivered(entry.position, 0.0)
    spool.sync(0.0)
    assert (tmp_path / "notes").stat().st_size <= 3 * 2048
    spool.abandon()
    assert opened(tmp_path, "s2", limits=limits).figures.by_kind["m"] == Counts(500, 500, {}, 0)


def test_without_notes_nothing_that_is_there_is_lost(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for _ in range(20):
        spool.append("m", "t", KB, 0.0)
    spool.close(0.0)
    (tmp_path / "notes").write_bytes(b"nonsense")
    spool = opened(tmp_path, "s2")
    assert len(waiting(spool)) == 20
    assert balanced(spool)


def test_one_spool_has_one_owner(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    with pytest.raises(SpoolError, match="somebody else"):
        opened(tmp_path)
    spool.close(0.0)
    opened(tmp_path).close(0.0)


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    spool = opened(tmp_path, limits=Limits(record_bytes=100, free_floor_bytes=0))
    assert spool.append("m", "t", b"x" * 101, 0.0) is None
    assert spool.append("m", "t", b"x" * 100, 0.0) is not None
    assert spool.figures.by_kind["m"] == Counts(2, 0, {"too_large": 1}, 1)


def test_where_the_disk_is_not_to_be_filled_measures_go_first(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for _ in range(20):
        spool.append("m", "t", KB, 0.0)
    spool.append("e", "t", KB, 0.0)
    spool.sync(0.0)
    spool.close(0.0)
    spool = opened(tmp_path, "s2", limits=dataclasses.replace(LIMITS, free_floor_bytes=1 << 60))
    position = spool.append("e", "u", KB, 0.0)
    spool.sync(0.0)
    assert spool.lost() == [position]
    assert spool.figures.by_kind["m"].dropped == {"disk": 20}
    assert spool.figures.by_kind["e"] == Counts(2, 0, {"disk": 1}, 1)
    assert balanced(spool)
    spool.abandon()
    again = opened(tmp_path, "s3")
    assert again.figures.by_kind["m"].dropped == {"disk": 20}
    assert again.figures.by_kind["e"] == Counts(2, 0, {"disk": 1}, 1)
    assert {(gap.kind, gap.stream, gap.count) for gap in again.gaps} == {("m", "t", 20), ("e", "u", 1)}


def test_what_waits_is_on_disk_and_not_in_memory(tmp_path: Path) -> None:
    policies = {**POLICIES, "m": Policy(64 << 20)}
    spool = opened(tmp_path, policies=policies, limits=Limits(free_floor_bytes=0))
    tracemalloc.start()
    for number in range(20_000):
        spool.append("m", f"t{number % 10}", KB, 0.0)
        if spool.due(0.0):
            spool.sync(0.0)
    taken = sum(1 for _ in paged(spool.live, 0.0))
    _, peak = tracemalloc.get_traced_memory()
    spool.abandon()
    again = opened(tmp_path, "s2", policies=policies, limits=Limits(free_floor_bytes=0))
    _, peak_of_opening = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert again.figures.by_kind["m"].queued == 20_000
    assert taken > 16_000
    # What is handed out and not settled is remembered without its body.
    assert max(peak, peak_of_opening) < 12 << 20


def test_a_segment_of_which_a_part_arrived_is_explained_without_that_part(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for number in range(300):
        spool.append("m", "tu"[number % 2], KB, 0.0)
        spool.sync(0.0)
        if number == 3:
            for entry in spool.live(3, 0.0):
                spool.delivered(entry.position, 0.0)
    dropped = spool.figures.by_kind["m"].dropped["oldest"]
    gaps = {gap.stream: (gap.first, gap.last, gap.count) for gap in spool.gaps}
    first_kept = waiting(spool)[0][2]
    assert gaps["u"][0] == 1
    assert gaps["t"][0] == 2
    assert gaps["u"][2] + gaps["t"][2] == dropped
    assert max(gaps["u"][1], gaps["t"][1]) <= first_kept
