"""Bearer tokens (RFC 6750): made, kept as names and digests, and looked up."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from agent.errors import ConfigError

_PREFIX = "tightfit_"
# RFC 6750, section 2.1. Shorter ones could be guessed, and their digests be searched for.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{20,500}={0,2}", re.ASCII)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/-]+=*) *", re.ASCII | re.IGNORECASE)
_MOST = 1024


def make() -> str:
    """A new one, of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def line_of(name: str, token: str) -> str:
    """What stands in the file for it."""
    return f"{name} sha256:{hashlib.sha256(token.encode('ascii')).hexdigest()}"


def bearer(authorization: str) -> str | None:
    """The token that a header Authorization carries."""
    found = _BEARER.fullmatch(authorization)
    return found[1] if found else None


@dataclass(frozen=True)
class _Kept:
    digest: bytes
    name: str


class Tokens:
    """Whose each token is.

    They are found by a keyed hash of their digest: how long that takes says nothing of any digest to those who do not
    know the key, which is another in every process.
    """

    def __init__(self, digests: Collection[tuple[str, bytes]] = ()) -> None:
        self._key = secrets.token_bytes(32)
        self._kept = {self._index(digest): _Kept(digest, name) for name, digest in digests}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def digests(self) -> frozenset[tuple[str, bytes]]:
        """(name, SHA-256) of all."""
        return frozenset((kept.name, kept.digest) for kept in self._kept.values())

    def name_of(self, token: str) -> str | None:
        """Whose it is."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        kept = self._kept.get(self._index(digest))
        return kept.name if kept is not None and hmac.compare_digest(kept.digest, digest) else None

    def _index(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key).digest()


def parse(text: bytes, where: str, names: Collection[str], private: bool) -> Tokens:
    """Tokens of a file, a line each: `NAME sha256:DIGEST`, or where it is `private` also `NAME TOKEN`. `names` are
    those of callers. Raises ConfigError, which shows nothing of a line: who confuses the order has a token first."""
    try:
        lines = text.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"the tokens {where} are not ASCII text") from None
    digests: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        at = f"the tokens {where}, line {number}"
        name, digest = _line(line, at, private)
        if name not in names:
            raise ConfigError(f"{at}: none of [[callers]] has that name", f"available: {', '.join(sorted(names))}")
        if digests.setdefault(digest, name) != name:
            raise ConfigError(f"{at}: this token is that of {digests[digest]!r} already")
        if len(digests) > _MOST:
            raise ConfigError(f"{at}: more than {_MOST} tokens")
    return Tokens([(name, digest) for digest, name in digests.items()])


def _line(line: str, at: str, private: bool) -> tuple[str, bytes]:
    words = line.split()
    if len(words) != 2:
        raise ConfigError(f"{at} is not NAME sha256:DIGEST", "make one with `tightfit-agent token NAME`")
    name, secret = words
    if found := _DIGEST.fullmatch(secret):
        return name, bytes.fromhex(found[1])
    if secret.startswith("sha256:") or not _TOKEN.fullmatch(secret):
        raise ConfigError(
            f"{at}: neither sha256: with 64 digits of 0-9a-f, nor a token of 20 or more characters",
            "make one with `tightfit-agent token NAME`",
        )
    if not private:
        raise ConfigError(
            f"{at}: a token as such, in a file that others can read", "chmod 600 it, or put its sha256 there"
        )
    return name, hashlib.sha256(secret.encode("ascii")).digest()
