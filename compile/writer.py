"""Write a bundle: tensors streamed and page-aligned, files hashed while written, the folder renamed at the end.

What a killed compilation has written stays in OUT.partial, and the next run goes on from there.

Equal input, options and versions give equal bytes: order follows the graph, nothing carries a time or a path.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from compile.errors import OptionError
from compile.finite import refuse_nan
from compile.graph import SLICE, STORAGE, STORAGE_OFFSET, dims_of, ir
from compile.journal import Journal, Record, verified_prefix
from targets.bundle import MANIFEST, FileEntry, Manifest, dumps

PAGE = 4096
# Tensors below this stay in the graph file: the runtime looks at shapes and scalars while it loads.
INLINE_BYTES = 1024
PIECE_BYTES = 8 << 20


class BundleWriter:
    """A bundle under construction in `OUT.partial`; `commit` renames it, an error removes it, a kill leaves it.

    `head` is everything that the bundle's bytes depend on: what an interrupted run with an equal one wrote is kept.
    """

    def __init__(self, out: Path, head: dict[str, Any], overwrite: bool = False) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        self.overwrite = overwrite
        self._scratch = self.folder / "scratch"
        self._journal = Journal(self.folder, head)
        self._lock = -1
        self.inline_bytes = 0
        self._files: dict[str, FileEntry] = {}

    def __enter__(self) -> BundleWriter:
        if self.out.exists() and not self.overwrite:
            raise OptionError(f"{self.out} exists", "choose another name, or say --overwrite")
        if self.out.exists() and not (self.out / MANIFEST).is_file():
            raise OptionError(f"{self.out} exists and is not a bundle", "choose another name")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            self._take_lock()
            if not self._journal.resumable():
                _clear(self.folder)
            shutil.rmtree(self._scratch, ignore_errors=True)
        except OSError as error:
            raise OptionError(f"cannot write {self.out}: {error.strerror}", "choose a folder you can write") from None
        return self

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise OptionError(
                f"another compilation is writing {self.out}", "wait for it, or choose another name"
            ) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A person who interrupts may want to go on; after an error nothing half-written is left.
        if kind is not KeyboardInterrupt:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return tuple(self._files[path] for path in sorted(self._files))

    def add(self, path: str, data: bytes) -> None:
        """Write one small file."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self._files[path] = FileEntry(path, len(data), hashlib.sha256(data).hexdigest())

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder on the bundle's disk, which is no part of the bundle; a kill leaves it to the next run."""
        self._scratch.mkdir()
        try:
            yield self._scratch
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    @contextlib.contextmanager
    def weights(self, path: str) -> Iterator[TensorSink]:
        """The weight file of all graphs, which `add_graph` fills.

        It stands in the graphs' own folder because onnxruntime refuses external data outside it.
        """
        with TensorSink(self.folder / path, self._journal) as sink:
            yield sink
        if sink.nbytes:
            self._files[path] = FileEntry(path, sink.nbytes, sink.sha256)
        else:
            sink.path.unlink()

    def add_graph(self, path: str, model: ir.Model, sink: TensorSink, progress: Callable[[int], None]) -> None:
        """Write a graph whose weights go into `sink`; `progress` hears the bytes of each tensor.

        The graph's tensors are looked at one at a time. Afterwards its initializers point into the file. Raises
        ModelError for a tensor with NaN, by name.
        """
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.dtype == ir.DataType.STRING:
                continue
            if tensor.nbytes < INLINE_BYTES:
                array = tensor.numpy()
                if tensor.dtype.is_floating_point():
                    refuse_nan(value.name or "", array, array)
                value.const_value = ir.tensor(array, dtype=tensor.dtype, name=value.name)
                self.inline_bytes += tensor.nbytes
            else:
                value.const_value = sink.put(tensor, value.name or "")
            progress(tensor.nbytes)
        self.add(path, ir.to_proto(model).SerializeToString(deterministic=True))

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, make everything durable, and let the bundle appear under its name at once."""
        (self.folder / MANIFEST).write_bytes(dumps(manifest))
        self._journal.remove()
        self._drop_leftovers()
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            _fsync(path)
        if self.out.exists():
            _replace(self.folder, self.out)
        else:
            self.folder.rename(self.out)
        _fsync(self.out.parent)

    def _drop_leftovers(self) -> None:
        """Delete what an interrupted run left and this one did not write: its assets may have been others."""
        for path in list(self.folder.rglob("*")):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in (*self._files, MANIFEST):
                path.unlink()
        for path in sorted((p for p in self.folder.rglob("*") if p.is_dir()), reverse=True):
            if not any(path.iterdir()):
                path.rmdir()


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _replace(new: Path, old: Path) -> None:
    """Put a folder in the place of another and delete the other, at once where the kernel and the disk can do that."""
    with contextlib.suppress(AttributeError):
        arguments = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
        if ctypes.CDLL(None).renameat2(*arguments) == 0:
            shutil.rmtree(new)
            return
    aside = old.with_name(old.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    shutil.rmtree(aside)


def _clear(folder: Path) -> None:
    """Empty a folder that an interrupted run with other options left."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TensorSink:
    """An external-data file that grows tensor by tensor, hashed on the way; equal storage is written once.

    Every tensor is noted in the journal once it is written, and tensors noted by an interrupted run are kept.
    """

    def __init__(self, path: Path, journal: Journal) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.tensor_bytes = 0
        self._journal = journal
        kept, self.nbytes, self._digest = verified_prefix(path, journal.records())
        self.resumed_bytes = self.nbytes
        self._placed = {record.key: record for record in kept}
        self._counted: set[str] = set()
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(self.nbytes)
        self._file.seek(self.nbytes)
        journal.restart(kept)

    def __enter__(self) -> TensorSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._journal.close()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def put(self, tensor: ir.TensorProtocol, name: str) -> ir.ExternalTensor:
        """Write the tensor unless its bytes are there; returns a reference to them."""
        key = _storage_key(tensor, name)
        record = self._placed.get(key) or _inside(tensor, self._placed)
        if record is None:
            record = self._placed[key] = self._append(tensor, name, key)
        if record.key not in self._counted:
            self._counted.add(record.key)
            self.tensor_bytes += record.nbytes
        start, nbytes = (record.offset, record.nbytes) if record.key == key else _part(tensor, record)
        return ir.ExternalTensor(
            self.path.name,
            start,
            nbytes,
            tensor.dtype,
            shape=ir.Shape(dims_of(tensor)),
            name=name,
            base_dir=self.path.parent,
        )

    def _append(self, tensor: ir.TensorProtocol, name: str, key: str) -> Record:
        self._write(b"\0" * (-self.nbytes % PAGE))
        start = self.nbytes
        for piece in _pieces(tensor, name):
            self._write(piece)
        record = Record(key, start, self.nbytes - start, self.sha256)
        self._journal.add(record, self._file.fileno())
        return record

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            written = self._file.write(view)
            self._digest.update(view[:written])
            self.nbytes += written
            view = view[written:]


def _pieces(tensor: ir.TensorProtocol, name: str) -> Iterator[bytes | memoryview]:
    """The tensor's bytes, a piece at a time, so that a mapped one is never whole in memory; NaN is refused."""
    if tensor.dtype.itemsize < 1:
        yield tensor.tobytes()
        return
    array = tensor.numpy()
    if not array.flags.c_contiguous and array.ndim == 2:
        # Columns of a mapped matrix: a copy of the whole would stand in memory.
        rows = max(PIECE_BYTES // max(array[0].nbytes, 1), 1)
        for start in range(0, len(array), rows):
            slab = np.ascontiguousarray(array[start : start + rows])
            if tensor.dtype.is_floating_point():
                refuse_nan(name, slab, array)
            yield memoryview(slab.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        return
    flat = np.ascontiguousarray(array).reshape(-1)
    for start in range(0, flat.size, PIECE_BYTES // flat.itemsize):
        piece = flat[start : start + PIECE_BYTES // flat.itemsize]
        if tensor.dtype.is_floating_point():
            refuse_nan(name, piece, flat)
        yield memoryview(piece.view(np.uint8))  # type: ignore[arg-type]


def _storage_key(tensor: ir.TensorProtocol, name: str) -> str:
    """Equal keys mean equal bytes: one lowered weight seen twice, or one range of a source file."""
    shared = getattr(tensor, "metadata_props", {}).get(STORAGE)
    if shared:
        begins = getattr(tensor, "metadata_props", {}).get(STORAGE_OFFSET)
        return f"lowered:{shared}" + (f"+{begins}" if begins is not None else "")
    if isinstance(tensor, ir.ExternalTensor):
        return f"source:{tensor.location}:{tensor.offset}:{tensor.length}"
    return f"value:{name}"


def _inside(tensor: ir.TensorProtocol, placed: Mapping[str, Record]) -> Record | None:
    """What was written already and holds the tensor as a part: the table that its panel was cut out of."""
    props = getattr(tensor, "metadata_props", {})
    if STORAGE_OFFSET in props:
        return placed.get(f"lowered:{props[STORAGE]}")
    if SLICE not in props or not isinstance(tensor, ir.ExternalTensor):
        return None
    candidates = (r for r in placed.values() if r.key.startswith(f"source:{tensor.location}:"))
    return next((r for r in candidates if 0 <= _begins(tensor, r) <= r.nbytes - tensor.nbytes), None)


def _begins(tensor: ir.ExternalTensor, record: Record) -> int:
    """Where the tensor begins in a range of its source file."""
    begins = record.key.rsplit(":", 2)[1]
    return (tensor.offset or 0) - (int(begins) if begins.isdecimal() else 0)


def _part(tensor: ir.TensorProtocol, record: Record) -> tuple[int, int]:
    """(offset in the weight file, bytes) of a part of what was written."""
    begins = (
        _begins(tensor, record)
        if isinstance(tensor, ir.ExternalTensor)
        else int(getattr(tensor, "metadata_props", {})[STORAGE_OFFSET])
    )
    return record.offset + begins, tensor.nbytes
