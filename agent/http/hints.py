"""What a request's head says of its urgency, before any of its body is read: who waits for a slot is ordered by it.

`Priority: u=0..7` is RFC 9218's: what is malformed, unknown or out of range there is ignored, as its section 4 has it.
`Request-Timeout-Ms: 250` is ours, and what is not a whole number is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import CIMultiDictProxy

from agent.errors import Reason, RefusedError
from agent.scheduling.queue import LOWEST

TIMEOUT = "Request-Timeout-Ms"
_MOST_MS = 10**12

# Dictionaries of RFC 8941, section 3.2. No two alternatives begin alike, so matching takes linear time.
_KEY = r"[a-z*][a-z0-9_\-.*]*"
_BARE = (
    r"(?:-?\d{1,12}\.\d{1,3}|-?\d{1,15}|\"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\[\"\\])*\""
    r"|[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*|:[A-Za-z0-9+/=]*:|\?[01])"
)
_PARAMETERS = rf"(?:;\x20*{_KEY}(?:={_BARE})?)*"
_ITEM = rf"{_BARE}{_PARAMETERS}"
_LIST = rf"\(\x20*(?:{_ITEM}(?:\x20+{_ITEM})*)?\x20*\){_PARAMETERS}"
_MEMBER = re.compile(rf"({_KEY})(?:=(?:({_BARE}){_PARAMETERS}|{_LIST})|{_PARAMETERS})", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,15}", re.ASCII)
_COMMA = re.compile(r"[ \t]*,[ \t]*")


def priority_of(headers: CIMultiDictProxy[str]) -> int:
    """1 (the highest) to 255 by the urgency that the client names; 0, the model's default, where it names none.

    Urgency 3 is both the RFC's default and 128, the middle.
    """
    urgency = dictionary(", ".join(headers.getall("Priority", []))).get("u", "")
    if not _INTEGER.fullmatch(urgency) or not 0 <= int(urgency) <= 7:
        return 0
    return min(32 * (int(urgency) + 1), LOWEST)


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Seconds from a request's arrival to its deadline, where its head says so. Raises RefusedError."""
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= _MOST_MS):
        raise RefusedError(
            Reason.BAD_REQUEST, f"{TIMEOUT} is {text[:40]!r}", "it must be a whole number of milliseconds, 1 or more"
        )
    return int(text) / 1e3


def dictionary(text: str) -> dict[str, str]:
    """Names and bare items of a structured dictionary (RFC 8941); empty when any of it is malformed.

    A member without a value, or whose value is a list, has an empty one here. Of one that comes twice the last counts.
    """
    members: dict[str, str] = {}
    text = text.strip(" ")
    at = 0
    while match := _MEMBER.match(text, at):
        members[match[1]] = match[2] or ""
        at = match.end()
        if at == len(text):
            return members
        comma = _COMMA.match(text, at)
        if comma is None:
            break
        at = comma.end()
    return {}
