"""curl: an image, a stream of lines, results and events that are followed, a Unix socket."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import bundles, images
from tests.support.agents import Agent, serving

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
LINE = b'{"id":"%d","inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[%d,1]}]}\n'


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("curl")
    models = [bundles.adding(folder / "adding.tfb"), images.classifier(folder / "colour.tfb")]
    (folder / "agent.toml").write_text(
        f'[http]\nlisten = ["127.0.0.1:0", "unix:{folder}/s"]\n'
        + "".join(f'[[models]]\nbundle = "{model}"\nresults_mib = 1\n' for model in models)
    )
    with serving(None, folder / "log", "--config", str(folder / "agent.toml"), free_port=False) as agent:
        yield agent
        assert "Traceback" not in agent.log


def curl(*arguments: str, body: bytes | None = None) -> bytes:
    """What it writes, errors of HTTP included."""
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "20", *arguments]
    return subprocess.run(command, input=body, capture_output=True, check=True).stdout


def test_an_image(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "blue.jpg").write_bytes(images.jpeg(images.plain(40, 30, images.BLUE)))
    for path in ("image", "infer"):
        answer = curl(
            f"{agent.url}/v2/models/colour/{path}", "--header", "Content-Type: image/jpeg",
            "--data-binary", f"@{tmp_path / 'blue.jpg'}",
        )  # fmt: skip
        assert b'"blue"' in answer


@pytest.mark.parametrize("how", [("--data-binary", "@-"), ("--request", "POST", "--upload-file", "-")])
def test_a_stream_of_lines(agent: Agent, how: Sequence[str]) -> None:
    """With a length, and chunk by chunk as it comes."""
    url = f"{agent.url}/v2/models/adding/stream"
    content_type = ("--header", "Content-Type: application/x-ndjson")
    lines = curl(url, *how, *content_type, body=b"".join(LINE % (at, at) for at in range(50))).splitlines()
    records = [json.loads(line) for line in lines if line]
    assert [(each["id"], each["outputs"][0]["data"]) for each in records] == [(str(at), [at + 1]) for at in range(50)]


def test_results_are_followed(agent: Agent) -> None:
    """Sent as events; who comes later has the newest again."""
    url = f"{agent.url}/v2/models/adding/results?since=0"
    command = ["curl", "--silent", "--no-buffer", "--max-time", "20", "--header", "Accept: text/event-stream", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline().startswith(b"retry: ")
        curl(f"{agent.url}/v2/models/adding/infer", "--data-binary", "@-", body=LINE % (99, 5))
        for line in follower.stdout:
            if line.startswith(b"data: ") and (record := json.loads(line[6:])).get("id") == "99":
                assert record["outputs"][0]["data"] == [6]
                break
        follower.terminate()


def test_a_unix_socket(agent: Agent) -> None:
    path = agent.urls[1].removeprefix("unix:")
    answer = curl(
        "--unix-socket", path, "http://agent/v2/models/adding/infer", "--data-binary", "@-", body=LINE % (1, 2)
    )
    assert json.loads(answer)["outputs"][0]["data"] == [3]
