"""Which certificates a revocation list names, and whether one is among them. Pure.

A handshake asks OpenSSL. Whoever is connected already has no more of them, so that it is asked here: certificates and
lists are read as far as issuer and serial number, which say together which certificate is meant (RFC 5280, sections
4.1.2.2 and 5.1). All that is read has passed OpenSSL.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator

Identity = tuple[bytes, bytes]
"""A certificate's issuer and its serial number, as they are encoded."""

_LIST = re.compile(rb"-----BEGIN X509 CRL-----(.*?)-----END X509 CRL-----", re.DOTALL)
_INTEGER, _SEQUENCE, _TIMES, _VERSION = 0x02, 0x30, (0x17, 0x18), 0xA0


def revoked_in(lists: bytes) -> frozenset[Identity]:
    """All that lists in PEM form name. Raises ValueError for what is none."""
    return frozenset(each for found in _LIST.findall(lists) for each in _named(binascii.a2b_base64(found)))


def identity_of(certificate: bytes) -> Identity:
    """Of a certificate in DER form. Raises ValueError for what is none."""
    fields = [(tag, raw) for tag, _, raw in _elements(_signed(certificate)) if tag != _VERSION]
    (serial_tag, serial), _, (issuer_tag, issuer) = fields[:3]
    if (serial_tag, issuer_tag) != (_INTEGER, _SEQUENCE):
        raise ValueError("no certificate")
    return issuer, serial


def _named(data: bytes) -> Iterator[Identity]:
    """version, where there is one; signature, issuer, this and perhaps the next update; certificates, if any."""
    fields = [field for field in _elements(_signed(data)) if field[0] != _INTEGER]
    if len(fields) < 3 or fields[1][0] != _SEQUENCE:
        raise ValueError("no revocation list")
    issuer = fields[1][2]
    behind = [field for field in fields[2:] if field[0] not in _TIMES]
    if behind and behind[0][0] == _SEQUENCE:
        for _, entry, _ in _elements(behind[0][1]):
            _, _, serial = next(_elements(entry), (0, b"", b""))
            yield issuer, serial


def _signed(data: bytes) -> bytes:
    """What the signature is of: the first within the first."""
    _, whole, _ = next(_elements(data), (0, b"", b""))
    _, signed, _ = next(_elements(whole), (0, b"", b""))
    return signed


def _elements(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Tag, content, and both with the length between them, of each element (X.690, section 8.1)."""
    at = 0
    while at < len(data):
        begin, length, at = at, data[at + 1] if at + 1 < len(data) else len(data), at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(data[at : at + count], "big"), at + count
        if at + length > len(data):
            raise ValueError("it ends too early")
        yield data[begin], data[at : at + length], data[begin : at + length]
        at += length
