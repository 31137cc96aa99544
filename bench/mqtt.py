"""Messages of 1 KB to a broker, ours beside other clients of MQTT: `python -m bench.mqtt [--save]`.

All send to one mosquitto on the same machine, each from a process of its own, in turn; a round is one turn of all. Ours
makes every message durable before it is sent (`agent.mqtt.publisher`, as the agent has it), the others keep theirs in
memory. A figure counts from the first message to the last acknowledgement (QoS 0: until the last is on its way), and is
the median of the rounds. The processor's time is that of the sender alone, and the figure that noise moves least.

    pip install aiomqtt          # is left out where it is not there
    python -m bench.mqtt --save  # writes bench/results/mqtt.md
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import queue
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from agent.mqtt.message import Kind, Message
from agent.mqtt.moment import Clock
from agent.mqtt.publisher import Publisher
from agent.mqtt.settings import Mqtt
from bench.machine import describe_machine, measured_on
from tests.support.brokers import mosquitto
from tests.support.links import Ears, until

RESULT = Path(__file__).parent / "results" / "mqtt.md"
TOPIC = "edge/v1/bench/agent/m/x"
PAYLOAD = b"x" * 1000
# Who makes messages faster than they leave waits here, as whoever has bounded memory must.
MOST_WAITING = 2000


class Sent(NamedTuple):
    """How long it took, and what the sender needed for it."""

    seconds: float
    cpu_s: float
    rss_mib: float
    amplification: float = 0.0


def spooled(port: int, count: int, folder: Path) -> float:
    """Ours, QoS 1. Bytes that were written for each byte of a message."""

    async def main() -> float:
        settings = Mqtt(brokers=(f"mqtt://127.0.0.1:{port}",), device="bench", spool=str(folder), free_floor_mib=0)
        clock = Clock()
        publisher = await Publisher.open(settings, clock, dict)
        publisher.start(Ears())
        await until(lambda: publisher.link.is_connected)
        body = {"text": PAYLOAD.decode()}
        for _ in range(count):
            publisher.publish(Message("agent", Kind.MEASURE, "x", body, publisher.now(), "result/1"))
            await until(lambda: publisher.spool.by_kind["m"].queued < MOST_WAITING)
        await until(lambda: not publisher.spool.by_kind["m"].queued)
        figures = publisher.spool
        counts = figures.by_kind["m"]
        assert (counts.delivered, counts.dropped) == (count, {})
        await publisher.stop()
        return figures.amplification

    return asyncio.run(main())


def paho(port: int, count: int, qos: int) -> float:
    """paho in its own thread, as its documentation has it, with at most so many unacknowledged."""
    mqtt = importlib.import_module("paho.mqtt.client")
    enums = importlib.import_module("paho.mqtt.enums")
    room = threading.Semaphore(MOST_WAITING)
    sent: queue.Queue[int] = queue.Queue()
    connected = threading.Event()
    client = mqtt.Client(enums.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)

    def published(*_: Any) -> None:
        room.release()
        sent.put(1)

    client.on_publish = published
    client.on_connect = lambda *_: connected.set()
    client.connect("127.0.0.1", port)
    client.loop_start()
    connected.wait()
    for _ in range(count):
        room.acquire()
        client.publish(TOPIC, PAYLOAD, qos)
    for _ in range(count):
        sent.get()
    client.disconnect()
    client.loop_stop()
    return 0.0


def aiomqtt(port: int, count: int, qos: int) -> float:
    """A hundred publish at once, each after its last one's acknowledgement."""
    library = importlib.import_module("aiomqtt")

    async def main() -> None:
        async with library.Client("127.0.0.1", port) as client:

            async def some(share: int) -> None:
                for _ in range(share):
                    await client.publish(TOPIC, PAYLOAD, qos)

            await asyncio.gather(*[some(count // 100) for _ in range(100)])

    asyncio.run(main())
    return 0.0


def mosquitto_pub(port: int, count: int, qos: int) -> float:
    """mosquitto's own client, in C: a message for each line."""
    lines = (PAYLOAD + b"\n") * count
    command = ["mosquitto_pub", "-p", str(port), "-t", TOPIC, "-q", str(qos), "-l", "-V", "5"]
    subprocess.run(command, input=lines, check=True)
    return 0.0


WAYS: dict[str, Callable[[int, int, Path], float]] = {
    "ours, spooled, QoS 1": spooled,
    "paho, QoS 1": lambda port, count, _: paho(port, count, 1),
    "paho, QoS 0": lambda port, count, _: paho(port, count, 0),
    "aiomqtt, QoS 1": lambda port, count, _: aiomqtt(port, count, 1),
    "aiomqtt, QoS 0": lambda port, count, _: aiomqtt(port, count, 0),
    "mosquitto_pub -l, QoS 1": lambda port, count, _: mosquitto_pub(port, count, 1),
    "mosquitto_pub -l, QoS 0": lambda port, count, _: mosquitto_pub(port, count, 0),
}
OURS, FLOOR = "ours, spooled, QoS 1", "paho, QoS 1"


def send(way: str, port: int, count: int, folder: Path) -> None:
    """In a process of its own: do it, and say what it took."""
    began = time.monotonic()
    amplification = WAYS[way](port, count, folder)
    seconds = time.monotonic() - began
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    peak_kib = max(own.ru_maxrss, children.ru_maxrss) if children.ru_maxrss else own.ru_maxrss
    print(json.dumps(Sent(seconds, cpu_s, peak_kib / 1024, amplification)))


def measure(way: str, port: int, count: int) -> Sent:
    """One turn."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.mqtt", "--way", way, "--port", str(port), "--count", str(count)]
        done = subprocess.run([*command, "--in", folder], check=True, capture_output=True, text=True)
    return Sent(*json.loads(done.stdout.splitlines()[-1]))


def report(found: dict[str, list[Sent]], count: int, rounds: int) -> str:
    """The table."""
    rates = {way: statistics.median(count / each.seconds for each in turns) for way, turns in found.items()}
    lines = [
        "# Messages of 1 KB to a broker, beside other clients",
        "",
        f"{count:,} messages a turn to one mosquitto on the same machine, {rounds} rounds, interleaved, medians; by "
        "`python -m bench.mqtt`, whose help says how. Ours is durable before it is sent: "
        f"{statistics.median(each.amplification for each in found[OURS]):.2f} bytes are written for each byte of a "
        "message. The processor's time is the sender's, with its start and imports.",
        "",
        "| client | messages/s | : paho, QoS 1 | CPU us/message | most resident |",
        "|---|---|---|---|---|",
        *[
            f"| {way} | {rates[way]:,.0f} | {rates[way] / rates[FLOOR]:.2f} "
            f"| {statistics.median(each.cpu_s for each in turns) / count * 1e6:.0f} "
            f"| {statistics.median(each.rss_mib for each in turns):.0f} MiB |"
            for way, turns in found.items()
        ],
    ]
    return "\n".join((*lines, "", measured_on(describe_machine("paho-mqtt", "msgspec")), ""))


def main() -> int:
    """0 where all was sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="messages of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write bench/results/{RESULT.name}")
    parser.add_argument("--way", choices=WAYS, help="only this, against a broker that is there")
    parser.add_argument("--port", type=int)
    parser.add_argument("--in", dest="folder", type=Path)
    options = parser.parse_args()
    if options.way:
        send(options.way, options.port, options.count, options.folder)
        return 0
    ways = [way for way in WAYS if _is_there(way)]
    found: dict[str, list[Sent]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        open_queue = ("allow_anonymous true", "max_queued_messages 0", "max_inflight_messages 0")
        with mosquitto(Path(folder) / "broker", *open_queue) as broker:
            for _ in range(options.rounds):
                for way in ways:
                    found[way].append(measure(way, broker.port, options.count))
    text = report(found, options.count, options.rounds)
    if options.save:
        RESULT.write_text(text, encoding="utf-8")
    print(text)
    return 0


def _is_there(way: str) -> bool:
    if way.startswith("aiomqtt"):
        return importlib.util.find_spec("aiomqtt") is not None
    return not way.startswith("mosquitto_pub") or shutil.which("mosquitto_pub") is not None


if __name__ == "__main__":
    sys.exit(main())
