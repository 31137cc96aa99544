"""The configuration: strict, with a hint for every slip."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agent.config import SECTIONS, CallerOptions, Config, ModelOptions, Tcp, load_config, tomllib
from agent.errors import ConfigError

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'bundle = "a.tfb"\n[http]\nport = 1\nhost = "127.0.0.2"\n')
    config = load_config(path, {"": {"bundle": "b.tfb"}, "http": {"port": 2, "host": None}})
    assert (config.bundle, config.http.port, config.http.host) == ("b.tfb", 2, "127.0.0.2")


def test_addresses(tmp_path: Path) -> None:
    listen = 'listen = ["127.0.0.1:80", "[::1]:81", "http://localhost:0", "unix:/run/a b.sock"]'
    path = write(tmp_path, f'bundle = "a"\n[http]\n{listen}\n')
    every = (Tcp("127.0.0.1", 80), Tcp("::1", 81), Tcp("localhost", 0, "http"), Path("/run/a b.sock"))
    assert load_config(path, {}).http.addresses == every
    assert load_config(path, {"http": {"port": 2}}).http.addresses == (Tcp("127.0.0.1", 2),)
    with pytest.raises(ConfigError, match="both listen and host or port"):
        load_config(write(tmp_path, f'bundle = "a"\n[http]\nport = 1\n{listen}\n'), {})
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0 can be reached"):
        load_config(write(tmp_path, 'bundle = "a"\n[http]\nlisten = ["127.0.0.1:1", "0.0.0.0:1"]\n'), {})


@pytest.mark.parametrize(
    "address", ["", "80", ":80", "::1:80", "[::1]", "h:", "h:65536", "unix:", "unix:a", "/run/a", "tls://h:1"]
)
def test_what_is_no_address(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="is no address to listen on: HOST:PORT"):
        load_config(write(tmp_path, f'bundle = "a"\n[http]\nlisten = ["{address}"]\n'), {})


def test_several_models(tmp_path: Path) -> None:
    path = write(tmp_path, '[[models]]\nbundle = "a.tfb"\n[[models]]\nbundle = "b.tfb"\nweight = 2.5\npriority = 7\n')
    assert load_config(path, {}).served == (ModelOptions("a.tfb"), ModelOptions("b.tfb", weight=2.5, priority=7))
    assert load_config(path, {"": {"bundle": "c.tfb"}}).served == (ModelOptions("c.tfb"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('bundle = "a"\nbundel = 1', "unknown field `bundel`.*did you mean 'bundle'"),
        ('bundle = "a"\n[http]\nprot = 1', r"unknown field `prot`.*did you mean 'port'"),
        ('bundle = "a"\n[http]\nport = "80"', "Expected `int`, got `str`.*http.port"),
        ('bundle = "a"\n[http]\nport = 65536', "Expected `int` <= 65535"),
        ('bundle = "a"\nhttp = 3', "Expected `object`"),
        ('bundle = "a"\n[requests]\ntimeout_s = 0', "timeout_s"),
        ('bundle = "a"\n[log]\nlevel = "loud"', "Invalid enum value 'loud'"),
        ('bundle = "a"\n[log]\nrequests = "some"', "Invalid enum value 'some'"),
        (
            'bundle = "a"\n[tracing]\nendpoint = "board:4318"',
            "'board:4318' is no URL of a collector: http://HOST:4318/",
        ),
        ('bundle = "a"\n[tracing]\nendpoint = "http://me:secret@h"', "give them as OTEL_EXPORTER_OTLP_HEADERS"),
        ('bundle = "a"\n[tracing]\nratio = 1.5', "Expected `float` <= 1.0"),
        ('bundle = "a', "not valid TOML"),
        ("", "no bundle to serve"),
        ('[[models]]\nbundle = "a"\n[[models]]\nbundel = "b"', "unknown field `bundel`.*did you mean 'bundle'"),
        ('[[models]]\nbundle = "a"\nname = "a/b"', "'a/b' cannot be a model's name"),
        ('[[models]]\nbundle = ""', "a model needs a bundle"),
        ('[[models]]\nbundle = "a"\npriority = 0', "Expected `int` >= 1"),
        ('bundle = "a"\n[[models]]\nbundle = "b"', "both bundle and"),
        ('bundle = "a"\n[repository]\ncontrl = true', "did you mean 'control'"),
        ('bundle = "a"\n[tls]\ncertificate = "a.pem"', "TLS needs both certificate and key"),
        ('bundle = "a"\n[tls]\nclient_ca = "a.pem"', "client_ca is for TLS"),
        ('bundle = "a"\n[tls]\ncertificate = "a"\nkey = "b"\ncrl = "c"', "certificates of clients need client_ca"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {"http": {"host": "127.0.0.1"}} if "http = 3" not in text else {})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*No such file"):
        load_config(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, {})
    (tmp_path / "latin.toml").write_bytes(b'bundle = "\xff"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "latin.toml", {})


def test_an_address_of_tls_needs_a_certificate(tmp_path: Path) -> None:
    listen = 'bundle = "a"\n[http]\nlisten = ["https://127.0.0.1:1"]\n'
    with pytest.raises(ConfigError, match=r"https://127\.0\.0\.1:1 needs a certificate"):
        load_config(write(tmp_path, listen), {})
    path = write(tmp_path, listen + '[tls]\ncertificate = "a.pem"\nkey = "a.key"\n')
    assert load_config(path, {}).http.addresses[0] == Tcp("127.0.0.1", 1, "https")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "board.local"])  # noqa: S104
def test_the_network_needs_consent(host: str) -> None:
    with pytest.raises(ConfigError, match=r"neither TLS nor authentication.*--insecure.*allow_insecure_network"):
        load_config(None, {"": {"bundle": "a"}, "http": {"host": host}})
    config = load_config(None, {"": {"bundle": "a"}, "http": {"host": host, "allow_insecure_network": True}})
    assert config.http.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert load_config(None, {"": {"bundle": "a"}, "http": {"host": host}}).http.host == host


def test_the_example_names_every_key_with_its_default() -> None:
    text = (ROOT / "systemd" / "agent.toml.example").read_text(encoding="utf-8")
    given = tomllib.loads("\n".join(line.removeprefix("#") for line in text.splitlines() if not line.startswith("# ")))
    defaults = Config(bundle=given["bundle"])
    (model,) = given["models"]
    assert msgspec.convert(given["callers"], list[CallerOptions]) == [CallerOptions("camera")]
    assert ModelOptions(**model) == ModelOptions(model["bundle"])
    for section, struct in SECTIONS.items():
        (keys,) = given[section] if isinstance(given[section], list) else [given[section]]
        assert set(keys) == set(struct.__struct_fields__), section
    assert load_config(ROOT / "systemd" / "agent.toml.example", {}) == defaults
