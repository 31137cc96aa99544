"""A real agent, a real broker, and somebody who knows no more than docs/mqtt.md says."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.support import bundles, sparkplug
from tests.support.agents import ROOT, Agent, run_agent, serving, until
from tests.support.brokers import Mosquitto, Subscriber, fleet, mosquitto
from tests.support.operators import Heard, Operator, of, operator

SCHEMAS = ROOT / "docs" / "mqtt" / "schemas"
DEVICE = "edge/v1/car-1"
BIRTH = f"{DEVICE}/agent/state/agent"


def configured(folder: Path, broker: Mosquitto, more: str = "", models: str = "") -> Path:
    """A configuration of an agent that says all it has to say soon."""
    bundle = folder / "add.tfb"
    if not bundle.exists():
        bundles.add(bundle)
    models = models or f'[[models]]\nbundle = "{bundle}"\nname = "add"\nresults_mib = 1\n'
    # Keys of [mqtt] stand before its tables.
    mqtt = f"""
[mqtt]
brokers = ["{broker.url}"]
device = "car-1"
spool = "{folder / "spool"}"
free_floor_mib = 0
telemetry_s = 1
device_s = 1
keepalive_s = 5
will_delay_s = 0
first_wait_s = 0.1
most_wait_s = 0.5
replay_per_s = 0.0
commands = ["observe", "infer", "admin"]
commands_per_s = 100
{more}
"""
    path = folder / "agent.toml"
    path.write_text(models + mqtt, encoding="utf-8")
    return path


RESULTS = '[[mqtt.results]]\nmodel = "add"\nmost_per_s = 0\n'


@contextmanager
def publishing(folder: Path, broker: Mosquitto, more: str = RESULTS, models: str = "") -> Iterator[Agent]:
    with serving(None, folder / "log", "--config", str(configured(folder, broker, more, models))) as agent:
        yield agent


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path / "broker") as made:
        yield made


@pytest.fixture
def hearing(broker: Mosquitto) -> Iterator[Operator]:
    with operator(broker.port) as made:
        yield made


def asked(number: int) -> dict[str, Any]:
    """A request of which the answer is `number` and more."""
    data = {"a": [float(number)] + [0.0] * 7, "b": [0.0] * 8}
    return {
        "id": str(number),
        "inputs": [{"name": n, "shape": [1, 8], "datatype": "FP32", "data": data[n]} for n in "ab"],
    }


def is_online(heard: Heard) -> bool:
    return heard.topic == BIRTH and heard.body["status"] == "online"


def is_offline(heard: Heard) -> bool:
    return heard.topic == BIRTH and heard.body["status"] == "offline"


def channels() -> list[tuple[re.Pattern[str], str]]:
    """(topic, schema) of each channel of the AsyncAPI document."""
    text = (SCHEMAS.parent / "asyncapi.yaml").read_text("utf-8")
    found = re.findall(r"^  (\w+):\n    address: '([^']*)'$", text, re.MULTILINE)
    assert len(found) >= 10
    return [
        (re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(address).replace(r"\{prefix\}", ".+"))), f"{name}/1")
        for name, address in found
    ]


def check_schemas(heard: Sequence[Heard]) -> None:
    """Each is what the schemas say that it is, and comes where the AsyncAPI document says that it does."""
    known = channels()
    texts = {path.name: json.loads(path.read_text("utf-8")) for path in SCHEMAS.glob("*.json")}
    registry: Any = Registry().with_resources((name, Resource.from_contents(text)) for name, text in texts.items())
    for each in heard:
        if each.topic.split("/")[4] == "cmd":
            continue
        Draft202012Validator(texts["envelope-1.json"], registry=registry).validate(each.json)
        assert any(topic.fullmatch(each.topic) and schema == each.schema for topic, schema in known), each.topic
        name = each.schema.replace("/", "-") + ".json"
        Draft202012Validator(texts[name], registry=registry).validate(each.body)


def test_birth_results_and_telemetry(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    with publishing(tmp_path, broker) as agent:
        (birth,) = hearing.until(is_online)
        assert birth.body["versions"]["tightfit"]
        assert [each["name"] for each in birth.body["models"]] == ["add"]
        for number in range(20):
            assert agent.post(asked(number))[0] == 200
        results = hearing.until(of("result/1"), 20)
        assert [each.body["outputs"][0]["data"][0] for each in results] == list(range(20))
        assert [each.user["seq"] for each in results] == [str(number) for number in range(20)]
        assert {each.topic for each in results} == {f"{DEVICE}/model-add/m/result"}
        for name in ("memory", "queue", "latency", "device"):
            hearing.until(of(f"{name}/1"), 2)
        assert hearing.until(of("memory/1"))[0].body["anonymous_bytes"] > 0
        hearing.until(of("meta/1"), 4)
        assert agent.stop() == 0
    (farewell,) = hearing.until(is_offline)
    assert (farewell.body["clean"], farewell.body["session"]) == (True, birth.body["session"])
    check_schemas(hearing.heard)
    assert broker.retained(BIRTH)


def test_a_will_names_the_session_that_ended(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    with publishing(tmp_path, broker) as agent:
        (birth,) = hearing.until(is_online)
        agent.process.send_signal(signal.SIGKILL)
        (will,) = hearing.until(is_offline)
    assert (will.body["clean"], will.body["session"]) == (False, birth.body["session"])
    with publishing(tmp_path, broker) as agent:
        again = hearing.until(is_online, 2)[1]
        assert again.body["session"] != birth.body["session"]
        assert agent.stop() == 0


def test_what_happens_without_a_broker_is_told_later_and_once(
    tmp_path: Path, broker: Mosquitto, hearing: Operator
) -> None:
    """Results while the broker is away, a kill among them: all that was durable comes, in order, none twice."""
    with publishing(tmp_path, broker) as agent:
        hearing.until(is_online)
        assert agent.post(asked(0))[0] == 200
        hearing.until(of("result/1"))
        broker.stop()
        until(lambda: agent.metric("tightfit_mqtt_connected") == 0)
        for number in range(1, 200):
            assert agent.post(asked(number))[0] == 200
        until(lambda: agent.metric("tightfit_mqtt_queued", **{"class": "m"}) >= 199)
        # What syncs has none of it left in memory, or it would be lost with what is killed.
        until(lambda: agent.metric("tightfit_mqtt_spool_pending") == 0)
        agent.process.send_signal(signal.SIGKILL)
        agent.process.wait(60)
    broker.start()
    with publishing(tmp_path, broker) as agent:
        results = hearing.until(of("result/1"), 200)
        until(lambda: agent.metric("tightfit_mqtt_queued", **{"class": "m"}) <= 8)
        assert agent.post(asked(200))[0] == 200
        hearing.until(lambda heard: of("result/1")(heard) and heard.body["id"] == "200")
        assert conserved(agent)
        assert agent.stop() == 0
    once = {each.key: each for each in results}
    assert [each.body["id"] for each in once.values()] == [str(number) for number in range(200)]
    assert sum(each.user.get("hist") == "1" for each in results) >= 199
    check_schemas(hearing.heard)


def conserved(agent: Agent) -> bool:
    """produced = delivered + dropped + queued, of each class, as one look at the metrics has it."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in agent.request("/metrics")[1].decode().splitlines():
        for name in ("produced_total", "delivered_total", "dropped_total", "queued"):
            if line.startswith(f"tightfit_mqtt_{name}{{"):
                labels, value = line.rsplit(" ", 1)
                sums[labels.split('class="')[1].split('"')[0]][name] += float(value)
    assert sums["m"]["produced_total"] > 0
    return all(
        each["produced_total"] == each["delivered_total"] + each["dropped_total"] + each["queued"]
        for each in sums.values()
    )


def answered(hearing: Operator, key: str, state: str) -> Heard:
    return hearing.until(
        lambda heard: of("response/1")(heard) and heard.body["id"] == key and heard.body["state"] == state
    )[0]


def test_commands(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    with publishing(tmp_path, broker) as agent:
        hearing.until(is_online)
        reply = f"{DEVICE}/operator/res/42"
        hearing.send(f"{DEVICE}/observe/cmd/ping", {"v": 1, "id": "p1"}, reply=reply, correlation=b"\x01\x02")
        pong = answered(hearing, "p1", "done")
        assert (pong.topic, pong.correlation) == (reply, b"\x01\x02")
        assert pong.body["result"]["ready"] is True

        hearing.send(f"{DEVICE}/observe/cmd/models", {"v": 1, "id": "m1"})
        models = answered(hearing, "m1", "done")
        assert models.topic == f"{DEVICE}/observe/res/models"
        assert models.body["result"]["models"][0]["state"] == "READY"

        infer = {"v": 1, "id": "i1", "args": {"model": "add", "request": asked(5)}}
        hearing.send(f"{DEVICE}/infer/cmd/infer", infer)
        made = answered(hearing, "i1", "done").body["result"]
        assert made["outputs"][0]["data"][0] == 5
        count = agent.metric("tightfit_requests_total", reason="ok")

        # The same again is answered, and not done again.
        hearing.send(f"{DEVICE}/infer/cmd/infer", infer)
        hearing.until(lambda heard: of("response/1")(heard) and heard.body.get("repeated") is True)
        assert agent.metric("tightfit_requests_total", reason="ok") == count

        hearing.send(f"{DEVICE}/admin/cmd/configure", {"v": 1, "id": "c1", "args": {"telemetry_s": 7}})
        assert answered(hearing, "c1", "done").body["result"]["telemetry_s"] == 7
        # Models are not changed over MQTT where they are not over HTTP.
        hearing.send(f"{DEVICE}/admin/cmd/activate", {"v": 1, "id": "a1", "args": {"model": "add"}})
        assert answered(hearing, "a1", "failed").body["reason"] == "control_disabled"
        # Who may observe may no more, whatever he says.
        hearing.send(f"{DEVICE}/observe/cmd/activate", {"v": 1, "id": "a2", "args": {"model": "add"}})
        assert answered(hearing, "a2", "refused").body["reason"] == "forbidden"

        hearing.send(f"{DEVICE}/observe/cmd/snapshot", {"v": 1, "id": "s1", "args": {"model": "add", "wait_s": 60}})
        answered(hearing, "s1", "accepted")
        hearing.send(f"{DEVICE}/observe/cmd/ping", {"v": 1, "id": "p2"})
        answered(hearing, "p2", "done")
        assert agent.post(asked(3))[0] == 200
        taken = answered(hearing, "s1", "done").body["result"]
        assert taken["outputs"][0]["data"][0] == 3
        assert len(taken["input"]["sha256"]) == 64
        assert agent.stop() == 0
    check_schemas(hearing.heard)


def test_what_is_no_command_is_a_line_and_nothing_else(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    """Row E16: empty, 1 MB, bad JSON, unknown version, retained and old, and a response topic of somebody else."""
    topic = f"{DEVICE}/admin/cmd/configure"
    body = {"v": 1, "id": "x", "args": {"telemetry_s": 9}}
    hearing.send(topic, body, retain=True)
    wrong = [b"", b"[" * 100_000, b"\xff\xfe", b"{", b'{"v": 2, "id": "x"}', b'{"v": 1, "idd": "x"}', b"x" * 300_000]
    with publishing(tmp_path, broker) as agent:
        hearing.until(is_online)
        for each in wrong:
            hearing.send(topic, each)
        hearing.send(topic, body, reply="edge/v1/car-2/agent/res/x")
        hearing.send(topic, body, reply="somewhere/else")
        hearing.send(f"{DEVICE}/observe/cmd/config", {"v": 1, "id": "after"})
        assert answered(hearing, "after", "done").body["result"]["telemetry_s"] == 1
        # The one that was kept did not even come: that is asked of the broker.
        assert agent.metric("tightfit_mqtt_commands_total", outcome="ignored") == len(wrong) + 2
        assert agent.stop() == 0
        lines = [json.loads(line) for line in agent.log.splitlines() if line.startswith("{")]
    ignored = [line for line in lines if line["event"] == "a command is ignored"]
    assert len(ignored) == len(wrong) + 2
    assert hearing.found(lambda heard: of("response/1")(heard) and heard.body["id"] == "x") == []


def test_nothing_is_published_where_nobody_wants_it(tmp_path: Path) -> None:
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log") as agent:
        assert "tightfit_mqtt" not in agent.request("/metrics")[1].decode()
        assert agent.stop() == 0


def test_models_are_activated_and_rolled_back(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    """Each change once, though it is asked for twice, over a restart too; and each is an event and a new birth."""
    shelf = tmp_path / "shelf"
    first, second = bundles.add(shelf / "add.tfb"), bundles.add(shelf / "more.tfb", slots=3)
    models = f'[repository]\ncontrol = true\nfolders = ["{shelf}"]\n[[models]]\nbundle = "{first}"\nname = "add"\n'
    change = {"v": 1, "id": "a1", "args": {"model": "add", "bundle": second.name}}
    with publishing(tmp_path, broker, "", models) as agent:
        (birth,) = hearing.until(is_online)
        before = birth.body["models"][0]["version"]
        hearing.send(f"{DEVICE}/admin/cmd/activate", change)
        after = answered(hearing, "a1", "done").body["result"]["version"]
        assert after != before
        hearing.until(of("event/1", "/activate"))
        hearing.until(lambda heard: is_online(heard) and heard.body["models"][0]["version"] == after)
        hearing.send(f"{DEVICE}/admin/cmd/rollback", {"v": 1, "id": "r1", "args": {"model": "add"}})
        assert answered(hearing, "r1", "done").body["result"]["version"] == before
        hearing.send(f"{DEVICE}/admin/cmd/activate", change)
        repeated = hearing.until(lambda heard: of("response/1")(heard) and heard.body.get("repeated") is True)
        assert repeated[0].body["result"]["version"] == after
        missing = {"v": 1, "id": "a2", "args": {"model": "add", "bundle": "none.tfb"}}
        hearing.send(f"{DEVICE}/admin/cmd/activate", missing)
        assert answered(hearing, "a2", "failed").body["reason"] == "unknown_model"
        agent.stop(signal.SIGKILL)
    with publishing(tmp_path, broker, "", models) as agent:
        hearing.send(f"{DEVICE}/admin/cmd/activate", change)
        hearing.until(lambda heard: of("response/1")(heard) and heard.body.get("repeated") is True, 2)
        assert json.loads(agent.request("/v2/models/add")[1])["versions"] == [before]
        assert agent.stop() == 0
    check_schemas(hearing.heard)


def test_measurements_without_acknowledgement(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    """Where that is wanted; all else is acknowledged."""
    with publishing(tmp_path, broker, f"qos = 0\n{RESULTS}") as agent:
        assert agent.post(asked(7))[0] == 200
        assert {each.qos for each in hearing.until(of("result/1"))} == {0}
        assert {each.qos for each in hearing.until(of("event/1"))} == {1}
        assert {each.qos for each in hearing.until(is_online)} == {1}
        until(lambda: agent.metric("tightfit_mqtt_delivered_total", **{"class": "m"}) >= 1)
        assert conserved(agent)
        assert agent.stop() == 0


@pytest.mark.parametrize(("encoding", "protocol"), [("json", "3.1.1"), ("cbor", "5"), ("cbor", "3.1.1")])
def test_other_forms(tmp_path: Path, broker: Mosquitto, hearing: Operator, encoding: str, protocol: str) -> None:
    """Under 3.1.1 what properties say stands in the payload, and commands have it in theirs."""
    with publishing(tmp_path, broker, f'encoding = "{encoding}"\nprotocol = "{protocol}"\n{RESULTS}') as agent:
        assert agent.post(asked(7))[0] == 200
        (heard,) = hearing.until(lambda heard: heard.topic.endswith("/m/result"))
        payload = decoded(heard, encoding)
        assert payload["body"]["outputs"][0]["data"][0] == 7
        said = payload["mqtt"] if protocol == "3.1.1" else heard.user
        assert (said["schema"], int(said["seq"])) == ("result/1", 0)
        reply = f"{DEVICE}/x/res/y"
        ping = {"v": 1, "id": "p", "response_topic": reply, "correlation": "abc"}
        hearing.send(f"{DEVICE}/observe/cmd/ping", ping)
        pong = decoded(hearing.until(lambda heard: heard.topic == reply, 2)[1], encoding)
        assert pong["body"]["state"] == "done"
        if protocol == "3.1.1":
            assert base64.b64decode(pong["mqtt"]["correlation"]) == b"abc"
        assert agent.stop() == 0


def decoded(heard: Heard, encoding: str) -> dict[str, Any]:
    found: dict[str, Any] = heard.json if encoding == "json" else cbor2.loads(heard.payload)
    return found


def test_results_that_differ_and_large_ones(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    """By reference, where what is referred to is what the agent gives."""
    more = '[[mqtt.results]]\nmodel = "add"\nwhen = "change"\nby = 1.0\nmost_per_s = 0\ninline_bytes = 16\n'
    with publishing(tmp_path, broker, more) as agent:
        for number in (0, 0, 1, 2, 2, 5):
            assert agent.post(asked(number))[0] == 200
        results = hearing.until(of("result/1"), 3)
        assert [each.body["id"] for each in results] == ["0", "2", "5"]
        assert [each.body.get("withheld", {}).get("rule", 0) for each in results] == [0, 2, 1]
        ref = results[1].body["outputs"][0]["ref"]
        assert ref["bytes"] == 32
        assert ref["sha256"] == hashlib.sha256(np.array([2] + [0] * 7, np.float32).tobytes()).hexdigest()
        with urllib.request.urlopen(agent.url + ref["href"], timeout=60) as answer:  # noqa: S310
            assert json.loads(answer.readline())["id"] == "2"
        assert agent.stop() == 0


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ('[[mqtt.results]]\nmodel = "sub"\n', "there is no such model"),
        ('[[mqtt.results]]\nmodel = "add"\noutput = "z"\n', "has no output 'z'"),
        ('ca = "nowhere.pem"\n', "mqtts://"),
        ("[mqtt.keep.m]\nmib = 0.01\n", "cannot be kept"),
    ],
)
def test_configurations_that_cannot_be_meant(tmp_path: Path, broker: Mosquitto, more: str, error: str) -> None:
    """One line, and the agent does not start."""
    code, _, said = run_agent("serve", "--config", str(configured(tmp_path, broker, more)), "--port", "0")
    assert code != 0
    last = said.strip().splitlines()[-1]
    assert error in last
    assert "Traceback" not in said


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    """A board that answers is worth more than one that tells of it."""
    (tmp_path / "spool").write_text("in the way", encoding="ascii")
    with publishing(tmp_path, broker) as agent:
        assert agent.post(asked(1))[0] == 200
        assert "the log cannot be opened" in agent.log
        assert agent.stop() == 0


def test_each_device_in_its_own_subtree(tmp_path: Path) -> None:
    """Over TLS, with a certificate that names the device, and an access list that lets it write nowhere else."""
    with fleet(tmp_path / "broker") as secured:
        pair = secured.device("car-1")
        shown = f'ca = "{secured.authority.own.certificate}"\ncertificate = "{pair.certificate}"\nkey = "{pair.key}"\n'
        path = configured(tmp_path, secured.broker, shown + RESULTS)
        path.write_text(path.read_text("utf-8").replace(secured.broker.url, secured.broker.secure_url), "utf-8")
        with (
            Subscriber(secured.broker, "edge/v1/car-1/+/m/#") as heard,
            serving(None, tmp_path / "log", "--config", str(path)) as agent,
        ):
            assert agent.post(asked(4))[0] == 200
            until(lambda: any("/model-add/m/result " in line for line in heard.lines))
            until(lambda: any("/device/m/device " in line for line in heard.lines))
            (line, *_) = [line for line in heard.lines if "/device/m/device " in line]
            body = json.loads(line.split(" ", 1)[1])["body"]
            assert body["broker_certificate_days_left"] > 0
            secured.broker.publish(f"{DEVICE}/observe/cmd/ping", '{"v": 1, "id": "p"}')
            until(lambda: agent.metric("tightfit_mqtt_commands_total", outcome="run") == 1)
            assert agent.stop() == 0
        assert '"status":"offline"' in secured.broker.retained(BIRTH)


def test_alarms_and_events(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    """An alarm once, however often its reading is taken; and an engine that dies."""
    with publishing(tmp_path, broker, "[mqtt.limits]\nstorage_free_mib = 1e12\nmemory = 0.001\n") as agent:
        for name in ("storage_free", "memory"):
            (alarm,) = hearing.until(of("alarm/1", f"/a/{name}"))
            assert alarm.body["raised"] is True
        assert alarm.body["value"] > alarm.body["limit"]
        hearing.until(of("device/1"), 3)
        os.kill(agent.engine_pid, signal.SIGKILL)
        (down,) = hearing.until(of("event/1", "/engine_down"))
        assert (down.body["model"], down.body["details"]["starts_again"]) == ("add", True)
        (up,) = hearing.until(of("event/1", "/engine_up"))
        assert up.body["details"]["restarts"] == 1
        hearing.until(
            lambda heard: of("latency/1", "/model-add/m/latency")(heard) and heard.body["engine_restarts"] == 1
        )
        assert len(hearing.found(of("alarm/1"))) == 2
        assert agent.stop() == 0
    check_schemas(hearing.heard)


def test_home_assistant_is_told_and_told_again(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    """What a document refers to is what comes there."""
    topic = "homeassistant/sensor/car-1/add_p99/config"
    with publishing(tmp_path, broker, 'home_assistant = "homeassistant"\n') as agent:
        assert agent.post(asked(1))[0] == 200
        (document,) = hearing.until(lambda heard: heard.topic == topic)
        state = document.json["state_topic"]
        hearing.until(lambda heard: heard.topic == state and heard.body["total"].get("p99_ms", 0) > 0)
        (online,) = hearing.until(lambda heard: heard.topic == "homeassistant/binary_sensor/car-1/online/config")
        assert online.json["availability_topic"] == BIRTH
        hearing.send("homeassistant/status", b"online")
        hearing.until(lambda heard: heard.topic == topic, 2)
        assert agent.stop() == 0


def test_a_node_of_sparkplug(tmp_path: Path, broker: Mosquitto, hearing: Operator) -> None:
    """Birth, data and rebirth; and after a kill the death that belongs to that birth."""
    begin = "spBv1.0/plant/{}/car-1"
    with publishing(tmp_path, broker, 'sparkplug = "plant"\n') as agent:
        (born,) = hearing.until(lambda heard: heard.topic == begin.format("NBIRTH"))
        birth = sparkplug.values(sparkplug.read(born.payload))
        assert birth["Models/add/State"] == "READY"
        assert agent.post(asked(1))[0] == 200
        hearing.until(
            lambda heard: (
                heard.topic == begin.format("NDATA")
                and sparkplug.values(sparkplug.read(heard.payload)).get("Agent/Answered") == 1
            )
        )
        hearing.send(begin.format("NCMD"), sparkplug.command("Node Control/Rebirth", True))
        births = hearing.until(
            lambda heard: (
                heard.topic == begin.format("NBIRTH")
                and sparkplug.values(sparkplug.read(heard.payload)).get("Agent/Answered") == 1
            )
        )
        agent.stop(signal.SIGKILL)
        (died,) = hearing.until(lambda heard: heard.topic == begin.format("NDEATH"))
        bdseq = sparkplug.values(sparkplug.read(births[-1].payload))["bdSeq"]
        assert sparkplug.values(sparkplug.read(died.payload)) == {"bdSeq": bdseq}
    # From each birth on numbers have no gap.
    found = [
        sparkplug.read(each.payload) for each in hearing.heard if "/NBIRTH/" in each.topic or "/NDATA/" in each.topic
    ]
    before = 0
    for each in found:
        assert each.seq in (0, (before + 1) % 256)
        before = each.seq
