from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import load_config
from agent.errors import ConfigError
from agent.mqtt.brokers import Broker
from agent.mqtt.identity import identify
from agent.mqtt.settings import Mqtt
from tests.support.certificates import Authority


def loaded(tmp_path: Path, text: str) -> Mqtt:
    file = tmp_path / "agent.toml"
    file.write_text(f'bundle = "/none.tfb"\n[mqtt]\n{text}\n', encoding="utf-8")
    return load_config(file, {}).mqtt


def test_without_brokers_it_is_off(tmp_path: Path) -> None:
    assert not loaded(tmp_path, "").is_on


def test_brokers_in_order_and_the_names_that_follow(tmp_path: Path) -> None:
    found = loaded(tmp_path, 'brokers = ["mqtts://b.example", "mqtt://[::1]:1884"]\ndevice = "cart-7"')
    assert found.addresses == (Broker("b.example", 8883, True), Broker("::1", 1884, False))
    assert (found.client_name, found.command_filter) == ("cart-7-agent", "edge/v1/cart-7/+/cmd/#")


def test_a_device_without_a_name_has_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Gerät/7+")
    assert Mqtt().device_name == "Ger-t-7"
    monkeypatch.setattr("socket.gethostname", lambda: "é")
    assert Mqtt().device_name == "device"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('brokers = ["b.example:1883"]', "'b.example:1883' is no broker: mqtts://HOST:PORT"),
        ('brokers = ["mqtt://10.0.0.1"]', "broker mqtt://10.0.0.1:1883 would be spoken to without TLS over a network"),
        ('brokers = ["mqtts://b", "mqtts://b"]', "named twice"),
        ('prefix = "a/+"', "prefix 'a/+' cannot begin topics"),
        ('device = "a/b"', "device 'a/b' cannot be in a topic"),
        ('device = "\\u0000"', "cannot be in a topic"),
        ('client_id = "a b"', "client_id 'a b' is none"),
        ('certificate = "/c.pem"', "needs both certificate and key"),
        ('password = "/p"', "needs username"),
        ('brokers = ["mqtt://127.0.0.1"]\nca = "/ca.pem"', "for TLS, which none of the brokers has"),
        ("keepalive_s = 4", "keepalive_s"),
        ("window = 0", "window"),
        ("first_wait_s = 10.0\nmost_wait_s = 5.0", "first_wait_s is more than most_wait_s"),
        ('protocol = "3.1"', "3.1"),
        ("windows = 3", "did you mean 'window'"),
    ],
)
def test_what_is_not_valid_is_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        loaded(tmp_path, text)
    assert words in str(found.value)
    assert "\n" not in str(found.value)


def test_a_network_without_tls_has_to_be_asked_for(tmp_path: Path) -> None:
    assert loaded(tmp_path, 'brokers = ["mqtt://10.0.0.1"]\nallow_insecure_network = true').is_on
    assert loaded(tmp_path, 'brokers = ["mqtt://localhost", "mqtt://127.9.0.1"]').is_on


def test_files_are_read_when_they_are_needed(tmp_path: Path) -> None:
    password = tmp_path / "password"
    mqtt = Mqtt(("mqtt://127.0.0.1",), username="d1", password=str(password))
    with pytest.raises(ConfigError, match="is not there"):
        identify(mqtt, tls=False)
    password.write_bytes(b"secret\r\n")
    assert identify(mqtt, tls=False) == (None, "d1", "secret")
    for bad in (b"", b"\n", b"two\nlines", b"\xff", b"x" * 70_000):
        password.write_bytes(bad)
        with pytest.raises(ConfigError) as found:
            identify(mqtt, tls=False)
        assert "secret" not in str(found.value)


def test_what_trusts_and_shows_is_checked(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    pair, other = authority.issue("d1"), authority.issue("d2")
    good = {"ca": str(authority.own.certificate), "certificate": str(pair.certificate), "key": str(pair.key)}
    context = identify(Mqtt(("mqtts://b",), **good), tls=True).context  # type: ignore[arg-type]
    assert context is not None
    assert context.check_hostname
    for change, words in (
        ({"ca": str(pair.key)}, "holds no certificate in PEM form"),
        ({"key": str(other.key)}, "is not that of the certificate"),
        ({"certificate": str(tmp_path / "none")}, "is not there"),
    ):
        with pytest.raises(ConfigError, match=words):
            identify(Mqtt(("mqtts://b",), **{**good, **change}), tls=True)  # type: ignore[arg-type]
