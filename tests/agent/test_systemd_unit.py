"""The unit file, judged by systemd itself, and the notification, received as systemd would."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from agent.systemd import notify

UNIT = Path(__file__).parents[2] / "systemd" / "tightfit-agent.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # The agent is not installed where the unit expects it; everything else is judged as it stands.
    text = UNIT.read_text(encoding="utf-8").replace("/opt/tightfit/bin/tightfit-agent", "/bin/true")
    unit = tmp_path / UNIT.name
    unit.write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert (done.returncode, ours) == (0, [])


def test_notify_reaches_the_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert notify("READY=1")
        assert manager.recv(64) == b"READY=1"


def test_notify_in_the_abstract_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")  # the kernel picks an abstract name
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + manager.getsockname()[1:].decode())
        assert notify("STOPPING=1")
        assert manager.recv(64) == b"STOPPING=1"


@pytest.mark.parametrize("address", ["", "nonsense", "/nowhere/notify"])
def test_without_a_manager_nothing_happens(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify("READY=1")
