"""Topics: `<prefix>/v1/<device>/<component>/<class>/<name>`, and how a name becomes one level of them. Pure.

A level is ASCII: letters, digits and `-._~:@,=!` stand for themselves, each other byte of the name's UTF-8 is `%XX`.
So no level has a wildcard, a separator, a NUL, a control character or half a surrogate pair, and `unescape` gives the
name back. An empty name is `%` alone. What would be longer than LEVEL_BYTES is cut, and ends with `%~` and a digest.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import NamedTuple

from agent.mqtt.message import Kind

VERSION = "v1"
# Five levels of this and a prefix are far under the 65535 bytes of a topic (MQTT 5.0, section 1.5.4).
LEVEL_BYTES = 192
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~:@,=!")
_EMPTY, _CUT, _DIGEST = "%", "%~", 16
_LEVEL = re.compile(r"(?:[-.\w~:@,=!]|%[0-9A-F]{2})+", re.ASCII)


class Topic(NamedTuple):
    """What a topic says, names unescaped where they were not cut."""

    device: str
    component: str
    kind: Kind
    name: str


def escape(name: str) -> str:
    """The level for that name: the same one always, and another one for any other name."""
    data = name.encode("utf-8", "surrogatepass")
    if not data:
        return _EMPTY
    parts = [chr(each) if each in _PLAIN else f"%{each:02X}" for each in data[: LEVEL_BYTES + 1]]
    if len(data) == len(parts) and sum(map(len, parts)) <= LEVEL_BYTES:
        return "".join(parts)
    ends = itertools.accumulate(map(len, parts))
    kept = sum(1 for end in ends if end <= LEVEL_BYTES - len(_CUT) - _DIGEST)
    return f"{''.join(parts[:kept])}{_CUT}{hashlib.sha256(data).hexdigest()[:_DIGEST]}"


def unescape(level: str) -> str:
    """The name of that level. ValueError for what `escape` does not make, and for a name that was cut."""
    if level == _EMPTY:
        return ""
    if _CUT in level:
        raise ValueError(f"{level!r} is a name that was cut: what it was is in the device's birth")
    if not _LEVEL.fullmatch(level):
        raise ValueError(f"{level!r} is not a level: {level!r} has a character that would have been escaped")
    data = re.sub(rb"%(..)", lambda found: bytes.fromhex(found[1].decode()), level.encode("ascii"))
    return data.decode("utf-8", "surrogatepass")


def stream(component: str, kind: Kind, name: str) -> str:
    """The last three levels of a topic: what is numbered together, and in order."""
    return f"{escape(component)}/{kind.value}/{escape(name)}"


def topic(prefix: str, device: str, of: str) -> str:
    """The topic of a stream. `prefix` is the operator's, and may have several levels."""
    return f"{prefix}/{VERSION}/{escape(device)}/{of}"


def parse(prefix: str, text: str) -> Topic:
    """What a topic says; ValueError where it is none of ours."""
    start = f"{prefix}/{VERSION}/"
    levels = text[len(start) :].split("/") if text.startswith(start) else []
    if len(levels) != 4:
        raise ValueError(f"{text[:200]!r} is not {start}DEVICE/COMPONENT/CLASS/NAME")
    device, component, kind, name = levels
    return Topic(unescape(device), unescape(component), Kind(kind), unescape(name))
