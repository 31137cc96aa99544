"""Files that are looked at again and again: a change is told once, and when it is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent.access import files
from agent.access.access import Access
from agent.access.files import Watch, is_private, read
from agent.config import AccessOptions, CallerOptions, Config
from agent.errors import ConfigError


def watched(paths: list[Path], acts: list[object]) -> list[int]:
    """What each act, done between two looks, has told by the next."""
    told: list[int] = []

    async def run() -> None:
        changes: list[None] = []
        watch = Watch(paths, 3600, lambda: changes.append(None))
        for act in acts:
            if callable(act):
                act()
            watch._timer.cancel()
            watch._tick()
            told.append(len(changes))
        watch.close()

    asyncio.run(run())
    return told


def test_a_change_is_told_when_two_looks_agree(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_text("old")
    acts = [None, lambda: one.write_text("new one"), lambda: two.write_text("new two"), None, None]
    assert watched([one, two], acts) == [0, 0, 0, 1, 1]


def test_what_goes_and_comes_back(tmp_path: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("a")
    link.symlink_to("a")

    def swap() -> None:
        link.unlink()
        link.symlink_to("b")

    assert watched([link], [swap, None, link.unlink, None, lambda: link.symlink_to("b"), None]) == [0, 1, 1, 2, 2, 3]


def test_a_watch_outlives_what_it_tells(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def fails() -> None:
        raise RuntimeError

    async def run() -> None:
        watch = Watch([path], 3600, fails)
        path.touch()
        watch._tick()
        with pytest.raises(RuntimeError):
            watch._tick()
        assert not watch._timer.cancelled()
        watch.close()

    asyncio.run(run())


def test_who_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch()
    for mode, private in ((0o600, True), (0o400, True), (0o640, False), (0o604, False)):
        path.chmod(mode)
        assert is_private(str(path)) is private
    assert not is_private(str(tmp_path / "none"))


def test_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    (tmp_path / "x").write_bytes(bytes(10))
    assert read(tmp_path / "x", "the key") == bytes(10)
    (tmp_path / "x").write_bytes(bytes(11))
    with pytest.raises(ConfigError, match="is larger than 10 bytes"):
        read(tmp_path / "x", "the key")
    with pytest.raises(ConfigError, match=r"the key /dev/zero is no file"):
        read(Path("/dev/zero"), "the key")


@pytest.mark.parametrize(
    ("mode", "private"), [(0o400, True), (0o440, True), (0o600, True), (0o444, False), (0o404, False)]
)
def test_a_credential_is_private_with_the_bits_of_its_access_control_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, private: bool
) -> None:
    """systemd gives those that it hands over to a dynamic user 0440: root's, and in the list that user."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    path = tmp_path / "tokens"
    path.write_text("somebody abcdefghijklmnopqrstuvwxyz\n")
    path.chmod(mode)
    assert is_private("credential:tokens") is private
    assert is_private(str(path)) is (mode & 0o077 == 0)
    config = Config(access=AccessOptions(tokens="credential:tokens"), callers=(CallerOptions(name="somebody"),))
    if private:
        assert Access(config).policy.with_token("Bearer abcdefghijklmnopqrstuvwxyz").name == "somebody"
    else:
        with pytest.raises(ConfigError, match="in a file that others can read"):
            Access(config)
