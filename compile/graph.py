"""The model in memory, over onnx-ir: weights stay where they are, mapped, and are looked at only when needed.

Nothing else in the compiler imports onnx or onnx_ir; `ir` is re-exported from here.
"""

from __future__ import annotations

import collections
import itertools
import logging
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from compile.errors import ModelError
from compile.sparse import densify, proto_graphs
from compile.wellformed import check_wellformed
from targets.tensor import DType, human

__all__ = [
    "DTYPES",
    "SLICE",
    "STORAGE",
    "STORAGE_OFFSET",
    "FreshNames",
    "bodies_of",
    "constant",
    "contract_dtype",
    "dims_of",
    "external_files",
    "graphs_of",
    "initializers",
    "ir",
    "load_model",
    "nodes_of",
    "weight_nbytes"
]  # fmt: skip

# onnx-ir reports every recovered oddity of a model as a warning; what matters is an error of ours.
logging.getLogger("onnx_ir").setLevel(logging.ERROR)

# Protobuf cannot hold more in one message, so a larger file is not an ONNX model with inline weights.
MAX_PROTO_BYTES = (1 << 31) - 1

STORAGE = "tightfit.storage"
"""Metadata key of a tensor: tensors with equal values here have equal bytes and are stored once."""

STORAGE_OFFSET = "tightfit.storage_offset"
"""Metadata key beside STORAGE: the tensor is a part of those, from this byte on."""

SLICE = "tightfit.slice"
"""Metadata key of a tensor: `START NAME` says that it is the rows of another from START on."""

# First bytes of files that people take for ONNX models: (offset, bytes, what it is, what to do).
_NOT_ONNX: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"version https://git-lfs", "a git-lfs pointer, not the model", "run `git lfs pull` where it came from"),
    (0, b"PK\x03\x04", "a zip archive (a PyTorch checkpoint or a tf2onnx large model)", "export or unpack it first"),
    (4, b"TFL3", "a TensorFlow Lite model", "convert it with tf2onnx"),
    (4, b"ORTM", "an onnxruntime .ort file", "compile from the ONNX model it was made of"),
    (0, b"GGUF", "a GGUF file", "export the model to ONNX"),
    (0, b"\x89HDF", "an HDF5 file (Keras)", "convert it with tf2onnx"),
    (0, b"\x80", "a Python pickle (a PyTorch checkpoint)", "export it with torch.onnx.export"),
    (0, b"<", "a web page or XML, perhaps a failed download", "download the model again"),
    (0, b"{", "JSON (a .json export, or a safetensors header)", "compile needs the binary .onnx file"),
)

DTYPES: dict[ir.DataType, DType] = {
    ir.DataType.BOOL: DType.BOOL,
    ir.DataType.UINT4: DType.UINT4,
    ir.DataType.INT4: DType.INT4,
    ir.DataType.UINT8: DType.UINT8,
    ir.DataType.INT8: DType.INT8,
    ir.DataType.UINT16: DType.UINT16,
    ir.DataType.INT16: DType.INT16,
    ir.DataType.UINT32: DType.UINT32,
    ir.DataType.INT32: DType.INT32,
    ir.DataType.UINT64: DType.UINT64,
    ir.DataType.INT64: DType.INT64,
    ir.DataType.FLOAT8E4M3FN: DType.FLOAT8E4M3,
    ir.DataType.FLOAT16: DType.FLOAT16,
    ir.DataType.BFLOAT16: DType.BFLOAT16,
    ir.DataType.FLOAT: DType.FLOAT32,
    ir.DataType.DOUBLE: DType.FLOAT64,
    ir.DataType.STRING: DType.STRING,
}


def load_model(path: Path) -> ir.Model:
    """Read an ONNX file; its external data is checked and mapped, not read.

    Raises ModelError for anything that is not a complete, safe ONNX model.
    """
    _check_file(path)
    try:
        proto = onnx.load(path, load_external_data=False)
        check_wellformed(proto, path)
        densify(proto, path)
        _check_stored_once(proto, path)
        model = ir.from_proto(proto)
    except (
        DecodeError, ir.serde.SerdeError, RecursionError, ValueError, KeyError, TypeError, AttributeError
    ) as error:  # fmt: skip
        raise ModelError(f"{path} is not a valid ONNX model: {_root(error)}", "check it with `onnx.checker`") from None
    if not len(model.graph) and not model.graph.outputs:
        raise ModelError(f"{path} holds no graph", "it is empty, or not an ONNX model")
    for tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = path.parent
    _check_graph(model, path)
    _check_external_data(model, path)
    return model


def _root(error: BaseException) -> str:
    """The first line of what an error was first about."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _check_stored_once(proto: onnx.ModelProto, path: Path) -> None:
    """Of two tensors under one name, every reader would choose its own."""
    for graph in proto_graphs(proto):
        names = collections.Counter(tensor.name for tensor in graph.initializer)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise ModelError(f"{path}: tensor {twice!r} is stored twice in graph {graph.name!r}", "export it again")


def _check_graph(model: ir.Model, path: Path) -> None:
    """What a graph must have before any pass can look at it; the ONNX checker is not asked, it reads all weights."""
    if not model.graph.outputs:
        raise ModelError(f"{path}: the graph has no outputs", "export the model again")
    if not model.opset_imports:
        raise ModelError(f"{path} imports no operator set", "export the model again")
    if model.ir_version is None or model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{path} has IR version {model.ir_version}; the highest known is {onnx.IR_VERSION}",
            "export the model with an older onnx",
        )
    _check_interface(model.graph, path)
    _check_edges(model, path)


def _check_interface(graph: ir.Graph, path: Path) -> None:
    """Inputs and outputs have names of their own."""
    for role, values in (("input", graph.inputs), ("output", graph.outputs)):
        name, count = collections.Counter(value.name for value in values).most_common(1)[0] if values else ("", 0)
        if count > 1:
            raise ModelError(f"{path}: {role} {name!r} is listed twice", "give the second one a name of its own")
        if any(not value.name for value in values):
            raise ModelError(f"{path}: an {role} has no name", "export the model again")


def _check_edges(model: ir.Model, path: Path) -> None:
    """Whatever is read or given is made somewhere, in subgraphs too."""
    for node in nodes_of(model):
        for value in node.inputs:
            if value is not None and not _is_made(value):
                raise ModelError(
                    f"{path}: {node.op_type} node {node.name!r} reads {value.name!r}, which nothing produces",
                    "export the model again",
                )
    for body in graphs_of(model):
        for value in body.outputs:
            if not _is_made(value):
                raise ModelError(
                    f"{path}: nothing produces {value.name!r}, an output of graph {body.name!r}",
                    "export the model again",
                )


def _is_made(value: ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input() or value.is_initializer()


def _check_file(path: Path) -> None:
    if path.is_dir():
        found = sorted(p.name for p in path.glob("*.onnx"))
        raise ModelError(f"{path} is a folder", f"name the model file: {', '.join(found) or 'no .onnx file in it'}")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", "check the name and the permissions") from None
    if not size:
        raise ModelError(f"{path} is empty", "download or export it again")
    for offset, magic, what, hint in _NOT_ONNX:
        if head[offset:].startswith(magic):
            raise ModelError(f"{path} is {what}", hint)
    if size > MAX_PROTO_BYTES:
        raise ModelError(f"{path} has {human(size)}; protobuf ends at 2 GiB", "save its weights as external data")


def _check_external_data(model: ir.Model, path: Path) -> None:
    """Every location is a plain file below the model's folder, holds the whole tensor, and none overlap.

    A crafted location can read any file of the host (CVE-2024-27318, CVE-2025-51480), so this comes before
    the first byte is mapped.
    """
    folder = path.parent.resolve()
    ranges: dict[Path, set[tuple[int, int, str]]] = {}
    for tensor in _tensors(model):
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        file = _external_file(folder, str(tensor.location), tensor.name or "?", path)
        offset, length = tensor.offset or 0, tensor.length or tensor.nbytes
        if length != tensor.nbytes:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} needs {tensor.nbytes} bytes, its external data says {length}",
                "export the model again",
            )
        size = file.stat().st_size
        if offset < 0 or offset + length > size:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} ends at byte {offset + length} of {file.name}, which has {size}",
                "the weight file is cut short; copy it again",
            )
        ranges.setdefault(file, set()).add((offset, offset + length, tensor.name or "?"))
    for file, spans in ranges.items():
        _check_overlap(file, sorted(spans), path)


def _external_file(folder: Path, location: str, name: str, model: Path) -> Path:
    parts = PurePosixPath(location)
    if not location or parts.is_absolute() or ".." in parts.parts or "\\" in location or "\0" in location:
        raise ModelError(
            f"{model}: tensor {name!r} points outside the model's folder: {location!r}",
            "weights must stand beside the model; do not trust this file",
        )
    file = folder / parts
    try:
        linked = any(step.is_symlink() for step in (file, *file.parents) if folder in step.parents)
        info = file.lstat()
    except FileNotFoundError:
        listed = ", ".join(sorted(p.name for p in folder.iterdir())[:10])
        raise ModelError(
            f"{model}: weight file {location} is missing", f"it belongs beside the model; there: {listed}"
        ) from None
    except OSError as error:
        raise ModelError(
            f"{model}: weight file {location} cannot be read: {error.strerror}", "save the weights under another name"
        ) from None
    if linked:
        raise ModelError(f"{model}: weight file {location} is reached through a link", "copy the file instead")
    if not stat.S_ISREG(info.st_mode):
        raise ModelError(f"{model}: weight file {location} is not a plain file", "copy it again")
    if info.st_nlink > 1:
        raise ModelError(
            f"{model}: weight file {location} has a second hard link", "copy the file instead of linking it"
        )
    with file.open("rb") as opened:
        if opened.read(23) == b"version https://git-lfs":
            raise ModelError(f"{model}: weight file {location} is a git-lfs pointer", "run `git lfs pull`")
    return file


def _check_overlap(file: Path, spans: list[tuple[int, int, str]], model: Path) -> None:
    """Equal ranges are sharing; ranges that only touch a part of each other are a mistake or an attack."""
    for (start, end, name), (next_start, next_end, other) in itertools.pairwise(spans):
        if next_start < end and (start, end) != (next_start, next_end):
            raise ModelError(
                f"{model}: tensors {name!r} and {other!r} overlap in {file.name}", "export the model again"
            )


def _graphs(model: ir.Model) -> Iterator[ir.Graph | ir.Function]:
    """The main graph, every subgraph below it, and the same of every function."""
    tops: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for top in tops:
        yield top
        for node in ir.traversal.RecursiveGraphIterator(top):
            yield from bodies_of(node)


def bodies_of(node: ir.Node) -> Iterator[ir.Graph]:
    """The subgraphs of a control-flow node; none for any other."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def graphs_of(model: ir.Model) -> list[ir.Graph]:
    """The main graph and every subgraph below it, functions not."""
    return [model.graph, *model.graph.subgraphs()]


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Every tensor of the model: initializers and tensor attributes, in all graphs."""
    for graph in _graphs(model):
        if isinstance(graph, ir.Graph):
            for value in graph.initializers.values():
                if value.const_value is not None:
                    yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR:
                    yield attribute.as_tensor()
                elif attribute.type == ir.AttributeType.TENSORS:
                    yield from attribute.as_tensors()


def external_files(model: ir.Model) -> dict[str, Path]:
    """Location, as the model says it, and path of every external file that holds weights."""
    return {str(t.location): Path(t.path) for t in _tensors(model) if isinstance(t, ir.ExternalTensor)}


class FreshNames:
    """Names that no value of a model has, so that what the compiler adds never hits what the model calls its own."""

    def __init__(self, model: ir.Model) -> None:
        self._taken = {
            value.name
            for graph in graphs_of(model)
            for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs))
        }

    def make(self, wanted: str) -> str:
        """`wanted`, or where it is taken, the first of `wanted_1`, `wanted_2`, ... that is not; it is then taken."""
        candidates = itertools.chain([wanted], (f"{wanted}_{count}" for count in itertools.count(1)))
        name = next(candidate for candidate in candidates if candidate not in self._taken)
        self._taken.add(name)
        return name


def initializers(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Tensors of the main graph's initializers."""
    return (v.const_value for v in model.graph.initializers.values() if v.const_value is not None)


def nodes_of(model: ir.Model) -> Iterator[ir.Node]:
    """Every node, subgraphs included, functions not."""
    yield from ir.traversal.RecursiveGraphIterator(model.graph)


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a value that never changes: an initializer that the caller cannot override."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value


def dims_of(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """A constant's shape; constants have no symbolic dimensions."""
    return tuple(dim for dim in tensor.shape if isinstance(dim, int))


def weight_nbytes(model: ir.Model) -> int:
    """Bytes of all distinct weights, wherever they stand: initializers and Constant nodes alike."""
    distinct: dict[object, int] = {}
    for tensor in _tensors(model):
        key: object = id(tensor)
        if isinstance(tensor, ir.ExternalTensor):
            key = (str(tensor.location), tensor.offset, tensor.length)
        distinct[key] = tensor.nbytes
    return sum(distinct.values())


def contract_dtype(value: ir.Value) -> DType:
    """Element type of a graph input or output; ModelError for what no client could send or receive: sequences,
    optionals, and types that the Open Inference Protocol has no name for."""
    hint = "inputs and outputs of a bundle are dense tensors"
    if not isinstance(value.type, ir.TensorType) or value.dtype not in DTYPES:
        raise ModelError(f"{value.name!r} is {value.type or 'of unknown type'}", hint)
    dtype = DTYPES[value.dtype]
    if dtype.oip is None:
        raise ModelError(
            f"{value.name!r} is {dtype.value}, which the Open Inference Protocol cannot carry",
            "put a Cast to float16 or float32 between it and the client",
        )
    return dtype
