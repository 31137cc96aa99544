"""Whether a request comes from a page of another site, opened in somebody's browser. Pure.

A browser on a machine that may ask the agent lets any page send it a POST: of text/plain it asks nobody first, and that
the page cannot read the answer undoes nothing. But it says which page that was (RFC 6454, section 7), and no page can
make it say another. What is no browser sends no such header.
"""

from __future__ import annotations

from collections.abc import Sequence

_SCHEMES = ("http://", "https://")


def is_foreign(origins: Sequence[str], hosts: Sequence[str]) -> bool:
    """Whether the headers Origin of a request name another place than its headers Host, which name the agent. A proxy
    may have ended TLS in between, so that the scheme says nothing."""
    if not origins:
        return False
    if len(origins) != 1 or len(hosts) != 1:
        return True
    origin, host = origins[0].strip().lower(), hosts[0].strip().lower()
    return not host or origin not in [scheme + host for scheme in _SCHEMES]
