"""The README's commands, run in the order in which a reader meets them, and what the README claims."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from targets.bundle import read_manifest, verify_files

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent
START_TIMEOUT_S = 120.0


def block(first_words: str) -> str:
    """The one shell block of the README that begins so."""
    found = [text for text in BLOCKS if text.startswith(first_words)]
    assert len(found) == 1, f"README.md has {len(found)} shell blocks that begin with {first_words!r}"
    return found[0]


def free_port() -> int:
    """One that stays free until it is used: no connection is given it by chance."""
    for port in range(20_000, 30_000):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class Reader:
    """Somebody who types what the README says, in one folder, on a port of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").symlink_to(ROOT / "scripts")
        self.port = str(free_port())
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}

    def command(self, text: str) -> list[str]:
        return ["bash", "-euo", "pipefail", "-c", text.replace("8080", self.port)]

    def types(self, text: str) -> str:
        done = subprocess.run(
            self.command(text),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    assert (BIN / "tightfit-compile").exists(), "install the project first: pip install -e ."
    return Reader(tmp_path_factory.mktemp("readme"))


@pytest.fixture(scope="module")
def compiled(reader: Reader) -> str:
    """What the block that compiles printed; afterwards ocr.tfb is there."""
    return reader.types(block("model=$("))


@pytest.fixture(scope="module")
def served(reader: Reader, compiled: str) -> Iterator[Reader]:
    """The reader, with the agent running."""
    command = reader.command("exec " + block("tightfit-agent serve"))
    with (reader.folder / "agent.log").open("w") as log:
        agent = subprocess.Popen(
            command, cwd=reader.folder, env=reader.environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert agent.stdout is not None
    alarm = threading.Timer(START_TIMEOUT_S, agent.kill)
    alarm.start()
    ready = agent.stdout.readline()
    alarm.cancel()
    try:
        assert ready == f"serving ocr at http://127.0.0.1:{reader.port}\n", (reader.folder / "agent.log").read_text()
        yield reader
    finally:
        agent.terminate()
        status = agent.wait(60)
        agent.stdout.close()
    assert status == 0


def test_every_shell_block_is_covered_here() -> None:
    known = ("scripts/demo", "python3 -m venv", "tightfit-targets", "model=$(", "tightfit-agent serve")
    known += ("curl -sS http", "curl -sS --data", "head -c", "cc ", "tightfit-agent check")
    assert [text for text in BLOCKS if not text.startswith(known)] == []
    for first_words in known:
        block(first_words)


def test_the_two_scripts_can_be_run_and_set_up_what_the_readme_installs() -> None:
    assert block("scripts/demo") == "scripts/demo\nscripts/test\n"
    for script in ("scripts/demo", "scripts/test", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script
    (extras,) = re.findall(r"pip install -e '\.\[(.*?)\]'", block("python3 -m venv"))
    assert f"make_venv {extras}\n" in (ROOT / "scripts/demo").read_text()
    assert f"make_venv {extras},otel,dev\n" in (ROOT / "scripts/test").read_text()
    assert "scripts/test" in (ROOT / ".ci/run").read_text()


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_is_that_of_the_results() -> None:
    table = re.search(r"<!-- results: begin -->\n(.*?)<!-- results: end -->", README, re.DOTALL)
    assert table
    results = (ROOT / "bench/results/ocr_accuracy.md").read_text()
    assert table[1].strip()
    assert table[1].strip() in results


def test_targets(reader: Reader) -> None:
    out = reader.types(block("tightfit-targets"))
    assert "Raspberry Pi 5, 4 GB" in out
    assert "left for the model" in out


def test_compile(reader: Reader, compiled: str) -> None:
    bundle = reader.folder / "ocr.tfb"
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    assert (manifest.name, manifest.target, manifest.quantization.scheme) == ("ocr", "raspberry-pi-5-4gb", "int4")
    assert "wrote ocr.tfb" in compiled


def test_metadata(served: Reader) -> None:
    shown = json.loads(served.types(block("curl -sS http")))
    assert shown["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 3, 48, -1]}]


def test_an_image_by_curl(served: Reader) -> None:
    answer = json.loads(served.types(block("curl -sS --data")))
    (promised,) = re.findall(r'"text":(\[.*?\])', README)
    assert answer["text"] == json.loads(promised)


def test_binary_inference_by_curl(served: Reader) -> None:
    served.types(block("head -c"))
    answer = (served.folder / "answer.bin").read_bytes()
    head, _ = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    assert len(answer) >= head["outputs"][0]["parameters"]["binary_data_size"] == 40 * 18710 * 4


def test_the_c_client(served: Reader) -> None:
    served.types(block("head -c").splitlines()[0])
    status, classes = served.types(block("cc ")).splitlines()
    assert status == "status 200"
    assert classes.split() == ["0"] * 40  # an empty line is 40 blanks


def test_the_c_client_shows_the_reason_of_a_refusal(served: Reader) -> None:
    served.types(block("head -c").splitlines()[0])
    served.types(block("cc ").splitlines()[0])
    out = served.types("./ecu_client 8080 nothing x fetch_name_0 line.f32 || true")
    assert out.startswith("status 404\n{")
    assert "ocr" in json.loads(out.splitlines()[1])["error"]


def test_operation(served: Reader) -> None:
    out = served.types(block("tightfit-agent check"))
    assert "is whole and fits" in out
    assert '"ready":true' in out.replace(" ", "")
    assert "tightfit_requests_total" in out


def test_the_bytes_on_the_wire_add_up() -> None:
    (head,) = re.findall(r"^```http\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    numbers = dict(re.findall(r"^([\w-]+): (\d+)$", head, re.MULTILINE))
    source = (ROOT / "scripts/ecu_client.c").read_text()
    (template,) = re.findall(r"snprintf\(json, sizeof json,\s*(.*?),\s*argv", source, re.DOTALL)
    json_text = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', template)).replace('\\"', '"')
    json_size = len(json_text % ("x", 320, 184320, "fetch_name_0"))
    assert int(numbers["Inference-Header-Content-Length"]) == json_size
    assert int(numbers["Content-Length"]) == json_size + 184320
