"""The page in a real browser, over a real agent with real traffic."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support import bundles, images
from tests.support.agents import Agent, serving, until
from tests.support.browser import CHROMIUM, Browser, browsing

SETTINGS = """
[engine]
restarts = 50
[repository]
control = true
folders = ["{folder}"]
[[models]]
bundle = "{folder}/signs.tfb"
results_mib = 1
picture_kib = 64
[[models]]
bundle = "{folder}/add.tfb"
"""
RED = images.jpeg(images.plain(64, 48))
BODY = {"inputs": [{"name": name, "datatype": "FP32", "shape": [1, 8], "data": [1] * 8} for name in "ab"]}
needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    images.detector(folder / "signs.tfb")
    bundles.add(folder / "add.tfb")
    config = folder / "agent.toml"
    config.write_text(SETTINGS.format(folder=folder), encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def agent(settings: Path) -> Iterator[Agent]:
    with serving(None, settings.parent / "log", "--config", str(settings)) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with browsing(tmp_path / "profile") as browser:
        browser.show(1280, 900)
        yield browser
        assert browser.errors == []


def status_of(agent: Agent) -> dict[str, Any]:
    code, body, _ = agent.request("/v2/status")
    assert code == 200
    found: dict[str, Any] = json.loads(body)
    return found


def send_picture(agent: Agent, data: bytes = RED) -> None:
    assert agent.request("/v2/models/signs/image", data, {"Content-Type": "image/jpeg"})[0] == 200


def events(browser: Browser) -> str:
    return browser.text("#event-list")


# --- what programs see


def test_the_figures_are_as_described_and_as_the_traffic_was(agent: Agent) -> None:
    before = status_of(agent)
    for _ in range(3):
        assert agent.post(BODY, path="/v2/models/add/infer")[0] == 200
    assert agent.post({"inputs": []}, path="/v2/models/add/infer")[0] == 400
    after = status_of(agent)
    schemas = json.loads(agent.request("/v2/openapi.json")[1])["components"]
    Draft202012Validator({"$ref": "#/components/schemas/Status", "components": schemas}).validate(after)
    assert after["answered"] == before["answered"] + 3
    assert after["last_refusals"][0]["reason"] == "bad_request"
    assert "'a' is missing" in after["last_refusals"][0]["message"]
    (refused,) = [each for each in after["refusals"] if each["reason"] == "bad_request"]
    assert refused["count"] >= refused["recent"] >= 1
    add = next(each for each in after["models"] if each["name"] == "add")
    assert (add["state"], add["board"], add["scheme"]) == ("READY", "test-board", "none")
    assert sum(add["latency"]["counts"]) >= 3
    assert 0 < add["latency"]["p50_s"] <= add["latency"]["p99_s"]
    assert {each["model"] for each in after["memory"]["used"]} == {"", "signs", "add"}
    assert sum(each["nbytes"] for each in after["memory"]["planned"]) > 300 << 20


def test_the_page_is_html_for_all_and_is_asked_for_again_by_its_tag(agent: Agent) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=60)

    def ask(method: str, headers: dict[str, str]) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection.request(method, "/", headers=headers)
        response = connection.getresponse()
        return response.status, response.read(), response.headers

    code, body, headers = ask("GET", {"Accept": "application/json"})
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Content-Type-Options"] == "nosniff"
    code, nothing, again = ask("HEAD", {})
    assert (code, nothing, again["Content-Length"]) == (200, b"", str(len(body)))
    for tag in (headers["ETag"], f'"other", W/{headers["ETag"]}', "*"):
        code, nothing, again = ask("GET", {"If-None-Match": tag})
        assert (code, nothing, again["ETag"]) == (304, b"", headers["ETag"]), tag
    assert ask("GET", {"If-None-Match": '"other"'})[0] == 200
    connection.close()


def test_a_picture_is_kept_where_that_is_wanted_and_bounded(agent: Agent) -> None:
    send_picture(agent)
    path = "/v2/models/signs/results/picture"
    code, body, headers = agent.request(path)
    assert (code, body, headers["Content-Type"]) == (200, RED, "image/jpeg")
    assert "sandbox" in headers["Content-Security-Policy"]
    large = images.png(images.noise(200, 200))
    assert len(large) > 64 << 10
    send_picture(agent, large)
    _, again, after = agent.request(path)
    assert (again, after["Tightfit-Result"]) == (RED, headers["Tightfit-Result"])
    code, body, _ = agent.request("/v2/models/add/results/picture")
    assert (code, "picture_kib" in json.loads(body)["error"]) == (403, True)
    code, body, _ = agent.request("/v2/models/nothing/results/picture")
    assert code == 404


# --- what people see


@needs_a_browser
def test_traffic_refusals_and_an_engine_kill_are_shown(agent: Agent, browser: Browser) -> None:
    browser.open(agent.url)
    browser.until("#state", lambda text: "Serving" in text)
    for _ in range(5):
        assert agent.post(BODY, path="/v2/models/add/infer")[0] == 200
    assert agent.post({}, path="/v2/models/%3Cb%3Enothing/infer")[0] == 404
    browser.until("#refusal-list", lambda text: "unknown_model" in text and "<b>nothing" in text)
    browser.until("#reasons", lambda text: "no such model" in text)
    browser.until("#latency-sum", lambda text: "p99" in text)
    restarts = status_of(agent)["models"][1]["engine"]["restarts"]
    os.kill(agent.engine_pids[-1], signal.SIGKILL)
    browser.until("#event-list", lambda text: f"add: the engine runs again (restart {restarts + 1})." in text)
    assert "add: the engine was killed by SIGKILL; it is started again." in events(browser)
    browser.until("#model-list", lambda text: text.rstrip().endswith(str(restarts + 1)))
    assert all(url.startswith((agent.url + "/", "data:")) for url in browser.requests)


@needs_a_browser
def test_boxes_are_drawn_on_the_picture(agent: Agent, browser: Browser) -> None:
    browser.open(agent.url)
    browser.until("#result-empty", lambda text: "Waiting for the next answer of signs" in text)

    def seen() -> bool:
        # The page may not follow yet.
        send_picture(agent)
        return "red" in browser.text("#result")

    until(seen)
    until(lambda: "red" in browser.evaluate("document.getElementById('picture').ariaLabel"))
    pixels = "picture.getContext('2d').getImageData(0, 0, picture.width, picture.height).data.buffer"
    colours = browser.evaluate(f"new Set(new Uint32Array({pixels})).size")
    # The picture has one colour but for what JPEG makes of it; the boxes and their labels have others.
    assert colours > 2


@needs_a_browser
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_a_desk(agent: Agent, browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    browser.show(width, 780, scheme)
    browser.open(agent.url)
    agent.post({"inputs": []}, path="/v2/models/add/infer")
    browser.until("#refusal-list", lambda text: "bad_request" in text)
    browser.until("#event-list", lambda text: "add" in text)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 25, 29)")
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


@needs_a_browser
def test_keyboard_and_screen_reader(agent: Agent, browser: Browser) -> None:
    browser.open(agent.url)
    browser.until("#state", lambda text: "Serving" in text)
    until(lambda: not browser.evaluate("document.getElementById('follow').disabled"))
    reached = []
    for _ in range(8):
        browser.press("Tab", 9)
        reached.append(browser.evaluate("(e => e.id || e.className || e.textContent)(document.activeElement)"))
    assert reached == ["skip", "pause", "follow", "scroll", "scroll", "status", "metrics", "description"]
    names = browser.names()
    for role, name in (("button", "Pause"), ("combobox", "Model"), ("region", "The last ones"), ("region", "Events")):
        assert (role, name) in names
    assert any(role == "image" and name.startswith("Anonymous: ") for role, name in names)
    assert all(name for role, name in names if role in ("button", "combobox", "link", "heading", "image"))


@needs_a_browser
def test_a_paused_page_asks_for_nothing(agent: Agent, browser: Browser) -> None:
    browser.open(agent.url)
    browser.until("#state", lambda text: "Serving" in text)
    until(lambda: agent.metric("tightfit_streams") >= 2)
    browser.evaluate("document.getElementById('pause').click()")
    assert browser.text("#pause") == "Go on"
    until(lambda: agent.metric("tightfit_streams") == 0)
    browser.evaluate("document.getElementById('pause').click()")
    until(lambda: agent.metric("tightfit_streams") >= 2)


@needs_a_browser
def test_it_goes_on_when_the_agent_is_back_and_when_nothing_is_loaded(
    settings: Path, browser: Browser, tmp_path: Path
) -> None:
    with serving(None, tmp_path / "log", "--config", str(settings)) as agent:
        port = agent.port
        browser.open(agent.url)
        browser.until("#refusal-list", lambda text: text == "Nothing was refused.")
        browser.until("#latency-sum", lambda text: "No requests yet" in text)
        agent.stop(signal.SIGKILL)
        browser.until("#state", lambda text: "Not connected" in text)
        assert "No figures since" in browser.text("#link")
    with serving(None, tmp_path / "log", "--config", str(settings), "--port", str(port), free_port=False) as agent:
        browser.until("#state", lambda text: "Serving" in text)
        browser.until("#event-list", lambda text: "The agent was restarted." in text)
        send_picture(agent)
        assert agent.request("/v2/models/signs/results/picture")[0] == 200
        for name in ("add", "signs"):
            assert agent.request(f"/v2/repository/models/{name}/unload", b"")[0] == 200
        browser.until("#state", lambda text: "no model is loaded" in text)
        # What clients sent goes with the model that it was sent to.
        assert agent.request("/v2/models/signs/results/picture")[0] == 404
        browser.until("#event-list", lambda text: "signs: version" in text and "unloaded" in text)


@needs_a_browser
def test_who_may_not_look_is_told_so(settings: Path, browser: Browser, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f'[access]\nanonymous = ["infer"]\n{settings.read_text(encoding="utf-8")}', encoding="utf-8")
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        browser.open(agent.url)
        browser.until("#link", lambda text: "the agent answers 401: " in text)
        assert "signs" not in browser.text("body")
