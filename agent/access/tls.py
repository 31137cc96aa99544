"""TLS: what a configuration and its files become, checked as a client would before any client meets it.

A context never changes: new files make a new one, for the handshakes that begin from then on. What was connected before
stays as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.access.files import located, read
from agent.access.revoked import Identity, revoked_in
from agent.config import Tls
from agent.errors import ConfigError

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(rb"-----BEGIN ([A-Z]+ )?PRIVATE KEY-----")
# Forward secrecy and authenticated encryption: RFC 9325, section 4.2. TLS 1.3 has nothing else.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:ECDHE+AESCCM:!AESCCM8:!aNULL"
# TLS 1.2 takes two of the client's.
_MOST_FLIGHTS = 4
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True)
class Certificate:
    """What the agent shows: whose it is, until when it is valid (seconds since 1970), and its SHA-256.

    `early` says that by this machine's clock it is not valid yet. Boards have clocks that are wrong until they are on
    a network, so this is no reason not to begin.
    """

    names: tuple[str, ...]
    expires: float
    sha256: str
    early: bool


@dataclass(frozen=True)
class Secured:
    """The context of a server, the certificate in it, and which of clients are revoked."""

    context: ssl.SSLContext
    certificate: Certificate
    revoked: frozenset[Identity] = frozenset()


def files_of(tls: Tls) -> list[Path]:
    """All that the section names."""
    return [located(each) for each in (tls.certificate, tls.key, tls.client_ca, tls.crl) if each]


def secured(tls: Tls) -> Secured:
    """Raises ConfigError for files that are not there, do not belong together, or are no longer valid."""
    chain, key = located(tls.certificate), located(tls.key)
    leaf = _check_files(chain, key)
    context = _server(tls.minimum)
    _load(context, chain, key)
    certificate = _seen_by_a_client(chain, key, leaf)
    if tls.client_ca:
        _trust(context, tls)
    return Secured(context, certificate, _revoked(tls))


def _revoked(tls: Tls) -> frozenset[Identity]:
    if not tls.crl:
        return frozenset()
    path = located(tls.crl)
    try:
        return revoked_in(read(path, "the crl"))
    except ValueError as error:
        raise ConfigError(f"the crl {path}: {error}") from None


def for_client(authorities: str, certificate: str, key: str, minimum: str) -> ssl.SSLContext:
    """The context of a client of others: it trusts those authorities (those of this machine where none is named), and
    shows the certificate where there is one. Its files are named as in the configuration. Raises ConfigError."""
    if authorities:
        path = located(authorities)
        if not _CERTIFICATE.search(read(path, "the ca")):
            raise ConfigError(f"the ca {path} holds no certificate in PEM form")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_trust(context, path, "the ca")
    else:
        context = ssl.create_default_context()
    context.minimum_version = _VERSIONS[minimum]
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if certificate:
        chain, secret = located(certificate), located(key)
        _check_files(chain, secret)
        _load(context, chain, secret)
    return context


def shown(certificate: str, key: str) -> Certificate:
    """What a server that trusts the certificate itself says of it when a client shows it. Raises ConfigError."""
    chain, secret = located(certificate), located(key)
    leaf = _check_files(chain, secret)
    server, client = _server("1.2"), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for each in (server, client):
        _load(each, chain, secret)
    sha256 = hashlib.sha256(ssl.PEM_cert_to_DER_cert(leaf)).hexdigest()
    try:
        server.load_verify_locations(cadata=leaf)
        fields = _shown_to(server, client)
    except ssl.SSLCertVerificationError as error:
        # X509_V_ERR_CERT_NOT_YET_VALID
        if error.verify_code != 9:
            raise ConfigError(f"the certificate {chain}: {error.verify_message}") from None
        return Certificate((), 0.0, sha256, early=True)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the certificate {chain} cannot be used: {_words(error)}") from None
    return Certificate(names_of(fields), ssl.cert_time_to_seconds(str(fields["notAfter"])), sha256, early=False)


def _shown_to(server: ssl.SSLContext, client: ssl.SSLContext) -> Mapping[str, Any]:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    shows, looks = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for _ in range(_MOST_FLIGHTS):
        for each in (shows, looks):
            with contextlib.suppress(ssl.SSLWantReadError):
                each.do_handshake()
    return looks.getpeercert() or {}


def _server(minimum: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[minimum]
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def _check_files(chain: Path, key: Path) -> str:
    """The first certificate, in PEM. OpenSSL has one message for all that may be wrong with the files."""
    found = _CERTIFICATE.search(read(chain, "the certificate"))
    if found is None:
        raise ConfigError(f"the certificate {chain} holds none in PEM form", "convert it with openssl x509")
    kind = _KEY.search(text := read(key, "the key"))
    if kind is None:
        raise ConfigError(f"the key {key} is none in PEM form", "convert it with openssl pkey")
    if kind[1] == b"ENCRYPTED " or b"Proc-Type: 4,ENCRYPTED" in text:
        raise ConfigError(
            f"the key {key} needs a password, which nobody is there to give",
            "store it without one (openssl pkey), readable by the agent alone, or as a systemd credential",
        )
    return found[0].decode("ascii", "replace")


def _load(context: ssl.SSLContext, chain: Path, key: Path) -> None:
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(chain, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} is not that of the certificate {chain}") from None
        raise ConfigError(f"certificate {chain} with key {key}: {_words(error)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read certificate {chain} with key {key}: {error.strerror}") from None


def _trust(context: ssl.SSLContext, tls: Tls) -> None:
    """Ask clients for certificates, of which these authorities say whose they are."""
    authorities = located(tls.client_ca)
    if not _CERTIFICATE.search(read(authorities, "the client_ca")):
        raise ConfigError(f"the client_ca {authorities} holds no certificate in PEM form")
    _load_trust(context, authorities, "the client_ca")
    if not context.cert_store_stats()["x509_ca"]:
        raise ConfigError(
            f"the client_ca {authorities} holds no certificate of an authority",
            "name the certificate that signed those of the clients (CA:TRUE), not theirs",
        )
    context.verify_mode = ssl.CERT_REQUIRED if tls.client_certificate == "required" else ssl.CERT_OPTIONAL
    if tls.crl:
        revoked = located(tls.crl)
        if b"-----BEGIN X509 CRL-----" not in read(revoked, "the crl"):
            raise ConfigError(f"the crl {revoked} holds no revocation list in PEM form")
        _load_trust(context, revoked, "the crl")
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _load_trust(context: ssl.SSLContext, path: Path, what: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{what} {path}: {_words(error)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None


def _seen_by_a_client(chain: Path, key: Path, leaf: str) -> Certificate:
    """What a client that trusts the certificate itself says of it, after a handshake in memory."""
    server, client = _server("1.2"), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(server, chain, key)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(cadata=leaf)
        fields, der = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        # X509_V_ERR_CERT_NOT_YET_VALID
        if error.verify_code != 9:
            raise ConfigError(f"the certificate {chain}: {error.verify_message}") from None
        return Certificate((), 0.0, hashlib.sha256(ssl.PEM_cert_to_DER_cert(leaf)).hexdigest(), early=True)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the certificate {chain} cannot be used: {_words(error)}") from None
    expires = ssl.cert_time_to_seconds(str(fields["notAfter"]))
    return Certificate(names_of(fields), expires, hashlib.sha256(der).hexdigest(), early=False)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[Mapping[str, Any], bytes]:
    """The server's certificate, as the client has it. Raises SSLError, or ValueError where it has none in the end."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks, answers = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for _ in range(_MOST_FLIGHTS):
        try:
            asks.do_handshake()
            break
        except ssl.SSLWantReadError:
            with contextlib.suppress(ssl.SSLWantReadError):
                answers.do_handshake()
    return asks.getpeercert() or {}, asks.getpeercert(True) or b""


def names_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in a certificate, as `ssl` describes it: `URI:...`, then `DNS:...`, then the subject's `CN:...`."""
    others = fields.get("subjectAltName", ())
    found = [f"{kind}:{value}" for wanted in ("URI", "DNS") for kind, value in others if kind == wanted]
    common = [value for part in fields.get("subject", ()) for name, value in part if name == "commonName"]
    return (*found, *[f"CN:{value}" for value in common])


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error).replace("_", " ").lower()[:200]
