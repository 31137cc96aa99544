"""What a person can choose, and what can be refused before the model is looked at."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path, PurePosixPath

from compile.calibrate.collectors import DEFAULT_METHOD, METHODS
from compile.dump import check_pass_name
from compile.errors import OptionError
from compile.forms import NORMALIZE
from compile.partition.choose import Wishes
from compile.quantize.schemes import SCHEMES
from compile.shapes import ShapeRequest
from compile.sizes import segment_limit
from compile.states import Pair
from compile.text import Tokenizer
from compile.windows import SplitRequest
from targets.bundle import Residency
from targets.errors import did_you_mean
from targets.generation import TOKENIZER
from targets.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Options:
    """What a person can choose. `max_error`: limit of relative L2 per output, None for the scheme's default.

    `block`: weights that share a scale; `symmetric`: without zero points; None for the scheme's default.
    `host_memory`: bytes that compiling may take, whatever the model's size; larger models are cut into more segments.
    `batch_axis`: name of the dimension along which requests can be put together; by default what is found.
    `pad`: name of the dimension along which requests of one batch may differ; empty: none.
    `states`: pairs of state beside those that are named as exporters do. `tokenizer`: what makes text of its tokens.
    `split`: along which dimension longer inputs than the range allows are run in windows; None: nowhere.
    `slots`: requests that can be in memory at once; by default as many as the board has room for beside the model.
    `segments`, `max_segment`, `cut_at`: how it is cut, see `Wishes`; by default as is best for host and board.
    `calib`: what to verify on, and, by a scheme that is calibrated, to calibrate on with the method `calibrate_with`;
    `random`: calibrate on random values instead.
    `dump_after`: the pass after which the graph is written to the folder `dump_to`, by default the bundle's.
    """

    scheme: str = "fp32"
    shapes: tuple[ShapeRequest, ...] = ()
    calib: Path | None = None
    calibrate_with: str = DEFAULT_METHOD
    random: bool = False
    samples: int = 8
    assets: tuple[Path, ...] = ()
    name: str = ""
    slots: int | None = None
    max_error: float | None = None
    overwrite: bool = False
    host_memory: int = 2 << 30
    residency: Residency | None = None
    dump_after: str = ""
    dump_to: Path | None = None
    recipe: Recipe | None = None
    block: int | None = None
    symmetric: bool | None = None
    segments: int | None = None
    max_segment: int | None = None
    cut_at: tuple[str, ...] = ()

    @property
    def wishes(self) -> Wishes:
        """What is asked of the cuts. Raises OptionError."""
        return Wishes(self.segments, self.max_segment, self.cut_at)

    batch_axis: str = ""
    split: SplitRequest | None = None
    pad: str = ""
    states: tuple[Pair, ...] = ()
    tokenizer: Tokenizer | None = None

    def recorded(self) -> dict[str, str]:
        """The options that shape the bundle, as the manifest keeps them: no paths."""
        return {
            "scheme": self.scheme,
            "shapes": " ".join(f"{name}={','.join(dim.spelled() for dim in dims)}" for name, dims in self.shapes),
            "batch_axis": self.batch_axis,
            **({"split": str(self.split)} if self.split else {}),
            **({"pad": self.pad} if self.pad else {}),
            **({"states": " ".join(map("=".join, self.states))} if self.states else {}),
            **({"tokenizer": hashlib.sha256(self.tokenizer.data).hexdigest()} if self.tokenizer else {}),
            "samples": str(self.samples),
            "slots": str(self.slots or "auto"),
            "host_memory": str(self.host_memory),
            "residency": self.residency.value if self.residency else "",
            **self.wishes.recorded(),
        }


def check_options(options: Options) -> None:
    """What can be refused before the model is looked at."""
    segment_limit(options.host_memory)
    options.wishes.recorded()
    if options.calibrate_with not in METHODS:
        raise OptionError(f"unknown method {options.calibrate_with!r}", did_you_mean(options.calibrate_with, METHODS))
    if SCHEMES[options.scheme].calibrated and options.calib is None and not options.random:
        raise OptionError(
            f"--scheme {options.scheme} needs samples to find the ranges of activations",
            "give them with --calib, or say --random for ranges that are guesses",
        )
    if options.dump_after:
        check_pass_name(options.dump_after, NORMALIZE)
    if options.max_error is not None and not options.max_error >= 0:
        raise OptionError(f"--max-error {options.max_error} is no limit", "give a number that is zero or more")
    names = [path.name for path in options.assets]
    if options.tokenizer is not None and PurePosixPath(TOKENIZER).name in names:
        raise OptionError("two assets are named tokenizer.json", "give it with --tokenizer alone")
    for path in options.assets:
        if names.count(path.name) > 1:
            raise OptionError(f"two assets are named {path.name}", "rename one")
        try:
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            raise OptionError(f"cannot read asset {path}: {error.strerror}") from None
