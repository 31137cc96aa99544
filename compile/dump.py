"""`--dump-after`: the graph as a pass left it, in a file of its own, for people who look for what changed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from compile.errors import OptionError
from compile.graph import ir
from compile.passes.base import Pass
from targets.errors import did_you_mean


def check_pass_name(name: str, passes: Sequence[Pass]) -> None:
    """Raise OptionError, which lists the passes there are, unless one of them has this name."""
    names = sorted({type(step).__name__ for step in passes})
    if name not in names:
        raise OptionError(f"--dump-after {name!r} is no pass", did_you_mean(name, names))


def dump_after(name: str, model: ir.Model, folder: Path, stem: str) -> Callable[[Pass], None]:
    """A listener for `run_passes` that writes `FOLDER/STEM.NN-PASS.onnx` after each pass of that name.

    NN is its place among all passes, because some run more than once. Weights that stand beside the source model are
    referred to by the source's own locations and not read: in the source's folder the file loads as it is.
    """
    place = 0

    def heard(step: Pass) -> None:
        nonlocal place
        place += 1
        if type(step).__name__ != name:
            return
        path = folder / f"{stem}.{place:02}-{name}.onnx"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
        except OSError as error:
            raise OptionError(f"cannot write {path}: {error.strerror}", "name a folder with --dump-to") from None

    return heard
