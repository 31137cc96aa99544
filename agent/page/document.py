"""The page as one document: HTML with its style and its script inside, and the policy that lets a browser run no other.

The policy names both by their digests (Content Security Policy Level 3, section 2.3.1), so that text which a model or a
client made can do nothing, wherever it stands. The page fetches from the agent alone.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_STYLE, _SCRIPT = "/*style*/", "/*script*/"
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)


@dataclass(frozen=True)
class Document:
    """The bytes of the page, and headers that go with them."""

    body: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return self.headers["ETag"]


@cache
def document() -> Document:
    """The page of this version of the agent; it holds nothing of what the agent does."""
    here = files("agent.page")
    html, style, script = ((here / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    body = html.replace(_STYLE, style, 1).replace(_SCRIPT, script, 1).encode()
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": _POLICY.format(script=_digest(script), style=_digest(style)),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        # It may be kept, and is asked for each time whether it is still the one: an agent that was updated has another.
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return Document(body, headers)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
