"""The commands of docs/generate.md, run against a small model: they answer as shown."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.agents import ROOT, serving
from tests.support.decoders import recurrent

EXAMPLES = re.findall(
    r"```bash\n(.*?)```\n```json\n(.*?)```", (ROOT / "docs" / "generate.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_commands_answer_as_shown(tmp_path: Path) -> None:
    assert len(EXAMPLES) == 4
    with serving(recurrent(tmp_path / "m.tfb"), tmp_path / "log") as agent:
        for command, shown in EXAMPLES:
            done = subprocess.run(
                ["bash", "-c", command.replace("localhost:8080", agent.address)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            wanted = ".*".join(re.escape(part) for part in shown.rstrip("\n").split("..."))
            # Of a stream there are more events like the first.
            answers = done.stdout.rstrip("\n").split("\n\n")
            for pattern in wanted.split("\n\n".replace("\n", "\\\n")):
                assert any(re.fullmatch(pattern, answer, re.DOTALL) for answer in answers), (command, answers)
