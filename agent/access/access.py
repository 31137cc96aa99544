"""What the configuration and its files say of access, now: read at the start, and again when told or when they change.

What cannot be used changes nothing: what was there before goes on, and one line in the log says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Callable

from msgspec.structs import replace

from agent import log
from agent.access.audit import Audit
from agent.access.callers import EVERYBODY, Caller
from agent.access.files import Watch, is_private, located, read
from agent.access.peers import is_local, process_of
from agent.access.policy import Policy, policy_of
from agent.access.revoked import identity_of
from agent.access.tls import files_of, names_of, secured
from agent.access.tokens import Tokens, parse
from agent.config import Config
from agent.errors import ConfigError, Reason, RefusedError

# Whoever renews certificates has done so by then, or should hear of it.
_SOON_S = 7 * 86_400


class Access:
    """The TLS of new connections, and who may do what. Raises ConfigError where it cannot be had at the start."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._log = log.get("access")
        self.audit = Audit()
        self._secured = secured(config.tls) if config.tls.certificate else None
        self.policy: Policy = _policy(config)
        """Another one whenever something is another than before."""
        self.handshakes_failed = 0
        self.on_reload: list[Callable[[], None]] = []
        """Called when all was read again, for what was let in before."""
        self._watch: Watch | None = None
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

    @property
    def expires(self) -> float:
        """When the certificate does, in seconds since 1970; 0 where there is none."""
        return self._secured.certificate.expires if self._secured else 0.0

    def begin(self) -> None:
        """From now on see when files change."""
        paths = files_of(self._config.tls)
        if self._config.access.tokens:
            paths.append(located(self._config.access.tokens))
        if paths:
            self._watch = Watch(paths, self._config.access.watch_s, self.reload)

    def close(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.close()

    def caller(self, transport: asyncio.BaseTransport | None, authorization: str | None) -> Caller:
        """Who asks: by his token, else by his certificate, else by his process, else nobody knows. A token that is
        nobody's is refused, whoever has it, and so is a certificate that was revoked. Raises RefusedError."""
        policy = self.policy
        if policy.is_open:
            return EVERYBODY
        if authorization is not None and policy.takes_tokens:
            return policy.with_token(authorization)
        if transport is None:
            return policy.remote
        caller = None
        if policy.by_certificate:
            caller = policy.with_certificate(names_of(transport.get_extra_info("peercert") or {}))
            if caller is not None:
                self._check_revoked(transport)
        if caller is None and (policy.by_user or policy.by_group) and (process := process_of(transport)):
            caller = policy.of_process(*process)
        return caller or (policy.local if is_local(transport) else policy.remote)

    def reload(self, config: Config | None = None) -> list[str]:
        """Read all files again, and take callers and what they may from `config`. What failed, a line each: what held
        before still holds."""
        # What listens is as it was at the start, and so are the names of its files.
        config = replace(config or self._config, http=self._config.http, tls=self._config.tls)
        failed = []
        try:
            self._reload_policy(config)
        except ConfigError as error:
            self._log.error("callers and tokens stay as they were", error=str(error))
            failed.append(str(error))
        else:
            watched = (self._config.access.tokens, self._config.access.watch_s)
            self._config = config
            if self._watch is not None and watched != (config.access.tokens, config.access.watch_s):
                self.close()
                self.begin()
        try:
            self._reload_tls()
        except ConfigError as error:
            self._log.error("TLS goes on with the certificate that it has", error=str(error))
            failed.append(str(error))
        for each in self.on_reload:
            each()
        return failed

    def _reload_tls(self) -> None:
        if self._secured is None:
            return
        before, after = self._secured, secured(self._config.tls)
        self._secured = after
        if after.revoked != before.revoked:
            # Whoever was let in by the policy is looked at once more.
            self.policy = dataclasses.replace(self.policy)
            self.audit.done("crl", "the file", self._config.tls.crl, revoked=len(after.revoked))
        if after.certificate != before.certificate:
            self._say()

    def _check_revoked(self, transport: asyncio.BaseTransport) -> None:
        """Of who is connected; a handshake lets nobody in."""
        if self._secured is None or not self._secured.revoked:
            return
        shown = transport.get_extra_info("ssl_object").getpeercert(True)
        if shown is not None and identity_of(shown) in self._secured.revoked:
            raise RefusedError(Reason.UNAUTHENTICATED, "the certificate has been revoked", "ask for one that is valid")

    def _reload_policy(self, config: Config) -> None:
        before, after = self.policy, _policy(config)
        self.policy = after
        if before.tokens.digests != after.tokens.digests:
            self.audit.done(
                "tokens", "the file", config.access.tokens, tokens=len(after.tokens),
                new=_names(after.tokens, before.tokens), gone=_names(before.tokens, after.tokens),
            )  # fmt: skip
        if before.by_name != after.by_name or before.local != after.local:
            self.audit.done("callers", "the configuration", "file", callers=",".join(after.by_name))

    def _say(self) -> None:
        if self._secured is None:
            return
        certificate = self._secured.certificate
        names, sha256 = ",".join(certificate.names), certificate.sha256[:16]
        if certificate.early:
            self._log.warning("the certificate is not valid yet, or the clock is wrong", sha256=sha256)
            return
        left_s = certificate.expires - time.time()
        write = self._log.warning if left_s < _SOON_S else self._log.info
        write("certificate", names=names, sha256=sha256, days_left=round(left_s / 86_400, 1))


def _policy(config: Config) -> Policy:
    tokens = Tokens()
    if config.access.tokens:
        path = located(config.access.tokens)
        text = read(path, "the tokens")
        tokens = parse(text, str(path), [caller.name for caller in config.callers], is_private(config.access.tokens))
    return policy_of(config, tokens)


def _names(tokens: Tokens, others: Tokens) -> str:
    """Whose there are that there are not among the others."""
    return ",".join(sorted({name for name, _ in tokens.digests - others.digests}))
