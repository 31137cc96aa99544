"""Bundles that clients may have loaded: folders NAME.tfb in the folders that are configured for it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from agent.errors import Reason, RefusedError
from targets.bundle import MANIFEST
from targets.errors import did_you_mean

SUFFIX = ".tfb"
# So many are listed of a folder.
_MOST_LISTED = 1000


def bundles_in(folders: Sequence[str]) -> list[str]:
    """Names of the bundles that may be loaded by name: NAME.tfb in one of the folders."""
    found: set[str] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            for path in itertools.islice(Path(folder).iterdir(), _MOST_LISTED):
                if path.suffix == SUFFIX and (path / MANIFEST).is_file():
                    found.add(path.stem)
    return sorted(found)


def bundle_in(folders: Sequence[str], wanted: str, name: str) -> Path:
    """The folder of a bundle that a client names, by its path or relative to one of `folders`, and inside of these.

    Raises RefusedError, which says nothing of what is elsewhere.
    """
    for folder in folders:
        # A name that no file system takes is one that is not there.
        with contextlib.suppress(OSError, ValueError):
            root = Path(folder).resolve()
            path = (root / wanted).resolve()
            if path.is_relative_to(root) and path != root and (path / MANIFEST).is_file():
                return path
    raise RefusedError(
        Reason.UNKNOWN_MODEL,
        f"no bundle {wanted[:200]!r} for model {name[:100]!r} in the folders that models are loaded from",
        did_you_mean(name[:100], bundles_in(folders)) if folders else "name them as folders under [repository]",
    )
