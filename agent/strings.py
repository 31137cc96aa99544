"""BYTES tensors as they stand in the slab and on the wire: per element a little-endian u32 length, then the bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from targets.errors import ContractError

_LENGTH = struct.Struct("<I")
PREFIX_BYTES = _LENGTH.size


def pack_strings(items: Iterable[bytes]) -> bytes:
    """Length-prefixed form of the elements in row-major order."""
    return b"".join(part for item in items for part in (_LENGTH.pack(len(item)), item))


def unpack_strings(data: memoryview, count: int) -> list[bytes]:
    """The `count` elements; raises ContractError when lengths, count and bytes do not agree."""
    items: list[bytes] = []
    at, end = 0, len(data)
    while at < end:
        if len(items) == count:
            raise ContractError(f"BYTES data goes on after its {count} elements", "count x (u32 length + bytes)")
        if end - at < PREFIX_BYTES:
            raise ContractError("BYTES data ends within a length prefix", "each element is u32 length + bytes")
        (length,) = _LENGTH.unpack_from(data, at)
        at += PREFIX_BYTES
        if length > end - at:
            raise ContractError(f"BYTES element {len(items)} has length {length}, but {end - at} bytes are left")
        items.append(bytes(data[at : at + length]))
        at += length
    if len(items) != count:
        raise ContractError(f"BYTES data has {len(items)} elements, its shape needs {count}")
    return items
