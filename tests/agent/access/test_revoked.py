"""Revocation lists and certificates as openssl makes them."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.access.revoked import identity_of, revoked_in
from tests.support.certificates import Authority, Pair


def identity(pair: Pair) -> tuple[bytes, bytes]:
    return identity_of(ssl.PEM_cert_to_DER_cert(pair.certificate.read_text()))


def test_who_is_on_the_list(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "another")
    pairs = [authority.issue(f"{at}.vehicle") for at in range(3)]
    assert revoked_in(authority.revoked().read_bytes()) == frozenset()
    authority.revoke(pairs[0])
    text = authority.revoke(pairs[2]).read_bytes()
    assert revoked_in(text) == {identity(pairs[0]), identity(pairs[2])}
    strange = other.issue("0.vehicle")
    both = text + b"text between\n" + other.revoke(strange).read_bytes()
    assert revoked_in(both) == {identity(pairs[0]), identity(pairs[2]), identity(strange)}


def test_a_number_is_of_its_issuer(tmp_path: Path) -> None:
    """Two authorities may have given the same."""
    pairs = []
    for name in ("one", "two"):
        pair = Pair(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
             f"/CN={name}", "-set_serial", "7", "-keyout", pair.key, "-out", pair.certificate],
            check=True, capture_output=True,
        )  # fmt: skip
        pairs.append(pair)
    (one, first), (two, second) = map(identity, pairs)
    assert (first, second) == (b"\x02\x01\x07", b"\x02\x01\x07")
    assert one != two


@given(st.binary(max_size=200))
def test_what_is_neither(data: bytes) -> None:
    try:
        issuer, serial = identity_of(data)
    except ValueError:
        return
    assert (issuer[0], serial[0]) == (0x30, 0x02)


@pytest.mark.parametrize("text", ["", "MAA=", "MAIwAA==", "MAQwAgUA", "!"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        revoked_in(f"-----BEGIN X509 CRL-----\n{text}\n-----END X509 CRL-----\n".encode())
