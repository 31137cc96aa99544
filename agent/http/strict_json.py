"""JSON that any two readers read alike: what RFC 8259 leaves open, and readers differ in, is refused. Pure.

msgspec refuses NaN, infinity, what a float cannot hold, anything behind the value, and bytes that are not UTF-8. What
it lets through is refused here: a key given twice, and integers past 64 bits. And what it says of a byte order mark,
of UTF-16 and of deep nesting would help nobody.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from targets.errors import ContractError

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_MOST_DIGITS = 20


def decode(data: bytes, kind: Any, what: str, hint: str = "") -> Any:
    """A small body as `kind`. Raises ContractError that begins with "not a valid `what`"."""
    try:
        value = msgspec.json.decode(data, type=kind)
        check(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid(what, data, error, hint) from None
    return value


def check(data: bytes) -> None:
    """Raise ValueError for valid JSON that has a key twice in one object, or an integer past 64 bits."""
    _decoder.decode(str(data, "utf-8"))


def check_integers(values: Iterable[Any]) -> None:
    """Raise ValueError for an integer past 64 bits among values."""
    for value in values:
        if type(value) is int and not _LEAST <= value <= _MOST:
            raise _too_large()


def invalid(what: str, data: bytes, error: Exception, hint: str = "") -> ContractError:
    """What is said of data that cannot be read, for that reason."""
    if data.startswith(b"\xef\xbb\xbf"):
        return ContractError(f"not a valid {what}: it begins with a byte order mark", "send UTF-8 without one")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:4]:
        return ContractError(f"not a valid {what}: it is UTF-16 or UTF-32", "send UTF-8")
    if isinstance(error, RecursionError):
        return ContractError(f"not a valid {what}: the JSON is nested too deeply", "data needs one level per dimension")
    return ContractError(f"not a valid {what}: {error}", hint)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is given twice in one object")
    return fields


def _whole(text: str) -> int:
    # A number of many digits takes its square to read.
    if len(text) > _MOST_DIGITS or not _LEAST <= int(text) <= _MOST:
        raise _too_large()
    return int(text)


def _too_large() -> ValueError:
    return ValueError("an integer has more than 64 bits")


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_whole)
