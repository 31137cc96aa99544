"""Certificates as files: what is wrong with them is said in one line, before anybody connects."""

from __future__ import annotations

import hashlib
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.access.files import located
from agent.access.tls import names_of, secured
from agent.config import Tls
from agent.errors import ConfigError
from tests.support.certificates import Authority, Pair, openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.server()


def tls_of(pair: Pair, **more: str) -> Tls:
    return Tls(str(pair.certificate), str(pair.key), **more)  # type: ignore[arg-type]


def test_what_is_shown(pair: Pair) -> None:
    made = secured(tls_of(pair))
    der = ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())
    assert made.certificate.names == ("DNS:localhost", "CN:agent")
    assert made.certificate.expires == ssl.cert_time_to_seconds("Jan  1 00:00:00 2090 GMT")
    assert made.certificate.sha256 == hashlib.sha256(der).hexdigest()
    assert made.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert made.context.verify_mode is ssl.CERT_NONE
    assert secured(tls_of(pair, minimum="1.3")).context.minimum_version is ssl.TLSVersion.TLSv1_3


def test_a_certificate_of_tomorrow_is_taken_for_a_wrong_clock(authority: Authority) -> None:
    assert secured(tls_of(authority.server(begins="20800101000000Z"))).certificate.early


def expired(authority: Authority, good: Pair, folder: Path) -> Pair:
    return authority.server(ends="20210101000000Z")


def swapped(authority: Authority, good: Pair, folder: Path) -> Pair:
    return Pair(good.certificate, authority.own.key)


def reversed_(authority: Authority, good: Pair, folder: Path) -> Pair:
    return Pair(good.key, good.certificate)


def no_key(authority: Authority, good: Pair, folder: Path) -> Pair:
    return Pair(good.certificate, good.certificate)


def not_there(authority: Authority, good: Pair, folder: Path) -> Pair:
    return Pair(folder / "none.pem", good.key)


def a_folder(authority: Authority, good: Pair, folder: Path) -> Pair:
    return Pair(good.certificate, folder)


def cut(authority: Authority, good: Pair, folder: Path) -> Pair:
    (folder / "cut.pem").write_bytes(good.certificate.read_bytes()[:300])
    return Pair(folder / "cut.pem", good.key)


def damaged(authority: Authority, good: Pair, folder: Path) -> Pair:
    lines = good.certificate.read_text().splitlines(keepends=True)
    (folder / "damaged.pem").write_text("".join([lines[0], "A" * 64 + "\n", *lines[2:]]))
    return Pair(folder / "damaged.pem", good.key)


def locked(authority: Authority, good: Pair, folder: Path) -> Pair:
    openssl("pkey", "-in", good.key, "-aes256", "-passout", "pass:secret", "-out", folder / "locked.key")
    return Pair(good.certificate, folder / "locked.key")


def for_clients_alone(authority: Authority, good: Pair, folder: Path) -> Pair:
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x", "-keyout",
        folder / "c.key", "-out", folder / "c.pem", "-addext", "extendedKeyUsage=clientAuth",
    )  # fmt: skip
    return Pair(folder / "c.pem", folder / "c.key")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (expired, r"the certificate \S+\.pem: certificate has expired"),
        (swapped, r"the key \S+ca\.key is not that of the certificate"),
        (reversed_, "holds none in PEM form"),
        (no_key, r"the key \S+ is none in PEM form"),
        (not_there, r"the certificate \S+none\.pem is not there"),
        (a_folder, r"the key \S+ is no file"),
        (cut, "holds none in PEM form"),
        (damaged, r"certificate \S+damaged\.pem with key"),
        (locked, "needs a password, which nobody is there to give"),
        (for_clients_alone, "purpose"),
    ],
)
def test_what_cannot_be_used(
    authority: Authority, pair: Pair, tmp_path: Path, make: Callable[[Authority, Pair, Path], Pair], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        secured(tls_of(make(authority, pair, tmp_path)))
    assert "\n" not in str(caught.value)


def test_authorities_of_clients(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    own = str(authority.own.certificate)
    crl = str(authority.revoked())
    assert secured(tls_of(pair, client_ca=own)).context.verify_mode is ssl.CERT_OPTIONAL
    made = secured(tls_of(pair, client_ca=own, client_certificate="required", crl=crl)).context
    assert made.verify_mode is ssl.CERT_REQUIRED
    assert made.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
    with pytest.raises(ConfigError, match="holds no certificate in PEM form"):
        secured(tls_of(pair, client_ca=crl))
    with pytest.raises(ConfigError, match="holds no revocation list in PEM form"):
        secured(tls_of(pair, client_ca=own, crl=own))
    (tmp_path / "empty.pem").touch()
    with pytest.raises(ConfigError, match="holds no certificate in PEM form"):
        secured(tls_of(pair, client_ca=str(tmp_path / "empty.pem")))


def test_what_is_no_authority_signs_nobody(authority: Authority, pair: Pair) -> None:
    with pytest.raises(ConfigError, match="holds no certificate of an authority"):
        secured(tls_of(pair, client_ca=str(authority.issue("somebody").certificate)))


def test_names_in_order() -> None:
    fields = {
        "subject": ((("organizationName", "x"),), (("commonName", "one"),)),
        "subjectAltName": (("DNS", "two"), ("IP Address", "1.2.3.4"), ("URI", "spiffe://a/b"), ("DNS", "three")),
    }
    assert names_of(fields) == ("URI:spiffe://a/b", "DNS:two", "DNS:three", "CN:one")
    assert names_of({}) == ()


def test_credentials_of_systemd(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(ConfigError, match="systemd handed over no credentials"):
        located("credential:key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    shutil.copy(pair.certificate, tmp_path / "certificate")
    shutil.copy(pair.key, tmp_path / "key")
    assert secured(Tls("credential:certificate", "credential:key")).certificate.names[0] == "DNS:localhost"
    for name in ("../key", "a/b", "", "."):
        with pytest.raises(ConfigError, match="names no credential"):
            located(f"credential:{name}")
