"""When a boot was, for what is sent after another one."""

from __future__ import annotations

from pathlib import Path

from agent.mqtt.boots import Boots, read_whole, write_whole
from agent.mqtt.moment import Moment, Quality, restamp


def moment(boot: str, mono: int, utc: int, quality: Quality = Quality.NTP) -> Moment:
    return Moment(mono, boot, utc, quality)


def test_what_was_made_in_1970_is_dated_after_the_next_boot(tmp_path: Path) -> None:
    made = moment("one", 5, 17, Quality.UNSYNCED)
    boots = Boots(tmp_path / "boots.json")
    assert not boots.note(made)
    assert boots.note(moment("one", 10, 1000))
    assert not boots.note(moment("one", 20, 1010))
    boots.save()
    again = Boots(tmp_path / "boots.json")
    stamp = restamp(made, moment("two", 1, 5000), again.known)
    assert (stamp.utc_ns, stamp.restamped, stamp.quality) == (995, True, Quality.NTP)


def test_a_better_clock_is_noted(tmp_path: Path) -> None:
    boots = Boots(tmp_path / "boots.json")
    assert boots.note(moment("one", 10, 1000))
    assert boots.note(moment("one", 20, 1011, Quality.GNSS))
    assert boots.known["one"].utc_ns == 1011


def test_the_last_boots_are_kept(tmp_path: Path) -> None:
    boots = Boots(tmp_path / "boots.json")
    for number in range(100):
        boots.note(moment(str(number), 1, 1))
    assert list(boots.known) == [str(number) for number in range(84, 100)]


def test_a_file_that_is_none_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "boots.json"
    for junk in (b"", b"{", b"[]", b"\xff", b" " * 100_000):
        path.write_bytes(junk)
        assert Boots(path).known == {}


def test_a_small_file_is_whole_or_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert read_whole(path) == b""
    write_whole(path, b"1")
    write_whole(path, b"22")
    assert read_whole(path) == b"22"
    assert [each.name for each in tmp_path.iterdir()] == ["f"]
