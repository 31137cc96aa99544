"""The bundle: a folder that the board maps, and the manifest that says what is in it.

NAME.tfb/
  manifest.json    this module's `Manifest` as canonical JSON
  segments/*.onnx  graphs; their weights are external data in
  segments/*.bin   raw little-endian tensors, page-aligned
  sample/*.bin     one valid input per tensor, for warm-up
  assets/*         files the application needs beside the model (labels, a tokenizer)
  report.json      for scripts: errors per output, operators quantized and left, memory by phase
  report.html      for people: the same on one page, with the plan drawn
"""

from __future__ import annotations

import enum
import hashlib
import re
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import UNSET, UnsetType

from targets.budget import MemoryPlan
from targets.errors import BundleError
from targets.generation import Generation
from targets.recipe import Recipe
from targets.tensor import Contract, human

SCHEMA = 1
MANIFEST = "manifest.json"
# A manifest describes files and buffers, never weights: past this it is not ours.
MAX_MANIFEST_BYTES = 64 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Model names stand in URLs, MQTT topics and file names."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the bundle; `path` is relative, with forward slashes."""

    path: str
    nbytes: int
    sha256: str


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model it was compiled from: file name, and digests of the file and of its external data."""

    file: str
    sha256: str
    weights_sha256: str


class Residency(str, enum.Enum):
    """Where a segment's weights are while the bundle is served. The plan chooses; a person can."""

    HEAP = "heap"
    """Copied once, as the kernels want them: fastest, all of it anonymous memory."""
    MAPPED = "mapped"
    """Laid out once on the board, into a file (`tightfit-agent finalise`), and mapped: evictable, hardly anonymous."""
    STREAMED = "streamed"
    """As mapped, but in memory only for its turn, the next one read ahead meanwhile."""
    UNPACKED = "unpacked"
    """Mapped as the bundle holds it, never laid out anew: for float weights that fit in no other way, slow."""

    @property
    def needs_finalise(self) -> bool:
        """Whether the weights come from files that are made on the board before the bundle can be served."""
        return self in (Residency.MAPPED, Residency.STREAMED)


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One graph that a runtime loads. `settings` are the runtime's own, and part of what the plan rests on."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    settings: dict[str, str] = {}
    residency: Residency = Residency.HEAP


class SampleTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input of the sample: raw little-endian bytes in `file`; its dtype is the contract's."""

    name: str
    shape: tuple[int, ...]
    file: str


class LeftAlone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operators with weights that the scheme did not quantize, and why."""

    op: str
    count: int
    weight_bytes: int
    reason: str


class Quantization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many operators of each type the scheme quantized, and what it left."""

    scheme: str
    quantized: dict[str, int]
    left: tuple[LeftAlone, ...]
    source_weight_bytes: int
    weight_bytes: int


class OutputError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compiled against source for one output, over all verification inputs.

    `top1_agreement` is the share of equal argmax along the last axis; None where that axis has one element.
    """

    output: str
    max_abs: float
    relative_l2: float
    cosine: float
    top1_agreement: float | None = None


class SegmentError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative L2 of one segment's worst output: run on the source model's values, and on the compiled chain's."""

    segment: str
    isolated: float
    accumulated: float


class Verification(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the compiled model was run on before it was called done. `inputs`: "random" or the data's name."""

    inputs: str
    samples: int
    outputs: tuple[OutputError, ...]
    segments: tuple[SegmentError, ...] = ()


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle promises. The agent trusts nothing of it before `read_bundle` has checked the files.

    `recipe` says how an encoded image becomes the input and the outputs an answer; None: tensors only.
    `generation` says how text becomes tokens and the other way round.
    """

    schema: int
    name: str
    target: str
    runtime: str
    source: Source
    contract: Contract
    segments: tuple[Segment, ...]
    plan: MemoryPlan
    quantization: Quantization
    verification: Verification
    sample: tuple[SampleTensor, ...]
    assets: tuple[str, ...]
    options: dict[str, str]
    tools: dict[str, str]
    files: tuple[FileEntry, ...]
    recipe: Recipe | None = None
    generation: Generation | UnsetType = UNSET
    seal: str = ""
    """`digest` as it was when the manifest was made: see `sealed`."""

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema {self.schema} is not known; this version reads {SCHEMA}")
        if not NAME.fullmatch(self.name):
            raise ValueError(f"model name {self.name!r} must be letters, digits, '.', '_' or '-'")
        if not self.segments:
            raise ValueError("a bundle needs at least one segment")

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical manifest but for its seal, and through its file digests over all of the bundle."""
        return hashlib.sha256(dumps(msgspec.structs.replace(self, seal=""))).hexdigest()

    @property
    def version(self) -> str:
        """The model version that clients see."""
        return version_of(self.digest)


def version_of(digest: str) -> str:
    """Short form of a digest: its first 48 bits as a number, since clients of Triton's take a version for one."""
    return str(int(digest[:12], 16))


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its own digest as its seal, without which `loads` takes none.

    It finds every edit by hand and every damaged byte, in what the agent cannot derive from the bundle again too (a
    term of the plan that was measured, the place of a buffer). It stops nobody who seals what he changed: against that
    there are the checks of `agent.certificate`, and a signature is needed for the rest.
    """
    return msgspec.structs.replace(manifest, seal=manifest.digest)


def dumps(manifest: Manifest) -> bytes:
    """Canonical JSON: sorted keys, one space of indent, so that equal manifests are equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def loads(data: bytes, where: str = MANIFEST) -> Manifest:
    """Parse a manifest; raises BundleError naming the field, or saying that it is not what was sealed."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.schema != SCHEMA:
            raise BundleError(
                f"{where} has schema {head.schema}, this version reads {SCHEMA}",
                "compile the bundle with the matching tightfit-compile, or update the agent",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
        if manifest.seal != manifest.digest:
            wrong = "was changed after it was sealed" if manifest.seal else "has no seal"
            raise BundleError(f"{where} {wrong}", "copy or compile the bundle again")
        return manifest
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise BundleError(f"{where} is not a valid manifest: {error}", "copy or compile the bundle again") from None


class _Head(msgspec.Struct):
    """Only what must be known before anything else is believed."""

    schema: int


def safe_path(folder: Path, relative: str) -> Path:
    """`folder / relative`, refusing absolute paths, `..`, backslashes and NUL; raises BundleError."""
    parts = PurePosixPath(relative)
    if not relative or parts.is_absolute() or ".." in parts.parts or "\\" in relative or "\0" in relative:
        raise BundleError(f"file name {relative!r} does not stay inside the bundle", "do not use this bundle")
    return folder / parts


def check_regular(path: Path, relative: str) -> int:
    """Size in bytes of an ordinary file reached through no link; raises BundleError otherwise."""
    try:
        info = path.lstat()
    except OSError as error:
        raise BundleError(f"bundle file {relative} cannot be read: {error.strerror}", _COPY_AGAIN) from None
    if not stat.S_ISREG(info.st_mode):
        raise BundleError(f"bundle file {relative} is a link or a special file", "a bundle holds plain files only")
    if info.st_nlink > 1:
        raise BundleError(f"bundle file {relative} has a second hard link", "copy the bundle instead of linking it")
    return info.st_size


_COPY_AGAIN = "copy the bundle again"
_READABLE = "the bundle must be readable by the user that the agent runs as"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the bundle at `folder`, parsed and checked in itself; its files are not yet looked at."""
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "not there"
        raise BundleError(f"bundle {folder} is {kind}", "a bundle is the folder that tightfit-compile wrote")
    path = folder / MANIFEST
    try:
        if not path.exists():
            raise BundleError(f"{folder} has no {MANIFEST}", "it is not a bundle, or its copy was cut short")
        size = check_regular(path, MANIFEST)
        if size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{path} has {human(size)}, at most {human(MAX_MANIFEST_BYTES)} are read")
        return loads(path.read_bytes(), str(path))
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}", _READABLE) from None


def verify_files(folder: Path, manifest: Manifest, progress: Callable[[int], None] | None = None) -> None:
    """Compare every listed file with its size and SHA-256, and every name the manifest uses with the list.

    Streams: memory does not grow with the files. Raises BundleError at the first difference.
    """
    listed = {entry.path for entry in manifest.files}
    used = [segment.file for segment in manifest.segments] + [tensor.file for tensor in manifest.sample]
    for name in (*used, *manifest.assets):
        if name not in listed:
            raise BundleError(f"the manifest uses {name}, which is not among its files", "do not use this bundle")
    for entry in manifest.files:
        try:
            _verify_file(folder, entry, progress)
        except OSError as error:
            raise BundleError(f"bundle file {entry.path} cannot be read: {error.strerror}", _READABLE) from None


def _verify_file(folder: Path, entry: FileEntry, progress: Callable[[int], None] | None) -> None:
    path = safe_path(folder, entry.path)
    for parent in path.relative_to(folder).parents:
        if (folder / parent).is_symlink() and parent != Path():
            raise BundleError(f"bundle folder {parent} is a link", "a bundle holds plain folders only")
    size = check_regular(path, entry.path)
    if size != entry.nbytes:
        raise BundleError(f"bundle file {entry.path} has {size} bytes instead of {entry.nbytes}", _COPY_AGAIN)
    if file_sha256(path, progress) != entry.sha256:
        raise BundleError(f"bundle file {entry.path} was changed: its SHA-256 differs", _COPY_AGAIN)


def file_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in 1 MiB steps; `progress` hears the bytes of each."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if progress:
                progress(count)
    return digest.hexdigest()
