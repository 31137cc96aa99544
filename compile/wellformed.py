"""What the ONNX specification asks of a file, checked on the message itself, before any library builds on it.

Most of what reads a graph (onnx-ir, ONNX's version converter and inference, onnxruntime) takes this for granted, and
ends in a traceback or a crash where it is not so. ONNX's own checker is not asked: it reads all weights, and wants
nodes sorted, which exporters do not always do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import Message

from compile.errors import ModelError
from compile.sparse import proto_graphs, proto_nodes

_HINT = "export the model again"
_KINDS = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}
# Larger than any file; products beyond it are not worth computing with.
_MOST_ELEMENTS = 1 << 59
_EXTERNAL_KEYS = ("location", "offset", "length", "checksum", "basepath")
# Attributes of these types are messages: without one there is nothing to read.
_HELD_AS = {
    onnx.AttributeProto.FLOAT: "f",
    onnx.AttributeProto.INT: "i",
    onnx.AttributeProto.STRING: "s",
    onnx.AttributeProto.TENSOR: "t",
    onnx.AttributeProto.GRAPH: "g",
    onnx.AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    onnx.AttributeProto.TYPE_PROTO: "tp",
    onnx.AttributeProto.FLOATS: "floats",
    onnx.AttributeProto.INTS: "ints",
    onnx.AttributeProto.STRINGS: "strings",
    onnx.AttributeProto.TENSORS: "tensors",
    onnx.AttributeProto.GRAPHS: "graphs",
    onnx.AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    onnx.AttributeProto.TYPE_PROTOS: "type_protos",
}
_MESSAGES = ("t", "g", "sparse_tensor", "tp")


def check_wellformed(model: onnx.ModelProto, path: Path) -> None:
    """Raise ModelError where a tensor, a declared type, an operator set or a node is not as ONNX defines it.

    Sizes below zero, which some exporters write, become open dimensions, and element types that say nothing no types;
    entries for external data that ONNX does not know, and how nodes are spread over devices, are dropped; in place.
    """
    _check_text(model, path)
    opsets = _opsets(model.opset_import, path)
    for graph in proto_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _check_value(value, path)
    for tensor in _tensors(model):
        _check_tensor(tensor, path)
    for node in proto_nodes(model.graph.node):
        node.ClearField("device_configurations")
        _check_node(node, opsets, f"{path}: {node.op_type} node {node.name!r}", inside_function=False)
    for function in model.functions:
        own = opsets | _opsets(function.opset_import, path)
        for node in proto_nodes(function.node):
            where = f"{path}: {node.op_type} node {node.name!r} of function {function.name!r}"
            node.ClearField("device_configurations")
            _check_node(node, own, where, inside_function=True)


def _opsets(imports: Iterable[onnx.OperatorSetIdProto], path: Path) -> dict[str, int]:
    """Version of each domain; the domain of ONNX has two names."""
    versions: dict[str, int] = {}
    for entry in imports:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        if not 0 < entry.version < 1 << 31:
            raise ModelError(f"{path} imports opset {entry.version} of {entry.domain or 'ai.onnx'!r}", _HINT)
        if versions.setdefault(domain, entry.version) != entry.version:
            raise ModelError(f"{path} imports two opsets of {entry.domain or 'ai.onnx'!r}", _HINT)
    return versions


def _check_text(model: onnx.ModelProto, path: Path) -> None:
    """Protobuf reads names that are not UTF-8, and refuses to write them."""
    waiting: list[Message] = [model]
    while waiting:
        message = waiting.pop()
        if isinstance(message, onnx.TensorProto):  # not its fields: data would be copied
            waiting.extend(message.external_data)
            held = [(onnx.TensorProto.DESCRIPTOR.fields_by_name["name"], message.name)]
        else:
            held = message.ListFields()
        for field, entry in held:
            if field.message_type is not None:
                waiting.extend(entry if field.is_repeated else [entry])
            elif field.type == field.TYPE_STRING:
                for text in entry if field.is_repeated else [entry]:
                    if isinstance(text, bytes):
                        kind = f"{field.containing_type.name}.{field.name}"
                        raise ModelError(f"{path}: {kind} {text[:40]!r} is not text in UTF-8", _HINT)


# -- types and tensors -----------------------------------------------------------------------------------------


def _check_value(value: onnx.ValueInfoProto, path: Path) -> None:
    kind = value.type
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = (kind.sequence_type if kind.HasField("sequence_type") else kind.optional_type).elem_type
    if kind.WhichOneof("value") != "tensor_type":
        return
    element = kind.tensor_type.elem_type
    if element == onnx.TensorProto.UNDEFINED:
        value.ClearField("type")
    elif element not in _KINDS:
        raise ModelError(f"{path}: {value.name!r} has the unknown element type {element}", _HINT)
    for dim in kind.tensor_type.shape.dim:
        if dim.dim_value < 0:
            dim.Clear()


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in proto_graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in proto_nodes(nodes):
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                if attribute.HasField("sparse_tensor"):
                    yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)


def _check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    """Its type is known, its shape is one, and data of just that size stand where that type's data belong."""
    where, kind, dims = f"{path}: tensor {tensor.name!r}", tensor.data_type, list(tensor.dims)
    if kind == onnx.TensorProto.UNDEFINED:
        raise ModelError(f"{where} has no element type", _HINT)
    if kind not in _KINDS:
        raise ModelError(f"{where} has the unknown element type {kind}", _HINT)
    elements, outside = math.prod(dims), tensor.data_location == onnx.TensorProto.EXTERNAL
    # Numpy counts the elements without those axes that have none.
    vast = math.prod(max(dim, 1) for dim in dims) > _MOST_ELEMENTS
    if any(dim < 0 for dim in dims) or (vast and (outside or not elements)):
        raise ModelError(f"{where} has the shape {dims}", _HINT)
    if outside and kind == onnx.TensorProto.STRING:
        raise ModelError(f"{where} holds strings, which cannot stand outside the model file", _HINT)
    if outside:
        known = [entry for entry in tensor.external_data if entry.key in _EXTERNAL_KEYS]
        del tensor.external_data[:]
        tensor.external_data.extend(known)
        return
    if tensor.HasField("segment"):
        raise ModelError(f"{where} is a part of one", "save the model with whole tensors")
    if tensor.HasField("raw_data"):
        if kind == onnx.TensorProto.STRING:
            raise ModelError(f"{where} holds strings as raw bytes", _HINT)
        needed = -(-elements * _bits(kind) // 8)
        if len(tensor.raw_data) != needed:
            raise ModelError(
                f"{where} needs {needed} bytes for its shape {dims}, the file has {len(tensor.raw_data)}", _HINT
            )
        return
    field = onnx.helper.tensor_dtype_to_field(kind)
    held, needed = len(getattr(tensor, field)), _entries(kind, elements)
    other = next((f.name for f, _ in tensor.ListFields() if f.name.endswith("_data") and f.name != field), None)
    if held != needed or other:
        raise ModelError(
            f"{where} needs {needed} entries in {field} for its shape {dims}, the file has {held}"
            + (f", and {other}" if other else ""),
            _HINT,
        )


def _bits(kind: int) -> int:
    return ir.DataType(kind).bitwidth


def _entries(kind: int, elements: int) -> int:
    """Numbers in the typed field: real and imaginary parts stand apart, two or four of the smallest together."""
    if kind in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        return elements * 2
    packed = kind != onnx.TensorProto.STRING and _bits(kind) in (2, 4)
    return -(-elements * _bits(kind) // 8) if packed else elements


# -- nodes -----------------------------------------------------------------------------------------------------


def _check_node(node: onnx.NodeProto, opsets: Mapping[str, int], where: str, *, inside_function: bool) -> None:
    """Its attributes are whole, and it has the inputs, outputs and attributes of its operator, if that is ONNX's."""
    names = [attribute.name for attribute in node.attribute]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ModelError(f"{where} has two attributes {twice!r}", _HINT)
    for attribute in node.attribute:
        _check_attribute(attribute, where, inside_function=inside_function)
    schema = _schema(node, opsets, where)
    if schema is not None:
        _check_operands(node, schema, where)
        _check_attributes(node, schema, where)


def _check_operands(node: onnx.NodeProto, schema: onnx.defs.OpSchema, where: str) -> None:
    _check_count(len(node.input), schema.min_input, schema.max_input, "inputs", where)
    _check_count(len(node.output), schema.min_output, schema.max_output, "outputs", where)
    for index, name in enumerate(node.input):
        # The last one may stand for any number of inputs. Of those, onnxruntime reads what is not there.
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if not name and formal.option != onnx.defs.OpSchema.FormalParameterOption.Optional:
            raise ModelError(f"{where} lacks its input {index}, {formal.name!r}", _HINT)


def _check_attributes(node: onnx.NodeProto, schema: onnx.defs.OpSchema, where: str) -> None:
    for attribute in node.attribute:
        known = schema.attributes.get(attribute.name)
        if known is None:
            if attribute.name.startswith("_"):
                continue
            listed = ", ".join(sorted(schema.attributes)) or "none"
            raise ModelError(f"{where} has an attribute {attribute.name!r}; its operator has {listed}", _HINT)
        wanted = str(known.type).rpartition(".")[2]
        if _named(attribute) != wanted:
            raise ModelError(f"{where}: attribute {attribute.name!r} is {_named(attribute)}, not {wanted}", _HINT)
    given = {attribute.name: attribute for attribute in node.attribute}
    missing = next((name for name, each in schema.attributes.items() if each.required and name not in given), None)
    if missing is not None:
        raise ModelError(f"{where} lacks its attribute {missing!r}", _HINT)
    if schema.name == "Constant" and not schema.domain and len(given) != 1:
        raise ModelError(f"{where} has {len(given)} values; a constant has one", _HINT)
    stated = given.get("num_outputs", given.get("split"))
    if schema.name == "Split" and stated is not None and not stated.ref_attr_name:
        parts = stated.i if stated.name == "num_outputs" else len(stated.ints)
        if parts != len(node.output):
            # ONNX's inference ends the process where there are more outputs than parts.
            raise ModelError(f"{where} has {len(node.output)} outputs, and makes {parts}", _HINT)


def _schema(node: onnx.NodeProto, opsets: Mapping[str, int], where: str) -> onnx.defs.OpSchema | None:
    """None where the operator is not of ONNX: the runtime says whether it has it."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not domain and domain not in opsets:
        raise ModelError(f"{where} is one of ONNX's operators, and the model imports no operator set of ONNX", _HINT)
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        return None
    if schema.deprecated:
        raise ModelError(f"{where}: ONNX has no {schema.name} from opset {schema.since_version} on", _HINT)
    return schema


def _check_count(count: int, least: int, most: int, role: str, where: str) -> None:
    if not least <= count <= most:
        wanted = f"{least}" if least == most else f"{least} or more" if most >= 1 << 30 else f"{least} to {most}"
        raise ModelError(f"{where} has {count} {role}; its operator has {wanted}", _HINT)


def _check_attribute(attribute: onnx.AttributeProto, where: str, *, inside_function: bool) -> None:
    """It has a name, a type, and values of that type alone; in a function it may stand for one of the caller's."""
    held = [field.name for field, _ in attribute.ListFields() if field.name in _HELD_AS.values()]
    expected = _HELD_AS.get(attribute.type)
    if not attribute.name or expected is None:
        raise ModelError(f"{where} has an attribute {attribute.name!r} of type {_named(attribute)}", _HINT)
    if attribute.ref_attr_name:
        if not inside_function or held:
            raise ModelError(f"{where}: attribute {attribute.name!r} refers to {attribute.ref_attr_name!r}", _HINT)
    elif any(name != expected for name in held) or (expected in _MESSAGES and not held):
        raise ModelError(
            f"{where}: attribute {attribute.name!r} is {_named(attribute)}, and holds {', '.join(held) or 'nothing'}",
            _HINT,
        )


def _named(attribute: onnx.AttributeProto) -> str:
    return str(onnx.AttributeProto.AttributeType.Name(attribute.type))
