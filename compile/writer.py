"""Write a bundle: tensors streamed and page-aligned, files hashed while written, the folder renamed at the end.

Equal input, options and versions give equal bytes: order follows the graph, nothing carries a time or a path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from compile.backends.ort_lowering import STORAGE
from compile.errors import OptionError
from compile.graph import dims_of, ir
from targets.bundle import MANIFEST, FileEntry, Manifest, dumps

PAGE = 4096
# Tensors below this stay in the graph file: the runtime looks at shapes and scalars while it loads.
INLINE_BYTES = 1024


class BundleWriter:
    """A bundle under construction in `OUT.partial`; `commit` renames it, leaving the `with` block removes it."""

    def __init__(self, out: Path, overwrite: bool = False) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        self.overwrite = overwrite
        self._files: dict[str, FileEntry] = {}

    def __enter__(self) -> BundleWriter:
        if self.out.exists() and not self.overwrite:
            raise OptionError(f"{self.out} exists", "choose another name, or say --overwrite")
        if self.out.exists() and not (self.out / MANIFEST).is_file():
            raise OptionError(f"{self.out} exists and is not a bundle", "choose another name")
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise OptionError(f"cannot write {self.out}: {error.strerror}", "choose a folder you can write") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return tuple(self._files[path] for path in sorted(self._files))

    def add(self, path: str, data: bytes) -> None:
        """Write one small file."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self._files[path] = FileEntry(path, len(data), hashlib.sha256(data).hexdigest())

    def add_graph(self, path: str, weights: str, model: ir.Model, progress: Callable[[int], None]) -> None:
        """Write a graph and, beside it, its weights as external data; `progress` hears the bytes of each tensor.

        The weights stand in the graph's own folder because onnxruntime refuses external data outside it.
        """
        sink = _TensorSink(self.folder / Path(path).parent / weights)
        originals = {value: value.const_value for value in model.graph.initializers.values()}
        try:
            for value, tensor in originals.items():
                if tensor is None:
                    continue
                if tensor.dtype == ir.DataType.STRING:
                    continue  # ONNX keeps strings in the graph file
                if tensor.nbytes < INLINE_BYTES:
                    value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
                else:
                    value.const_value = sink.put(tensor, value.name or "", weights)
                progress(tensor.nbytes)
        finally:
            sink.close()
        if sink.nbytes:
            relative = str(Path(path).parent / weights)
            self._files[relative] = FileEntry(relative, sink.nbytes, sink.sha256)
        else:
            sink.path.unlink()
        self.add(path, ir.to_proto(model).SerializeToString(deterministic=True))

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, make everything durable, and let the bundle appear under its name at once."""
        (self.folder / MANIFEST).write_bytes(dumps(manifest))
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            _fsync(path)
        if self.out.exists():
            old = self.out.with_name(self.out.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            self.out.rename(old)
            try:
                self.folder.rename(self.out)
            except OSError:
                old.rename(self.out)
                raise
            shutil.rmtree(old)
        else:
            self.folder.rename(self.out)
        _fsync(self.out.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _TensorSink:
    """An external-data file that grows tensor by tensor, hashed on the way; equal storage is written once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.nbytes = 0
        self._file = path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self._placed: dict[object, tuple[int, int]] = {}

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def put(self, tensor: ir.TensorProtocol, name: str, location: str) -> ir.ExternalTensor:
        key = _storage_key(tensor)
        if key not in self._placed:
            self._write(b"\0" * (-self.nbytes % PAGE))
            start = self.nbytes
            self._write_tensor(tensor)
            self._placed[key] = (start, self.nbytes - start)
        offset, length = self._placed[key]
        return ir.ExternalTensor(
            location,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(dims_of(tensor)),
            name=name,
            base_dir=self.path.parent,
        )

    def _write_tensor(self, tensor: ir.TensorProtocol) -> None:
        if isinstance(tensor, ir.ExternalTensor) and tensor.dtype.itemsize >= 1:
            # Straight from the mapped source, a piece at a time, so that no tensor is ever whole in memory.
            view = memoryview(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)
            for start in range(0, len(view), 8 << 20):
                self._write(view[start : start + (8 << 20)])
        else:
            self._write(tensor.tobytes())

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            written = self._file.write(view)
            self._digest.update(view[:written])
            self.nbytes += written
            view = view[written:]

    def close(self) -> None:
        self._file.close()


def _storage_key(tensor: ir.TensorProtocol) -> object:
    """Equal keys mean equal bytes: one lowered weight seen twice, or one range of a source file."""
    shared = getattr(tensor, "metadata_props", {}).get(STORAGE)
    if shared:
        return shared
    if isinstance(tensor, ir.ExternalTensor):
        return str(tensor.path), tensor.offset, tensor.length
    return id(tensor)
