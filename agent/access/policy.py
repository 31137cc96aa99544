"""Who somebody is, by all that tells it: one value for what the configuration and the tokens say at a time."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agent.access.callers import EVERYBODY, NOBODY, Caller, Role, anonymous
from agent.access.tokens import Tokens, bearer
from agent.config import CallerOptions, Config
from agent.errors import ConfigError, Reason, RefusedError


@dataclass(frozen=True)
class Policy:
    """`by_name` are all callers, the others those that are recognised otherwise. Who is anonymous is `local` when he
    comes from this machine, and `remote` else. `is_open` says that nobody is asked for anything."""

    by_name: dict[str, Caller] = field(default_factory=dict)
    by_certificate: dict[str, Caller] = field(default_factory=dict)
    by_user: dict[int, Caller] = field(default_factory=dict)
    by_group: dict[int, Caller] = field(default_factory=dict)
    tokens: Tokens = field(default_factory=Tokens)
    takes_tokens: bool = False
    local: Caller = EVERYBODY
    remote: Caller = NOBODY
    is_open: bool = True

    def with_token(self, authorization: str) -> Caller:
        """Who has that token. Raises RefusedError where nobody has."""
        token = bearer(authorization)
        if token is None:
            raise RefusedError(Reason.UNAUTHENTICATED, "the header Authorization holds no bearer token", _HOW)
        name = self.tokens.name_of(token)
        if name is None:
            raise RefusedError(Reason.UNAUTHENTICATED, "the bearer token is nobody's", "ask for one that is valid")
        return self.by_name[name]

    def with_certificate(self, names: Sequence[str]) -> Caller | None:
        """Whose certificate has one of these names, the first that is known."""
        return next((self.by_certificate[name] for name in names if name in self.by_certificate), None)

    def of_process(self, user: int, groups: Iterable[int]) -> Caller | None:
        """Who a process of that user is, or one of these groups."""
        if user in self.by_user:
            return self.by_user[user]
        return next((self.by_group[group] for group in groups if group in self.by_group), None)


_HOW = "send `Authorization: Bearer TOKEN`"


def policy_of(config: Config, tokens: Tokens) -> Policy:
    """Raises ConfigError for users and groups that are not there."""
    by_name: dict[str, Caller] = {}
    by_certificate: dict[str, Caller] = {}
    by_user: dict[int, Caller] = {}
    by_group: dict[int, Caller] = {}
    for options in config.callers:
        caller = by_name[options.name] = Caller(options.name, _grants(options))
        # The first that names it has it.
        for each in options.certificates:
            by_certificate.setdefault(each, caller)
        for each in options.users:
            by_user.setdefault(_number("user", each, lambda name: pwd.getpwnam(name).pw_uid), caller)
        for each in options.groups:
            by_group.setdefault(_number("group", each, lambda name: grp.getgrnam(name).gr_gid), caller)
    local = anonymous(Role(role) for role in config.access.anonymous)
    return Policy(
        by_name,
        by_certificate,
        by_user,
        by_group,
        tokens,
        takes_tokens=bool(config.access.tokens),
        local=local,
        remote=local if config.http.allow_insecure_network else NOBODY,
        is_open=not config.callers and all(local.may(role) for role in Role),
    )


def _grants(options: CallerOptions) -> dict[Role, frozenset[str]]:
    return {Role.INFER: frozenset(options.infer), Role.OBSERVE: frozenset(options.observe),
            Role.ADMIN: frozenset(options.admin)}  # fmt: skip


def _number(kind: str, name: str, find: Callable[[str], int]) -> int:
    if name.isascii() and name.isdecimal():
        return int(name)
    try:
        return find(name)
    except KeyError:
        raise ConfigError(
            f"[[callers]]: this machine has no {kind} {name!r}", "write a name that it has, or a number"
        ) from None
