"""Who we are to a broker, and which broker we trust: read from files anew for every connection."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from agent.access.files import located, read
from agent.access.tls import for_client
from agent.errors import ConfigError
from agent.mqtt.settings import Mqtt

# MQTT 5.0, section 3.1.3.6: binary data of two bytes of length.
_PASSWORD_BYTES = 0xFFFF


class Identity(NamedTuple):
    """What a connection needs beside an address."""

    context: ssl.SSLContext | None
    username: str
    password: str


def files_of(settings: Mqtt) -> list[Path]:
    """All that the section names."""
    return [located(each) for each in (settings.ca, settings.certificate, settings.key, settings.password) if each]


def identify(settings: Mqtt, tls: bool) -> Identity:
    """Raises ConfigError for what is not there, or cannot be used."""
    context = for_client(settings.ca, settings.certificate, settings.key, settings.minimum) if tls else None
    return Identity(context, settings.username, _password(settings.password))


def _password(where: str) -> str:
    if not where:
        return ""
    path = located(where)
    text = read(path, "the password for the broker")
    try:
        # An editor ends a file with a line's end.
        password = text.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"the password for the broker in {path} is not UTF-8") from None
    if not password or len(text) > _PASSWORD_BYTES or "\n" in password:
        raise ConfigError(f"{path} holds no password for the broker: one line, at most {_PASSWORD_BYTES} bytes")
    return password
