"""Runs h1spec against the agent: `python -m bench.h1spec`.

    python -m bench.h1spec                        # clones h1spec, installs Deno from npm, both below .cache
    python -m bench.h1spec --source FOLDER        # a checkout that is there

https://github.com/uNetworking/h1spec asks a server that echoes any body under any path. The agent is none, so what it
asks of `/` is asked of what the agent has: GET of the health, POST of a model, with a body that the model takes and the
answer that it gives. All else, and above all what is not HTTP, is sent as h1spec has it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import bundles
from tests.support.agents import Agent, serving

CACHE = Path(__file__).parents[1] / ".cache" / "h1spec"
REPOSITORY = "https://github.com/uNetworking/h1spec"
COMMIT = "f0a5650a20c575fbea0f7179a3a9cfa50f20ba6e"
DENO = "deno@2.7.18"
BODY = '{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,-2]}]}'
HEALTH, INFER = "/v2/health/live", "/v2/models/adding/infer"


def checkout(source: Path | None) -> str:
    """The text of h1spec's program."""
    if source is None:
        source = CACHE / "source"
        if not source.exists():
            subprocess.run(["git", "clone", "--quiet", REPOSITORY, source], check=True)
            subprocess.run(["git", "-C", source, "checkout", "--quiet", COMMIT], check=True)
    return (source / "http_test.ts").read_text(encoding="utf-8")


def adapted(program: str, answer: str) -> str:
    """The same questions, of paths that are there, and a body that is understood. Raises ValueError where h1spec is
    another."""
    request, response = json.dumps(BODY)[1:-1], json.dumps(answer)[1:-1]
    for old, new, times in (
        (r'"GET / HTTP/1.1', f'"GET {HEALTH} HTTP/1.1', 12),
        (r'"POST / HTTP/1.1', f'"POST {INFER} HTTP/1.1', 3),
        (r"Content-Length: 5\r\n\r\nhello", rf"Content-Length: {len(BODY)}\r\n\r\n{request}", 1),
        (r"c\r\nHellO world1\r\n", rf"{len(BODY):x}\r\n{request}\r\n", 2),
        ('expectedBody: "hello"', f'expectedBody: "{response}"', 1),
        ('expectedBody: "HellO world1"', f'expectedBody: "{response}"', 2),
    ):
        if program.count(old) != times:
            raise ValueError(f"h1spec has {old!r} {program.count(old)} times, not {times}: is it {COMMIT[:12]}?")
        program = program.replace(old, new)
    return program


def deno() -> Path:
    """The program that runs it."""
    found = CACHE / "node_modules" / "@deno" / "linux-x64-glibc" / "deno"
    if not found.exists():
        npm = ["npm", "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(CACHE)]
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([*npm, DENO], check=True, stdout=subprocess.DEVNULL)
    return found


def run(agent: Agent, program: str, folder: Path) -> tuple[int, list[str]]:
    """(exit code, a line for each test)."""
    _, answer, _ = agent.post(BODY.encode())
    (folder / "http_test.ts").write_text(adapted(program, answer.decode()), encoding="utf-8")
    command = [
        str(deno()),
        "run",
        "--allow-net",
        "--no-check",
        str(folder / "http_test.ts"),
        "127.0.0.1",
        str(agent.port),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def main() -> int:
    """Print what it found; 0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout of h1spec")
    options = parser.parse_args()
    if shutil.which("npm") is None:
        parser.error("npm is not there: install Node")
    program = checkout(options.source)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(bundles.adding(folder / "adding.tfb"), folder / "log") as agent:
            code, lines = run(agent, program, folder)
            assert "Traceback" not in agent.log
    for line in lines:
        print(re.sub(r"^✅", "ok  ", re.sub(r"^❌", "FAIL", line)))
    return code


if __name__ == "__main__":
    sys.exit(main())
