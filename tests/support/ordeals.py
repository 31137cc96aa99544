"""What an agent that publishes goes through while it is asked: kills, connections that break, a broker that is away."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import bundles
from tests.support.agents import Agent, serving, until
from tests.support.operators import Operator
from tests.support.proxy import Proxy


def configured(folder: Path, url: str, more: str = "") -> Path:
    """An agent that publishes all it has, soon."""
    bundle = folder / "add.tfb"
    if not bundle.exists():
        bundles.add(bundle)
    path = folder / "agent.toml"
    path.write_text(
        f"""
[[models]]
bundle = "{bundle}"
name = "add"
results_mib = 8
[mqtt]
brokers = ["{url}"]
device = "car-1"
spool = "{folder / "spool"}"
free_floor_mib = 0
telemetry_s = 1
device_s = 1
keepalive_s = 5
will_delay_s = 0
first_wait_s = 0.05
most_wait_s = 0.2
stuck_s = 2.0
{more}
[[mqtt.results]]
model = "add"
most_per_s = 0
""",
        encoding="utf-8",
    )
    return path


@dataclass
class Asking:
    """Asks an agent on and on, one after the other; an agent that is gone is asked again."""

    url: str = ""
    answered: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        data = [{"name": n, "shape": [1, 8], "datatype": "FP32", "data": [1.0] * 8} for n in "ab"]
        while not self._stop.is_set():
            body = json.dumps({"id": str(self.answered), "inputs": data}).encode()
            try:
                with urllib.request.urlopen(f"{self.url}/v2/models/add/infer", body, timeout=60) as answer:  # noqa: S310
                    answer.read()
                self.answered += 1
            except (OSError, urllib.error.URLError):
                self._stop.wait(0.02)

    def end(self) -> None:
        """Ask no more."""
        self._stop.set()

    @contextlib.contextmanager
    def on(self, url: str) -> Iterator[None]:
        """While the block lasts."""
        self.url = url
        self._stop.clear()
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def suffer(
    folder: Path,
    proxy: Proxy,
    hearing: Operator,
    draw: random.Random,
    *,
    kills: int,
    breaks: int,
    longest_s: float = 0.5,
) -> Asking:
    """Kill the agent so often, and break its connections so often before each, at random moments, while it is asked;
    then let it deliver what it has, and end it well."""
    asking = Asking()
    path = configured(folder, proxy.url)
    for kill in range(kills + 1):
        with serving(None, folder / f"log-{kill}", "--config", str(path)) as agent, asking.on(agent.url):
            before = asking.answered
            for _ in range(breaks):
                threading.Event().wait(draw.uniform(0.0, longest_s))
                _break(proxy, draw)
            proxy.refuse(False)
            proxy.flow()
            until(lambda before=before: asking.answered > before)  # type: ignore[misc]
            if kill < kills:
                agent.stop(signal.SIGKILL)
                continue
            asking.end()
            settle(agent)
            assert agent.stop() == 0
    return asking


def settle(agent: Agent) -> None:
    """Wait until nothing is left of the past; what telemetry adds meanwhile does not count."""
    until(lambda: agent.metric("tightfit_mqtt_connected") == 1)
    until(lambda: agent.metric("tightfit_mqtt_queued") < 20, 300)


def _break(proxy: Proxy, draw: random.Random) -> None:
    what = draw.choice(("reset", "hang", "abandon", "refuse", "accept"))
    if what == "reset":
        proxy.reset()
    elif what == "hang":
        proxy.hang()
        threading.Event().wait(draw.uniform(0.0, 0.3))
        proxy.flow()
    elif what == "abandon":
        proxy.hang()
        proxy.abandon()
    else:
        proxy.refuse(what == "refuse")
        proxy.reset()
