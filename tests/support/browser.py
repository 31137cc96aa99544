"""A real browser: headless Chromium, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
# Only bounds what a hang costs.
_PATIENCE_S = 60.0


class Browser:
    """One page of a browser. `requests` are the URLs of all that it asked for, `errors` what it complained of."""

    def __init__(self, reads: int, writes: int) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._reads, self._writes = reads, writes
        self._ids = itertools.count(1)
        self._data = b""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go there."""
        self._call("Page.navigate", url=url)

    def show(self, width: int, height: int, scheme: str = "light") -> None:
        """Be a screen of that size and colour scheme, with motion reduced."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def text(self, selector: str) -> str:
        """What can be read there."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def until(self, selector: str, holds: Callable[[str], bool]) -> str:
        """Wait until what can be read there is as wanted."""
        end = time.monotonic() + _PATIENCE_S
        while not holds(text := self.text(selector)):
            assert time.monotonic() < end, f"{selector}: {text!r}; {self.errors}"
            time.sleep(0.05)
        return text

    def press(self, key: str, code: int) -> None:
        """A key, down and up."""
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def names(self) -> list[tuple[str, str]]:
        """(role, name) of everything that a screen reader is told of."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            (each["role"]["value"], each.get("name", {}).get("value", "")) for each in nodes if not each.get("ignored")
        ]

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """What is seen, or the page from top to bottom, as PNG."""
        done = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(done["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        id_ = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._writes, json.dumps({"id": id_, "method": method, "params": params, **session}).encode() + b"\0")
        while (message := self._message()).get("id") != id_:
            self._hear(message)
        assert "error" not in message, (method, message)
        result: dict[str, Any] = message["result"]
        return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._data:
            assert select.select([self._reads], [], [], _PATIENCE_S)[0], "the browser says nothing"
            data = os.read(self._reads, 1 << 20)
            assert data, "the browser is gone"
            self._data += data
        text, _, self._data = self._data.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _hear(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.errors.append(params["entry"]["text"])


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Start a browser with a fresh profile; it is ended when the block is left."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # It reads commands from descriptor 3 and writes to 4, either of which may be the other's now.
    command = [
        "bash", "-c", f'exec {{in}}<&{theirs_in} {{out}}>&{theirs_out}; exec "$@" 3<&$in 4>&$out', "bash",
        CHROMIUM, *QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_in, ours_out)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        try:
            # Its end of the pipe closed, it ends by itself.
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
