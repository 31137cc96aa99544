"""What an agent that publishes survives: `python -m bench.mqtt_ordeals --kills 50 --away-minutes 10 [--save]`.

A real agent is asked by one client as fast as it answers, and publishes every result. Between it and mosquitto stands a
proxy that resets connections, lets them hang, leaves them half open or refuses them at random moments. First the agent
is killed (SIGKILL) so often, with two broken connections before each; then the broker is away for so long, under load.
A subscriber that knows only docs/mqtt.md judges: each number of each stream came, or is in a gap; none says two things;
live messages and history are each in order. It fails (exit 1) where that is not so.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.machine import describe_machine, measured_on
from tests.support.agents import Agent, serving
from tests.support.brokers import mosquitto
from tests.support.deliveries import faults_of, place_of
from tests.support.operators import Operator, of, operator
from tests.support.ordeals import Asking, configured, settle, suffer
from tests.support.proxy import proxy

RESULT = Path(__file__).parent / "results" / "mqtt_ordeals.md"
_UNBOUNDED = ("allow_anonymous true", "max_queued_messages 0")
_BREAKS = 2
_LOOK_S = 5.0


def rss_mib(agent: Agent) -> float:
    """Of the gateway's process."""
    text = Path(f"/proc/{agent.process.pid}/status").read_text(encoding="ascii")
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def judged(hearing: Operator) -> list[str]:
    """Waits a while for what is on its way to the subscriber."""
    end = time.monotonic() + 60
    while faults := faults_of(hearing.heard):
        if time.monotonic() > end:
            return faults
        time.sleep(1)
    return []


def counted(hearing: Operator) -> tuple[int, int, int]:
    """(messages, those that came again, those that were history)."""
    places = [place for each in hearing.heard if (place := place_of(each))]
    late = sum("hist" in each.user for each in hearing.heard)
    return len(places), len(places) - len(set(places)), late


def kill(folder: Path, kills: int, seed: int) -> tuple[str, list[str]]:
    """A line of the table, and what was wrong."""
    with (
        mosquitto(folder / "broker", *_UNBOUNDED) as broker,
        operator(broker.port) as hearing,
        proxy(broker.port) as network,
    ):
        asking = suffer(folder, network, hearing, random.Random(seed), kills=kills, breaks=_BREAKS)
        faults = judged(hearing)
        messages, again, late = counted(hearing)
        results = len({place_of(each) for each in hearing.found(of("result/1"))})
        what = f"{kills} kills, {network.accepted} connections"
    return f"| {what} | {asking.answered} | {results} | {messages} | {again} | {late} | {len(faults)} | |", faults


def stay_away(folder: Path, minutes: float) -> tuple[str, list[str]]:
    """The same of a broker that is away."""
    with (
        mosquitto(folder / "broker", *_UNBOUNDED) as broker,
        operator(broker.port) as hearing,
        proxy(broker.port) as network,
        serving(None, folder / "log", "--config", str(configured(folder, network.url, "replay_per_s = 0.0"))) as agent,
    ):
        hearing.until(of("birth/1"))
        asking, sizes = Asking(), [rss_mib(agent)]
        with asking.on(agent.url):
            threading.Event().wait(10)
            sizes = [rss_mib(agent)]
            network.refuse()
            network.reset()
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                threading.Event().wait(_LOOK_S)
                sizes.append(rss_mib(agent))
            network.refuse(False)
        settle(agent)
        faults = judged(hearing)
        sizes.append(rss_mib(agent))
        if agent.stop() != 0:
            faults.append("the agent did not end well")
        messages, again, late = counted(hearing)
        gone = sum(int(each.body["count"]) for each in hearing.found(of("gap/1")) if "/result" in each.body["stream"])
        results = len({place_of(each) for each in hearing.found(of("result/1"))})
        if results + gone != asking.answered:
            faults.append(f"{asking.answered} results, of which {results} came and {gone} are in gaps")
    rss = f"{sizes[0]:.0f} before, at most {max(sizes):.0f}"
    return (
        f"| broker away for {minutes:g} minutes | {asking.answered} | {results} (and {gone} in gaps) | {messages} "
        f"| {again} | {late} | {len(faults)} | {rss} |"
    ), faults


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--away-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    ordeals: dict[str, Callable[[Path], tuple[str, list[str]]]] = {
        "kills": lambda folder: kill(folder, options.kills, options.seed),
        "away": lambda folder: stay_away(folder, options.away_minutes),
    }
    rows: list[str] = []
    faults: list[str] = []
    for name, ordeal in ordeals.items():
        with tempfile.TemporaryDirectory(prefix=f"mqtt-{name}-") as folder:
            row, wrong = ordeal(Path(folder))
        rows.append(row)
        faults += wrong
        sys.stdout.write(row + "\n")
        sys.stdout.flush()
    for fault in faults:
        sys.stdout.write(fault + "\n")
    if options.save and not faults:
        RESULT.write_text(_page(rows), encoding="utf-8")
    return 1 if faults else 0


def _page(rows: Sequence[str]) -> str:
    head = [
        "# What telemetry survives",
        "",
        measured_on(describe_machine()),
        "",
        "`python -m bench.mqtt_ordeals --save`; what was done, and what is judged, stands there. A result that was",
        "answered less than a tenth of a second before a kill may not have been durable: it has no number then.",
        "",
        "| ordeal | answered | results that came | messages | again | late | faults | RSS of the gateway, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
