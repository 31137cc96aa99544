"""What a server is shown of who asks, and by what it is known itself."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from targets.errors import TightfitError


@dataclass(frozen=True)
class Credentials:
    """`ca` has the authorities that are trusted instead of the system's, `cert` and `key` what is shown to the server,
    and `token` is what it is told."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise TightfitError("--cert and --key go together", "give both, or none")
        if not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise TightfitError("--token is none: it has blanks, or characters that no token has")

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def context(self) -> ssl.SSLContext:
        """For https. Raises TightfitError where a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        except (OSError, ssl.SSLError) as error:
            raise TightfitError(f"--ca {self.ca}: {_words(error)}") from None
        if self.cert and self.key:
            try:
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ssl.SSLError) as error:
                raise TightfitError(f"--cert {self.cert} with --key {self.key}: {_words(error)}") from None
        return context


def _words(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else error.strerror or str(error)
