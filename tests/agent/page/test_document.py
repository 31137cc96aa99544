"""The page as one document that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re

from agent.page.document import document


def test_the_policy_names_what_is_inside_and_lets_nothing_else_run() -> None:
    page = document()
    text, policy = page.body.decode(), page.headers["Content-Security-Policy"]
    for tag in ("style", "script"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_it_names_no_other_place_and_makes_no_markup_of_data() -> None:
    text = document().body.decode().replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE).replace("https:", "http:")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(| on\w+=| style=", text)
    assert len(text) < 64 << 10
