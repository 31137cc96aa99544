"""Images over HTTP: a recipe in a real agent."""

from __future__ import annotations

import base64
import json
import random
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton

from agent.models import open_model
from targets.bundle import read_manifest
from targets.errors import BudgetError, BundleError, RecipeError
from targets.recipe import memory_bytes, parse_recipe
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving
from tests.support.images import (
    BLUE,
    CLASSIFIER,
    GREEN,
    RED,
    classifier,
    detector,
    jpeg,
    noise,
    plain,
    png,
    png_of,
    turned,
)
from tests.support.streams import Exchange, stream

IMAGE = "/v2/models/colour/image"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("images")
    with serving(classifier(folder / "colour.tfb"), folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(autouse=True)
def _still_serves(agent: Agent) -> Iterator[None]:
    yield
    assert ask(agent, jpeg(plain(8, 8, GREEN)))["label"] == ["green"]


def ask(agent: Agent, data: bytes, headers: dict[str, str] | None = None, path: str = IMAGE) -> dict:
    status, body, _ = agent.request(path, data, headers)
    assert status == 200, body
    return json.loads(body)


def refused(agent: Agent, data: bytes, headers: dict[str, str] | None = None, status: int = 400) -> str:
    code, body, _ = agent.request(IMAGE, data, headers)
    assert code == status, body
    (text,) = json.loads(body).values()
    assert "\n" not in text
    return text


def test_an_image_file_is_a_whole_request(agent: Agent) -> None:
    answer = ask(agent, jpeg(plain(50, 30, RED)), {"Content-Type": "image/jpeg"})
    assert answer["model_name"] == "colour"
    assert answer["label"] == ["red"]
    assert answer["score"] == pytest.approx([1.0], abs=0.02)
    assert ask(agent, png(plain(3, 3, BLUE)))["label"] == ["blue"]
    assert ask(agent, turned(jpeg(plain(30, 50, RED)), 8))["label"] == ["red"]
    version = answer["model_version"]
    assert ask(agent, png(plain(3, 3)), path=f"/v2/models/colour/versions/{version}/image")["label"] == ["red"]
    assert agent.request("/v2/models/other/image", png(plain(3, 3)))[0] == 404


def test_a_compressed_body(agent: Agent) -> None:
    packed = zlib.compress(png(plain(8, 8, BLUE)))
    assert ask(agent, packed, {"Content-Encoding": "deflate"})["label"] == ["blue"]
    refused(agent, b"nonsense", {"Content-Encoding": "gzip"})
    refused(agent, zlib.compress(bytes(9 << 20)), {"Content-Encoding": "deflate"}, status=413)


def test_metadata_say_that_images_are_taken(agent: Agent) -> None:
    parameters = json.loads(agent.request("/v2/models/colour")[1])["parameters"]
    assert parameters == {
        "image_path": IMAGE,
        "image_input": "image",
        "image_formats": "jpeg,png",
        "image_max_bytes": 8 << 20,
        "image_max_pixels": 4096 * 2160,
        "image_outputs": "label,score",
    }


def test_as_a_bytes_tensor_in_base64(agent: Agent) -> None:
    text = base64.b64encode(png(plain(8, 8, BLUE))).decode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    status, body, _ = agent.post({"id": "7", "inputs": [tensor], "outputs": [{"name": "label"}]})
    answer = json.loads(body)
    assert (status, answer["id"]) == (200, "7")
    assert answer["outputs"] == [{"name": "label", "datatype": "BYTES", "shape": [1], "data": ["blue"]}]
    status, body, _ = agent.post({"inputs": [{**tensor, "data": ["no base64!"]}]})
    assert (status, "is not base64" in body.decode()) == (400, True)
    status, body, _ = agent.post({"inputs": [{**tensor, "shape": [2], "data": [text, text]}]})
    assert (status, "size 2 on axis 0" in body.decode()) == (400, True)
    status, body, _ = agent.post({"inputs": [tensor], "outputs": [{"name": "y"}]})
    assert (status, "available: label, score" in body.decode()) == (400, True)


def test_as_a_binary_tensor_by_tritonclient(agent: Agent) -> None:
    with triton.InferenceServerClient(agent.address) as client:
        image = triton.InferInput("image", [1], "BYTES")
        image.set_data_from_numpy(np.array([jpeg(plain(8, 8, BLUE))], object))
        answer = client.infer("colour", [image])
        assert answer.as_numpy("label").tolist() == [b"blue"]
        assert answer.as_numpy("score").shape == (1,)


def test_tensors_are_taken_as_before(agent: Agent) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.5] * 192}
    status, body, _ = agent.post({"inputs": [tensor]})
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [0.5] * 3)


def test_bad_images_are_400_with_one_line(agent: Agent) -> None:
    assert "it is empty" in refused(agent, b"")
    assert "--data-binary" in refused(agent, b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\n')
    assert "100000 x 100000 pixels" in refused(agent, png_of(100_000, 100_000, zlib.compress(bytes(1000))))
    assert "at most 8.0 MiB" not in refused(agent, b"\xff\xd8\xff" + bytes(1000))
    refused(agent, bytes((8 << 20) + 1), status=413)


def test_random_and_truncated_images_are_400(agent: Agent) -> None:
    draw = random.Random(0)
    whole = [jpeg(noise(64, 48)), jpeg(noise(64, 48), cv2.IMWRITE_JPEG_PROGRESSIVE, 1), png(noise(64, 48))]
    starts = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", *(data[:200] for data in whole)]
    cases = [draw.choice(starts) + draw.randbytes(draw.randint(1, 400)) for _ in range(100)]
    cases += [data[: draw.randint(0, len(data) - 2)] for data in whole for _ in range(30)]
    for data in cases:
        refused(agent, data)


def test_a_damaged_tensor_of_an_image_is_400(agent: Agent) -> None:
    text = base64.b64encode(jpeg(plain(8, 8))[:-9]).decode()
    status, body, _ = agent.post({"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}]})
    assert (status, "ends too early" in body.decode()) == (400, True)


def test_boxes_in_pixels_of_the_image(tmp_path: Path) -> None:
    # 128 x 64 pixels, of which the model sees 64 x 32 in the middle of 64 x 64. A square of 16 x 16 is one cell of
    # stride 8 there: column 2 and row 3, centre (20, 28); its box spans 1 stride before and 2 after.
    image = plain(128, 64, (0, 0, 0))
    image[16:32, 32:48] = BLUE
    with serving(detector(tmp_path / "boxes.tfb"), tmp_path / "log") as agent:
        answer = ask(agent, png(image), path="/v2/models/boxes/image")
        assert ask(agent, png(plain(9, 9, (0, 0, 0))), path="/v2/models/boxes/image")["boxes"] == []
    assert (answer["label"], answer["score"]) == (["blue"], pytest.approx([1.0]))
    assert answer["boxes"] == [[24.0, 8.0, 72.0, 56.0]]


def test_health_is_answered_while_a_large_image_is_decoded(agent: Agent) -> None:
    data = png(noise(1, 1).repeat(2160, 0).repeat(4096, 1))

    def answered() -> int:
        """How often, until the image is answered."""
        count = 0
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(ask, agent, data)
            while not answer.done():
                assert agent.request("/v2/health/live")[0] == 200
                count += 1
            answer.result()
        return count

    # Were it decoded by the event loop there would be hardly one, every time.
    assert any(answered() > 3 for _ in range(6))


def test_images_take_no_more_than_the_plan_has(agent: Agent, tmp_path: Path) -> None:
    recipe = parse_recipe(CLASSIFIER + "[decode]\nmax_pixels = 4000000\nmax_bytes = 8000000\n", "t")
    flags = (cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444)
    large = turned(jpeg(noise(2000, 2000), *flags, cv2.IMWRITE_JPEG_QUALITY, 50), 6)
    bundle = classifier(tmp_path / "colour.tfb", CLASSIFIER + "[decode]\nmax_pixels = 4000000\nmax_bytes = 8000000\n")
    with serving(bundle, tmp_path / "log") as small:
        before = peak(small)
        with ThreadPoolExecutor(6) as threads:
            for answer in [threads.submit(ask, small, large) for _ in range(6)]:
                answer.result()
        grown = peak(small) - before
    manifest = read_manifest(bundle)
    bodies = manifest.plan.slots * 2 * len(large)
    assert grown > 2000 * 2000 * 3
    assert grown <= memory_bytes(recipe, manifest.contract) + bodies


def peak(agent: Agent) -> int:
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match
    return int(match[1]) * 1024


def test_a_recipe_that_does_not_go_with_its_bundle_is_refused(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "colour.tfb")
    manifest = read_manifest(folder)
    recipe = manifest.recipe
    assert recipe is not None
    budget = 8 << 30
    open_model(folder, budget)
    with pytest.raises(BudgetError, match="the plan counts 0 B for images"):
        open_model(bundles.rewrite(folder, manifest, plan=bundles.plan_of(manifest.contract)), budget)
    with pytest.raises(BundleError, match=r"the recipe reads assets/labels\.txt"):
        open_model(bundles.rewrite(folder, manifest, assets=()), budget)
    gray = msgspec.structs.replace(recipe, colour="gray")
    with pytest.raises(RecipeError, match="size 1 on axis 1"):
        open_model(bundles.rewrite(folder, manifest, recipe=gray), budget)
    (folder / "assets" / "labels.txt").write_text("red\n")
    with pytest.raises(RecipeError, match="names 1 classes, the model has 3"):
        open_model(bundles.rewrite(folder, manifest), budget)


def test_without_opencv_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "cv2.py").write_text("raise ModuleNotFoundError('no', name='cv2')")
    folder = classifier(tmp_path / "colour.tfb")
    for command in (["check", str(folder)], ["serve", "--bundle", str(folder), "--port", "0"]):
        code, _, error = run_agent(*command, env={"PYTHONPATH": str(tmp_path)})
        assert code == 2
        assert "cv2 is not installed (pip install 'tightfit[agent,cpu,image]')" in error
        assert "Traceback" not in error


def test_a_camera_s_parts_in_a_stream_and_who_follows_it(tmp_path: Path) -> None:
    """Each image is answered in order; what is none is an error in its place; and what was answered can be followed."""
    bundle = classifier(tmp_path / "colour.tfb")
    config = tmp_path / "agent.toml"
    config.write_text(f'[[models]]\nbundle = "{bundle}"\nresults_mib = 1\n', encoding="utf-8")
    pictures = [jpeg(plain(8, 8, RED)), b"no image", png(noise(300, 300)), png(plain(8, 8, BLUE))]
    with (
        serving(None, tmp_path / "log", "--config", str(config)) as agent,
        Exchange(agent, "/v2/models/colour/results") as following,
        stream(agent, "multipart/x-mixed-replace; boundary=frame") as exchange,
    ):
        assert following.status == 200
        for number, data in enumerate(pictures):
            kind = "image/jpeg" if data.startswith(b"\xff") else "image/png"
            head = f"--frame\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\nContent-ID: <{number}>\r\n\r\n"
            exchange.send(head.encode() + data + b"\r\n")
        exchange.end()
        records = exchange.records()
        assert ask(agent, jpeg(plain(8, 8, GREEN)))["label"] == ["green"]
        followed = following.records(4)
    assert [(record["seq"], record["id"]) for record in records] == [(at + 1, str(at)) for at in range(4)]
    assert [record["status"] for record in records] == [200, 400, 200, 200]
    labels = [record["outputs"][0]["data"] for record in records if record["status"] == 200]
    assert (labels[0], labels[2]) == (["red"], ["blue"])
    assert [record["outputs"][0]["data"] for record in followed] == [*labels, ["green"]]
