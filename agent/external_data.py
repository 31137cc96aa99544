"""Which weights outside of its file a graph refers to, without the onnx library, which a board does not have.

Reads the protobuf wire format (https://protobuf.dev/programming-guides/encoding/) of an ONNX ModelProto along the few
fields that lead to external data; everything else is skipped unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.errors import AgentError

Message = memoryview
# Tensors begin on pages of their own; what lies between neighbours is no more than a page.
_GAP_BYTES = 4096
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# A varint has at most ten bytes of seven bits each.
_VARINT_BITS = 70

# onnx.proto: field numbers of what may hold tensors. TensorProto.external_data is a list of (key, value) strings.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_INPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE = 1, 4, 5
_ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS = 5, 6, 11
_TENSOR_NAME, _TENSOR_EXTERNAL_DATA = 8, 13
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_GATHER = b"Gather"


@dataclass(frozen=True)
class Region:
    """Bytes of a file."""

    file: Path
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Outside:
    """Bytes of the tensors that a graph keeps outside of its file, each counted once.

    `whole` leaves out tables of which an operator reads rows: a run reads at least so much.
    """

    nbytes: int
    whole: int


def external_bytes(path: Path) -> int:
    """Bytes of all tensors that the graph keeps outside of its file, as `external_regions` has them."""
    return sum(region.nbytes for region in external_regions(path))


def external_regions(path: Path) -> tuple[Region, ...]:
    """Where the tensors are that the graph keeps outside of its file, subgraphs included; neighbours are joined.

    A tensor that states no length is the rest of its file. Raises AgentError when `path` is no ONNX graph.
    """
    return joined(region for _, region in _read(path)[0])


def outside(path: Path) -> Outside:
    """How much of its weights the graph keeps outside. Raises AgentError when `path` is no ONNX graph."""
    tensors, tables = _read(path)
    return Outside(
        sum(region.nbytes for region in {region for _, region in tensors}),
        sum(region.nbytes for region in {region for name, region in tensors if name not in tables}),
    )


def _read(path: Path) -> tuple[list[tuple[str, Region]], set[str]]:
    """(name and place of every tensor that is outside, names of what operators read by rows)."""
    try:
        # Only the graph and what is too small to be kept outside: the weights are not in this file.
        graphs = [each for _, graph in _fields(memoryview(path.read_bytes()), _MODEL_GRAPH) for each in _graphs(graph)]
        tensors = [
            (name, _region(path.parent, entry))
            for graph in graphs
            for name, entry in map(_tensor, _tensors(graph))
            if entry
        ]
        return tensors, {name for graph in graphs for name in _read_by_rows(graph)}
    except OSError as error:
        raise AgentError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, RecursionError):
        raise AgentError(f"{path.name} is not an ONNX graph", "copy the bundle again") from None


def _region(folder: Path, entry: dict[str, str]) -> Region:
    file, offset = folder / entry.get("location", ""), max(int(entry.get("offset", "0")), 0)
    if "length" in entry:
        return Region(file, offset, max(int(entry["length"]), 0))
    return Region(file, offset, max(file.stat().st_size - offset, 0))


def joined(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The same bytes in as few regions as can be; a tensor that is referred to twice counts once."""
    joined: list[Region] = []
    for region in sorted(set(regions), key=lambda each: (each.file, each.offset)):
        last = joined[-1] if joined else None
        if last is not None and last.file == region.file and region.offset <= last.end + _GAP_BYTES:
            joined[-1] = Region(last.file, last.offset, max(last.end, region.end) - last.offset)
        else:
            joined.append(region)
    return tuple(joined)


def _graphs(message: Message) -> Iterator[Message]:
    """The graph and those of its nodes, at any depth."""
    yield message
    for _, node in _fields(message, _GRAPH_NODE):
        for _, attribute in _fields(node, _NODE_ATTRIBUTE):
            for _, body in _fields(attribute, _ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
                yield from _graphs(body)


def _tensors(graph: Message) -> Iterator[Message]:
    for number, value in _fields(graph, _GRAPH_NODE, _GRAPH_INITIALIZER):
        if number == _GRAPH_INITIALIZER:
            yield value
            continue
        for _, attribute in _fields(value, _NODE_ATTRIBUTE):
            for _, tensor in _fields(attribute, _ATTRIBUTE_TENSOR):
                yield tensor


def _tensor(message: Message) -> tuple[str, dict[str, str]]:
    """(its name, where it is outside of the file)."""
    entries = [
        {number: str(value, "utf-8") for number, value in _fields(entry, _ENTRY_KEY, _ENTRY_VALUE)}
        for _, entry in _fields(message, _TENSOR_EXTERNAL_DATA)
    ]
    name = next((str(value, "utf-8") for _, value in _fields(message, _TENSOR_NAME)), "")
    return name, {entry.get(_ENTRY_KEY, ""): entry.get(_ENTRY_VALUE, "") for entry in entries}


def _read_by_rows(graph: Message) -> Iterator[str]:
    """Names of all that a Gather of any kind takes, its indices too: those are never weights that matter."""
    for _, node in _fields(graph, _GRAPH_NODE):
        if any(bytes(kind).startswith(_GATHER) for _, kind in _fields(node, _NODE_OPERATOR)):
            yield from (str(name, "utf-8") for _, name in _fields(node, _NODE_INPUT))


def _fields(message: Message, *wanted: int) -> Iterator[tuple[int, Message]]:
    """(number, bytes) of the length-delimited fields that are wanted. Raises ValueError or IndexError."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        elif kind == _BYTES:
            size, at = _varint(message, at)
            if at + size > len(message):
                raise ValueError("a field goes past its message")
            if tag >> 3 in wanted:
                yield tag >> 3, message[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {kind}")


def _varint(message: Message, at: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = 0
    for shift in range(0, _VARINT_BITS, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a varint without an end")
