"""The commands of docs/security.md, run in their order: certificates, a token, an agent, and who may ask it what."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.config import load_config
from tests.support import bundles
from tests.support.agents import ROOT, run_agent, serving

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [text for kind, text in BLOCKS if kind == "bash"]
ANSWERED = re.findall(r"```bash\n((?:curl|TIGHTFIT_CA)[^`]*)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
(CONFIG,) = [text for kind, text in BLOCKS if kind == "toml"]


def run(command: str, folder: Path, **env: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_the_configuration_may_be_reached_from_a_network(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text(f'bundle = "m.tfb"\n{CONFIG}')
    assert load_config(tmp_path / "agent.toml", {}).http.addresses[0].host == "0.0.0.0"  # type: ignore[union-attr]  # noqa: S104


def compiled(folder: Path) -> bool:
    """Whether the example in C could be made."""
    found = subprocess.run(["pkg-config", "--cflags", "--libs", "libcurl"], capture_output=True, text=True, check=False)
    if found.returncode or shutil.which("gcc") is None:
        return False
    source = ROOT / "docs" / "examples" / "infer.c"
    subprocess.run(["gcc", "-std=c99", "-o", folder / "infer", source, *found.stdout.split()], check=True)
    return True


@pytest.mark.skipif(shutil.which("curl") is None or shutil.which("openssl") is None, reason="needs curl and openssl")
def test_commands_answer_as_shown(tmp_path: Path) -> None:
    assert len(COMMANDS) == 9
    for command in COMMANDS[:3]:
        assert command.startswith(("openssl", "printf"))
        run(command, tmp_path)
    assert COMMANDS[3] == "tightfit-agent token dashboard\n"
    _, token, _, line = run_agent("token", "dashboard")[1].splitlines()
    assert line.startswith("dashboard sha256:")
    (tmp_path / "tokens").write_text(f"# of the page\n{line}\n")
    config = CONFIG.replace("/etc/tightfit", str(tmp_path)).replace("/run/tightfit", str(tmp_path))
    (tmp_path / "agent.toml").write_text(config.replace("0.0.0.0:8443", "127.0.0.1:0"))
    arguments = ("--config", str(tmp_path / "agent.toml"))
    with serving(bundles.adding(tmp_path / "m.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        assert len(ANSWERED) == 5
        for command, shown in ANSWERED:
            if "./infer" in command and not compiled(tmp_path):
                continue
            answer = run(command.replace("localhost:8443", f"localhost:{agent.port}"), tmp_path, TOKEN=token)
            wanted = ".*".join(re.escape(part) for part in shown.rstrip("\n").split("..."))
            assert re.fullmatch(wanted, answer.rstrip("\n")), (command, answer)
    assert token not in agent.log
