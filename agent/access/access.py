"""What the configuration and its files say of access, now: read at the start, and again when told or when they change.

What cannot be used changes nothing: what was there before goes on, and one line in the log says so.
"""

from __future__ import annotations

import ssl
import time

from agent import log
from agent.access.files import Watch
from agent.access.tls import files_of, secured
from agent.config import Config
from agent.errors import ConfigError

# Whoever renews certificates has done so by then, or should hear of it.
_SOON_S = 7 * 86_400


class Access:
    """The TLS of new connections. Raises ConfigError where it cannot be had at the start."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._log = log.get("access")
        self._secured = secured(config.tls) if config.tls.certificate else None
        self._watch: Watch | None = None
        self.handshakes_failed = 0
        self._say()

    @property
    def speaks_tls(self) -> bool:
        """Whether there is a certificate."""
        return self._secured is not None

    @property
    def context(self) -> ssl.SSLContext:
        """For the next handshake."""
        if self._secured is None:
            raise RuntimeError("there is no certificate")
        return self._secured.context

    def begin(self) -> None:
        """From now on see when files change."""
        paths = files_of(self._config.tls)
        if paths:
            self._watch = Watch(paths, self._config.access.watch_s, self.reload)

    def close(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.close()

    def reload(self) -> list[str]:
        """Read all files again. What failed, a line each: what they said before still holds."""
        if self._secured is None:
            return []
        before = self._secured.certificate
        try:
            self._secured = secured(self._config.tls)
        except ConfigError as error:
            self._log.error("TLS goes on with the certificate that it has", error=str(error))
            return [str(error)]
        if self._secured.certificate != before:
            self._say()
        return []

    def _say(self) -> None:
        if self._secured is None:
            return
        certificate = self._secured.certificate
        names, sha256 = ",".join(certificate.names), certificate.sha256[:16]
        if certificate.early:
            self._log.warning("the certificate is not valid yet, or the clock is wrong", sha256=sha256)
            return
        days = (certificate.expires - time.time()) / 86_400
        write = self._log.warning if days * 86_400 < _SOON_S else self._log.info
        write("certificate", names=names, sha256=sha256, days_left=round(days, 1))
