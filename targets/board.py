"""Boards: strict TOML descriptions of the machines a bundle can be compiled for."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from targets.errors import BoardError, did_you_mean
from targets.tensor import DType

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIB = 1 << 20


def require_positive(struct: msgspec.Struct) -> None:
    """Every number of `struct` must be finite and above zero; raises ValueError naming the first that is not."""
    for field in struct.__struct_fields__:
        value = getattr(struct, field)
        if isinstance(value, (int, float)) and not 0 < value < math.inf:
            raise ValueError(f"{field} must be a number above zero, not {value}")


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """MemTotal already excludes firmware and GPU carve-outs. `runtime_fixed_mib` is F_rt: both agent processes
    with the runtime loaded and no model."""

    kind: str
    physical_mib: int
    mem_total_mib: int
    os_reserve_mib: int
    contiguous_ceiling_mib: int
    runtime_fixed_mib: int

    def __post_init__(self) -> None:
        require_positive(self)
        if self.mem_total_mib > self.physical_mib:
            raise ValueError("mem_total_mib cannot exceed physical_mib")
        if self.os_reserve_mib + self.runtime_fixed_mib >= self.mem_total_mib:
            raise ValueError("os_reserve_mib and runtime_fixed_mib leave nothing of mem_total_mib for a model")


class Bandwidth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak DRAM bandwidth (decimal GB/s) and sequential read of the usual storage (decimal MB/s)."""

    dram_gb_s: float
    storage_read_mb_s: float

    def __post_init__(self) -> None:
        require_positive(self)


class Runtime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What executes segments there. `sm` is the CUDA compute capability (8.7), empty without a GPU; `launch_us` what
    one run of a segment takes beside its kernels."""

    name: str
    version: str
    max_opset: int
    dtypes: tuple[DType, ...]
    sm: str = ""
    launch_us: float = 15.0

    def __post_init__(self) -> None:
        if self.name not in RUNTIMES:
            raise ValueError(f"unknown runtime {self.name!r}; available: {', '.join(RUNTIMES)}")
        require_positive(self)


RUNTIMES = ("onnxruntime", "tensorrt")


class Power(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Watts of the whole board."""

    idle_w: float
    max_w: float

    def __post_init__(self) -> None:
        require_positive(self)
        if self.idle_w > self.max_w:
            raise ValueError("idle_w cannot exceed max_w")


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """List price of the board alone."""

    usd: float

    def __post_init__(self) -> None:
        require_positive(self)


class Board(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One board. `compute` maps a dtype to peak 10^9 operations per second (a multiply-add counts as two)."""

    schema: int
    title: str
    arch: str
    cpu: str
    cores: int
    memory: Memory
    bandwidth: Bandwidth
    compute: dict[str, float]
    runtime: Runtime
    power: Power
    price: Price
    name: str = ""

    def __post_init__(self) -> None:
        if self.schema != 1:
            raise ValueError(f"schema {self.schema} is not known; available: 1")
        require_positive(self)
        known = {dtype.value for dtype in DType}
        for dtype, rate in self.compute.items():
            if dtype not in known:
                raise ValueError(f"compute: unknown dtype {dtype!r}; {did_you_mean(dtype, known)}")
            if not 0 < rate < math.inf:
                raise ValueError(f"compute: {dtype} must be a number above zero, not {rate}")


def parse_board(text: str, name: str) -> Board:
    """Read one board description; raises BoardError naming the key and what was expected."""
    try:
        fields: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BoardError(f"board {name!r} is not valid TOML: {error}", "see targets/boards for examples") from None
    if "name" in fields:
        raise BoardError(f"board {name!r}: unexpected key 'name'", "a board is named by its file; use `title`")
    fields["name"] = name
    try:
        return msgspec.convert(fields, Board)
    except msgspec.ValidationError as error:
        raise BoardError(f"board {name!r}: {error}", _hint(str(error))) from None


def _hint(message: str) -> str:
    unknown = re.search(r"unknown field `(\w+)`(?: - at `\$\.?(\w*)`)?", message)
    if unknown:
        structs: dict[str, Any] = {t.__name__.lower(): t for t in (Memory, Bandwidth, Runtime, Power, Price)}
        return did_you_mean(unknown[1], structs.get(unknown[2] or "", Board).__struct_fields__)
    value = re.search(r"Invalid enum value '(.*?)'", message)
    if value:
        return did_you_mean(value[1], (dtype.value for dtype in DType))
    return "see targets/boards for examples"


def board_digest(board: Board) -> str:
    """SHA-256 over everything the description says."""
    return hashlib.sha256(msgspec.json.encode(board, order="sorted")).hexdigest()


def board_names() -> list[str]:
    """Names of the boards that come with Tightfit."""
    folder = resources.files("targets") / "boards"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def board_source(name_or_path: str) -> tuple[str, str]:
    """(name, TOML text) of a known board, or of a `.toml` file; raises BoardError listing the known ones."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            return path.stem, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise BoardError(f"cannot read board file {name_or_path}: {reason}") from None
    names = board_names()
    if name_or_path not in names:
        raise BoardError(f"unknown board {name_or_path!r}", f"{did_you_mean(name_or_path, names)}, or a .toml file")
    entry = resources.files("targets") / "boards" / f"{name_or_path}.toml"
    return name_or_path, entry.read_text(encoding="utf-8")


def load_board(name_or_path: str) -> Board:
    """The board of that name, or described by that `.toml` file."""
    name, text = board_source(name_or_path)
    return parse_board(text, name)


_TABLE = re.compile(r"^\s*\[\s*([\w.\-\s]+?)\s*\]\s*(?:#.*)?$")
_FIGURE = re.compile(r"^\s*([\w-]+)\s*=\s*[-+]?[\d.][\w.+-]*\s*(?:#\s*(.*?)\s*)?$")
_NOTE = re.compile(r"(source|assumed): *\S")


def figure_notes(text: str) -> dict[str, str]:
    """Dotted key of every number in a board file, and the comment on its line; empty where there is none.

    Numbers that do not stand on a line of their own (inline tables, arrays) have no comment of their own either.
    """
    notes = dict.fromkeys(_numbers(tomllib.loads(text)), "")
    prefix = ""
    for line in text.splitlines():
        if table := _TABLE.match(line):
            prefix = table[1] + "."
        elif (figure := _FIGURE.match(line)) and prefix + figure[1] in notes:
            notes[prefix + figure[1]] = figure[2] or ""
    notes.pop("schema", None)
    return notes


def _numbers(fields: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in fields.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(prefix + key)
    return found


def unsourced_figures(text: str) -> list[str]:
    """Dotted keys whose number is followed neither by `# source: ...` nor by `# assumed: ...` on its line."""
    return [key for key, note in figure_notes(text).items() if not _NOTE.match(note)]
