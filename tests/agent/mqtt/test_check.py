from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.mqtt.check import Report, Step, as_text, check
from tests.support import mqtt_packets as packets
from tests.support.agents import run_agent
from tests.support.brokers import Fleet, fleet, free_port, mosquitto
from tests.support.certificates import Authority, Pair
from tests.support.fake_broker import fake_broker
from tests.support.links import settings


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet")) as one:
        yield one


def checked(*brokers: str, **more: Any) -> Report:
    (report,) = check(settings(*brokers, connect_s=5.0, **more), most_s=5.0)
    return report


def failure(report: Report) -> Step:
    (failed,) = [step for step in report.steps if step.state == "failed"]
    return failed


def secure(made: Fleet, pair: Pair, **more: Any) -> Report:
    files = {"ca": str(made.authority.own.certificate), "certificate": str(pair.certificate), "key": str(pair.key)}
    return checked(made.broker.secure_url, **{**files, **more})


def test_all_is_well(made: Fleet) -> None:
    report = secure(made, made.device("d1"))
    assert report.is_well, as_text([report])
    assert [step.name for step in report.steps] == [
        "clock", "identity", "dns", "tcp", "tls", "login", "limits", "publish", "subscribe",
    ]  # fmt: skip
    assert {step.state for step in report.steps} == {"ok"}, as_text([report])


def test_a_name_that_nobody_has() -> None:
    failed = failure(checked("mqtts://no-such-broker.invalid"))
    assert failed.name == "dns"
    assert "no-such-broker.invalid" in failed.text


def test_a_port_where_nobody_listens() -> None:
    port = free_port()
    failed = failure(checked(f"mqtt://127.0.0.1:{port}"))
    assert (failed.name, failed.text) == ("tcp", f"127.0.0.1 port {port}: Connection refused")


def test_tls_where_there_is_none() -> None:
    with fake_broker() as broker:
        failed = failure(checked(f"mqtts://localhost:{broker.port}"))
        assert failed.name == "tls"
        assert "mqtt://" in failed.hint


def test_no_tls_where_there_is_some(made: Fleet) -> None:
    failed = failure(checked(f"mqtt://127.0.0.1:{made.broker.port}"))
    assert failed.name == "login"
    assert "with TLS where it is mqtts" in failed.hint


@pytest.mark.parametrize(
    ("dates", "words", "hint"),
    [
        ({"ends": "20210101000000Z"}, "certificate has expired", "this machine's clock is wrong: it says 20"),
        ({"begins": "20890101000000Z"}, "certificate is not yet valid", "clock right? It says 20"),
    ],
)
def test_a_broker_with_a_certificate_of_another_time(
    tmp_path: Path, dates: dict[str, str], words: str, hint: str
) -> None:
    authority = Authority(tmp_path / "another")
    server = authority.server(**dates)
    with fleet(tmp_path / "fleet", server=server) as one:
        failed = failure(checked(one.broker.secure_url, ca=str(authority.own.certificate)))
        assert failed.name == "tls"
        assert words in failed.text
        assert hint in failed.hint


def test_a_broker_of_a_foreign_authority(made: Fleet, tmp_path: Path) -> None:
    foreign = Authority(tmp_path / "foreign", "somebody else")
    failed = failure(secure(made, made.device("d1"), ca=str(foreign.own.certificate)))
    assert failed.name == "tls"
    assert "as ca under [mqtt]" in failed.hint


def test_a_broker_of_another_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "another")
    with fleet(tmp_path / "fleet", server=authority.issue("b", "DNS:b.example")) as one:
        failed = failure(checked(one.broker.secure_url, ca=str(authority.own.certificate)))
        assert failed.name == "tls"
        assert "have it name localhost" in failed.hint


def test_our_own_certificate_expired(made: Fleet) -> None:
    report = secure(made, made.device("d1", ends="20210101000000Z"))
    first = next(step for step in report.steps if step.state == "failed")
    assert first.name == "identity"
    assert "certificate has expired" in first.text
    assert "clock" in first.hint


def test_our_own_certificate_is_of_nobody_whom_the_broker_knows(made: Fleet, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "foreign", "somebody else").issue("d1")
    failed = failure(secure(made, stranger))
    assert failed.name in ("identity", "login")
    assert failed.hint


def test_a_certificate_of_another_device_may_not_speak_for_this_one(made: Fleet) -> None:
    report = secure(made, made.device("d2"))
    states = {step.name: step.state for step in report.steps}
    assert (states["identity"], states["login"], states["publish"]) == ("warning", "ok", "failed")
    publish = next(step for step in report.steps if step.name == "publish")
    assert "not_authorized (0x87)" in publish.text
    assert "ACL" in publish.hint


def test_no_certificate_where_the_broker_wants_one(made: Fleet) -> None:
    report = checked(made.broker.secure_url, ca=str(made.authority.own.certificate))
    assert not report.is_well
    assert "certificate" in failure(report).hint


def test_a_login_that_is_refused() -> None:
    with fake_broker() as broker:
        broker.refusals = [packets.connack(0x86, reason="no \x1b[31msuch user")]
        report = checked(broker.url)
        failed = failure(report)
        assert failed.name == "login"
        assert "(0x86)" in failed.text
        assert "username" in failed.hint
        assert "\x1b" not in as_text([report])


def test_a_subscription_that_is_refused() -> None:
    with fake_broker() as broker:
        broker.subscriptions_code = 0x87
        failed = failure(checked(broker.url))
        assert (failed.name, "0x87" in failed.text) == ("subscribe", True)


def test_a_broker_that_acknowledges_nothing() -> None:
    with fake_broker() as broker:
        broker.acknowledges = False
        (report,) = check(settings(broker.url), most_s=0.5)
        failed = failure(report)
        assert (failed.name, "does not acknowledge" in failed.text) == ("publish", True)


def test_limits_that_matter_are_told() -> None:
    with fake_broker({"maximum_packet": 256, "receive_maximum": 5, "retain_available": 0}) as broker:
        report = checked(broker.url)
        limits = next(step for step in report.steps if step.name == "limits")
        assert limits.state == "warning"
        assert "at most 256 bytes" in limits.text
        assert "message_kib" in limits.hint
        assert report.is_well


def test_a_broker_of_3_1_1_alone() -> None:
    with fake_broker() as broker:
        broker.refusals = [packets.connack(1, protocol=4)]
        report = checked(broker.url)
        assert report.is_well, as_text([report])
        assert "MQTT 3.1.1" in next(step.text for step in report.steps if step.name == "login")
        broker.refusals = [packets.connack(1, protocol=4)]
        assert "3.1.1" in failure(checked(broker.url, protocol="5")).hint


def written(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "agent.toml"
    file.write_text("\n".join(['bundle = "/none.tfb"', "[mqtt]", *lines]), encoding="utf-8")
    return str(file)


def test_the_command_says_it_for_people_and_for_programs(tmp_path: Path) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        config = written(tmp_path, f'brokers = ["{broker.url}"]', 'device = "d1"')
        code, out, err = run_agent("mqtt", "check", "--config", config)
        assert (code, err) == (0, "")
        assert out.startswith(f"{broker.url}\n  ok       clock")
        code, out, err = run_agent("mqtt", "check", "--config", config, "--json")
        found = json.loads(out)
        assert (code, found["ok"], found["brokers"][0]["broker"]) == (0, True, broker.url)
    code, out, err = run_agent("mqtt", "check", "--config", config, "--json")
    assert (code, json.loads(out)["ok"], err) == (1, False, "")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no brokers under [mqtt]"),
        (['brokers = ["b.example"]'], "is no broker: mqtts://HOST:PORT"),
        (['brokers = ["mqtt://b.example"]'], "without TLS over a network"),
        (['broker = "mqtts://b"'], "did you mean 'brokers'"),
    ],
)
def test_a_configuration_that_is_not_valid_is_one_line(tmp_path: Path, lines: list[str], words: str) -> None:
    code, out, err = run_agent("mqtt", "check", "--config", written(tmp_path, *lines))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
