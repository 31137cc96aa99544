"""Damaged ONNX files for bench.fuzz_import: seeds, mutators, and cases that follow from two numbers alone.

A case is a seed model and a few mutations. Most change the protobuf message, field by field (whatever the schema has: a
dimension, an element type, a name, an attribute, an opset), or its graph on purpose; the rest change the bytes of the
file. Each mutation draws from a generator of its own, so that any part of the list can be applied without the others.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.external_data_helper
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from bench.conformance import conformance_models
from tests.cases.forms import FORMS
from tests.support.graphs import Random, models

WEIGHTS = "weights.bin"
"""The external data of a seed that has some."""
# Larger seeds are left out: what they hold more of is weights.
MAX_SEED_BYTES = 1 << 16
RANDOM_GRAPHS = 100
CONFORMANCE_EVERY = 12
EXTERNAL_EVERY = 4


@dataclasses.dataclass(frozen=True)
class Seed:
    """A valid model to start from, and what stands beside it in `WEIGHTS`."""

    name: str
    model: bytes
    weights: bytes = b""


@dataclasses.dataclass(frozen=True)
class Case:
    """One damaged model: case `number` of the run with that `seed`; `steps`: which of its mutations are applied."""

    seed: int
    number: int
    steps: tuple[int, ...]

    def __str__(self) -> str:
        return f"--seed {self.seed} --case {self.number} --steps {','.join(map(str, self.steps)) or 'none'}"


@dataclasses.dataclass(frozen=True)
class Made:
    """The files of a case, and which mutations, by name, led from which seed to them."""

    model: bytes
    weights: bytes
    origin: str
    mutations: tuple[str, ...]


def whole_case(seed: int, number: int) -> Case:
    """The case with all of its mutations: one to six, few more often than many."""
    rng = random.Random(f"{seed}/{number}")
    return Case(seed, number, tuple(range(min(1 + int(rng.expovariate(0.8)), 6))))


def make(case: Case, seeds: Sequence[Seed]) -> Made:
    """Apply the case's mutations to its seed: those of the message first, then those of the bytes."""
    rng = random.Random(f"{case.seed}/{case.number}/seed")
    start, donor = rng.choice(seeds), rng.choice(seeds)
    chosen = [(rng.random() < 0.85, random.Random(f"{case.seed}/{case.number}/{step}")) for step in range(6)]
    proto, other = onnx.ModelProto.FromString(start.model), onnx.ModelProto.FromString(donor.model)
    names = []
    for step in case.steps:
        structured, own = chosen[step]
        if structured:
            mutator = own.choices(_ON_MESSAGES, [weight for _, weight in _ON_MESSAGES])[0][0]
            with contextlib.suppress(DecodeError):  # nothing that deep can be copied
                mutator(own, proto, other)
            names.append(mutator.__name__.strip("_"))
    model, weights = proto.SerializeToString(), start.weights
    for step in case.steps:
        structured, own = chosen[step]
        if not structured:
            edit = own.choice(_ON_BYTES)
            if weights and own.random() < 0.25:
                weights = edit(own, weights, donor.model)
            else:
                model = edit(own, model, donor.model)
            names.append(edit.__name__.strip("_"))
    return Made(model, weights, start.name, tuple(names))


# -- seeds -----------------------------------------------------------------------------------------------------


def make_seeds(conformance: bool = True) -> list[Seed]:
    """Forms that have broken tools, random graphs, conformance models; some with their weights beside them."""
    found = [Seed(f"form: {name}", form.build().SerializeToString()) for name, form in FORMS.items()]
    found += [Seed(f"random graph {i}", proto.SerializeToString()) for i, proto in enumerate(_random_graphs())]
    if conformance:
        for case in conformance_models()[::CONFORMANCE_EVERY]:
            found.append(Seed(case.name, case.path.read_bytes()))
    small = [each for each in found if len(each.model) <= MAX_SEED_BYTES]
    return small + [moved for each in small[::EXTERNAL_EVERY] if (moved := _with_external_data(each)).weights]


def _random_graphs() -> list[onnx.ModelProto]:
    drawn: list[onnx.ModelProto] = []

    @hypothesis_seed(0)
    @settings(
        max_examples=RANDOM_GRAPHS,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(models())
    def draw(each: Random) -> None:
        drawn.append(each.proto)

    draw()
    return drawn


def _with_external_data(seed: Seed) -> Seed:
    proto = onnx.ModelProto.FromString(seed.model)
    with tempfile.TemporaryDirectory() as folder:
        onnx.external_data_helper.convert_model_to_external_data(proto, location=WEIGHTS, size_threshold=16)
        onnx.save(proto, Path(folder) / "model.onnx")
        file = Path(folder) / WEIGHTS
        weights = file.read_bytes() if file.exists() else b""
        return Seed(f"{seed.name}, weights outside", (Path(folder) / "model.onnx").read_bytes(), weights)


# -- mutations of bytes ------------------------------------------------------------------------------------------

_BYTES = (0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x12, 0x08)


def _flip_bits(rng: random.Random, data: bytes, _: bytes) -> bytes:
    changed = bytearray(data)
    for _i in range(rng.choice((1, 1, 2, 8)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite_bytes(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at, count = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 8, 10))
    return data[:at] + bytes(rng.choice(_BYTES) for _i in range(count)) + data[at + count :]


def _truncate(rng: random.Random, data: bytes, _: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert_bytes(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 2, 4, 64))) + data[at:]


def _delete_bytes(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 4, 64)) :]


def _swap_blocks(rng: random.Random, data: bytes, _: bytes) -> bytes:
    a, b, c, d = sorted(rng.randrange(len(data) + 1) for _i in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _splice_bytes(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + donor[rng.randrange(len(donor) + 1) :]


_ON_BYTES: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    _flip_bits, _overwrite_bytes, _truncate, _insert_bytes, _delete_bytes, _swap_blocks, _splice_bytes,
)  # fmt: skip


# -- mutations of the message ----------------------------------------------------------------------------------

_INTEGERS = (
    0, 1, -1, 2, 3, 7, 8, 16, 21, 64, 255, 4096, 65535, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40,
    1 << 62, (1 << 63) - 1, -(1 << 31), -(1 << 63), 1000, 1001,
)  # fmt: skip
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, 3.4e38, float("inf"), -float("inf"), float("nan"))
_STRINGS = (
    "", "x", "y", "w", "value", "axis", "axes", "perm", "to", "body", "then_branch", "ai.onnx", "com.microsoft",
    "local", "a/../../b", "/etc/passwd", "../secret", "é 名", "a\nb", "a\0b", "x" * 300, "%s%n{}", "SAME_UPPER", "int4",
    WEIGHTS, "model.onnx", ".", "0", "-1", str(1 << 40), str(1 << 63), "1e9", "many",
)  # fmt: skip
_OPERATORS = tuple(sorted({schema.name for schema in onnx.defs.get_all_schemas()}))
_INT32 = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SFIXED32)

Place = tuple[Message, FieldDescriptor]


def _messages(root: Message) -> Iterator[Message]:
    """The message and all below it; attributes of all kinds, so that bodies are among them."""
    waiting = [root]
    while waiting:
        message = waiting.pop()
        yield message
        for field, held in message.ListFields():
            if field.message_type is not None:
                waiting.extend(held if field.is_repeated else [held])


def _pick_field(rng: random.Random, root: Message, *, unset: bool) -> Place:
    """A place in the message: first a kind of field, then one of them, so that rare kinds are as likely as others."""
    kinds: dict[str, list[Place]] = collections.defaultdict(list)
    for message in _messages(root):
        fields = message.DESCRIPTOR.fields if unset else [field for field, _ in message.ListFields()]
        for field in fields:
            kinds[field.full_name].append((message, field))
    return rng.choice(kinds[rng.choice(list(kinds))])


def _change_a_field(rng: random.Random, proto: onnx.ModelProto, donor: onnx.ModelProto) -> None:
    _change(rng, proto, donor, *_pick_field(rng, proto, unset=False))


def _set_a_field(rng: random.Random, proto: onnx.ModelProto, donor: onnx.ModelProto) -> None:
    _change(rng, proto, donor, *_pick_field(rng, proto, unset=True))


def _change(
    rng: random.Random, proto: onnx.ModelProto, donor: onnx.ModelProto, message: Message, field: FieldDescriptor
) -> None:
    held: Any = getattr(message, field.name)
    if field.is_repeated:
        _change_list(rng, proto, donor, held, field)
    elif rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type is not None:
        found = _another(rng, proto, donor, field)
        held.CopyFrom(found) if found is not None else held.SetInParent()
    else:
        setattr(message, field.name, _scalar(rng, proto, field, held))


def _change_list(
    rng: random.Random, proto: onnx.ModelProto, donor: onnx.ModelProto, held: Any, field: FieldDescriptor
) -> None:
    """Drop, repeat, move, add or change an element."""
    what = rng.choice(("drop", "repeat", "move", "add", "change", "change", "change"))
    at = rng.randrange(len(held)) if held else -1
    if what == "add" or at < 0:
        found = _another(rng, proto, donor, field) if field.message_type else _scalar(rng, proto, field, None)
        held.append(found) if found is not None else held.add()
    elif what == "drop":
        del held[at]
    elif what == "repeat":
        held.append(held[at])
    elif what == "move":
        items = [_copy(item) for item in held]
        items.insert(rng.randrange(len(items)), items.pop(at))
        del held[:]
        held.extend(items)
    elif field.message_type is None:
        held[at] = _scalar(rng, proto, field, held[at])
    else:
        found = _another(rng, proto, donor, field)
        if found is not None:
            held[at].CopyFrom(found)


def _copy(item: Any) -> Any:
    if not isinstance(item, Message):
        return item
    made = type(item)()
    made.CopyFrom(item)
    return made


def _another(
    rng: random.Random, proto: onnx.ModelProto, donor: onnx.ModelProto, field: FieldDescriptor
) -> Message | None:
    """A copy of a message of that type, of this model or of another; None where there is none."""
    root = donor if rng.random() < 0.3 else proto
    found = [each for each in _messages(root) if each.DESCRIPTOR.full_name == field.message_type.full_name]
    return _copy(rng.choice(found)) if found else None


def _scalar(rng: random.Random, proto: onnx.ModelProto, field: FieldDescriptor, old: Any) -> Any:
    kind = field.type
    if kind == FieldDescriptor.TYPE_ENUM:
        return rng.choice([each.number for each in field.enum_type.values])
    if kind == FieldDescriptor.TYPE_STRING:
        return _text(rng, proto, field)
    if kind == FieldDescriptor.TYPE_BYTES:
        held = old or rng.choice(_STRINGS).encode()
        return rng.choice(_ON_BYTES)(rng, held, rng.choice(_STRINGS).encode())
    if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(_FLOATS)
    near = [(old or 0) + 1, (old or 0) - 1, (old or 0) * 2, rng.randrange(30)]
    low, high = (-(1 << 31), (1 << 31) - 1) if kind in _INT32 else (-(1 << 63), (1 << 63) - 1)
    if kind == FieldDescriptor.TYPE_UINT64:
        low, high = 0, (1 << 64) - 1
    return rng.choice([value for value in (*_INTEGERS, *near, *near) if low <= value <= high])


def _text(rng: random.Random, proto: onnx.ModelProto, field: FieldDescriptor) -> str:
    """A name that stands somewhere in the model, an operator, or an odd one."""
    if field.name == "op_type" and rng.random() < 0.7:
        return rng.choice(_OPERATORS)
    used = {
        text
        for message in _messages(proto)
        for each, held in message.ListFields()
        if each.type == FieldDescriptor.TYPE_STRING
        for text in (held if each.is_repeated else [held])
    }
    return str(rng.choice(sorted(used) if used and rng.random() < 0.7 else _STRINGS))


def _of(proto: onnx.ModelProto, kind: str) -> list[Any]:
    return [each for each in _messages(proto) if each.DESCRIPTOR.name == kind]


def _change_dimension(rng: random.Random, proto: onnx.ModelProto, _: onnx.ModelProto) -> None:
    """Of a tensor or of a declared shape."""
    lists = [tensor.dims for tensor in _of(proto, "TensorProto") if tensor.dims]
    places = [dim for shape in _of(proto, "TensorShapeProto") for dim in shape.dim]
    wanted = rng.choice((0, -1, 1, 2, 1 << 16, 1 << 31, 1 << 62))
    if lists and (not places or rng.random() < 0.5):
        dims = rng.choice(lists)
        dims[rng.randrange(len(dims))] = wanted
    elif places:
        rng.choice(places).dim_value = wanted


def _change_type(rng: random.Random, proto: onnx.ModelProto, _: onnx.ModelProto) -> None:
    """Of a tensor, with its data as it was, or of a declared value."""
    wanted = rng.randrange(26)
    tensor = rng.choice([*_of(proto, "TensorProto"), *_of(proto, "Tensor"), None])
    if tensor is not None:
        setattr(tensor, "data_type" if isinstance(tensor, onnx.TensorProto) else "elem_type", wanted)


def _change_operator(rng: random.Random, proto: onnx.ModelProto, _: onnx.ModelProto) -> None:
    nodes = _of(proto, "NodeProto")
    if nodes:
        rng.choice(nodes).op_type = rng.choice(_OPERATORS)


def _rewire(rng: random.Random, proto: onnx.ModelProto, _: onnx.ModelProto) -> None:
    """Let a node read something else of the model, itself and nothing among it."""
    nodes = [node for node in _of(proto, "NodeProto") if node.input]
    if nodes:
        node = rng.choice(nodes)
        made = [name for each in nodes for name in (*each.input, *each.output)]
        node.input[rng.randrange(len(node.input))] = rng.choice([*made, *node.output, ""])


def _refer_to_itself(rng: random.Random, proto: onnx.ModelProto, _: onnx.ModelProto) -> None:
    """A node in its own body, a function that calls itself, or a graph inside of itself."""
    nodes = _of(proto, "NodeProto")
    if not nodes:
        return
    node = rng.choice(nodes)
    if proto.functions and rng.random() < 0.5:
        function = rng.choice(proto.functions)
        call = onnx.NodeProto(op_type=function.name, domain=function.domain, input=function.input, output=["self"])
        call.output.extend(function.output[1:])
        function.node.insert(rng.randrange(len(function.node) + 1), call)
        return
    outer = _copy(proto.graph)
    attribute = rng.choice(node.attribute) if node.attribute and rng.random() < 0.5 else node.attribute.add(name="body")
    attribute.type = onnx.AttributeProto.GRAPH
    attribute.g.CopyFrom(outer)


def _nest(rng: random.Random, proto: onnx.ModelProto, _: onnx.ModelProto) -> None:
    """Bodies in bodies, deeper than anybody writes them, some deeper than protobuf reads."""
    inner = _copy(proto.graph)
    for _i in range(rng.choice((5, 20, 40))):
        outer = onnx.GraphProto(name="outer", output=inner.output)
        node = outer.node.add(op_type="If", input=["c"], output=[value.name for value in inner.output])
        for name in ("then_branch", "else_branch"):
            body = node.attribute.add(name=name, type=onnx.AttributeProto.GRAPH)
            body.g.CopyFrom(inner if name == "then_branch" else onnx.GraphProto(name="empty"))
        inner = outer
    names = [value.name for value in proto.graph.output]
    body = proto.graph.node.add(op_type="If", input=["c"], output=[f"{name}.outer" for name in names])
    body.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g.CopyFrom(inner)
    for value in proto.graph.output:
        value.name += ".outer"


def _move_data_outside(rng: random.Random, proto: onnx.ModelProto, _: onnx.ModelProto) -> None:
    """A tensor's bytes said to stand in a file, or other entries for one that already does."""
    tensors = _of(proto, "TensorProto")
    if not tensors:
        return
    tensor = rng.choice(tensors)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    if rng.random() < 0.5:
        tensor.ClearField("raw_data")
    for key in rng.sample(("location", "offset", "length", "checksum", "basepath"), rng.randrange(1, 4)):
        text = rng.choice(_STRINGS) if rng.random() < 0.5 else str(rng.choice(_INTEGERS))
        tensor.external_data.add(key=key, value=WEIGHTS if key == "location" and rng.random() < 0.7 else text)


def _borrow_a_node(rng: random.Random, proto: onnx.ModelProto, donor: onnx.ModelProto) -> None:
    """A node of another model, its inputs and outputs renamed to what this one has."""
    nodes, mine = _of(donor, "NodeProto"), _of(proto, "NodeProto")
    if nodes and mine:
        made = _copy(rng.choice(nodes))
        place = rng.choice(mine)
        names = [*place.input, *(value.name for value in proto.graph.output), ""]
        made.input[:] = [rng.choice(names) for _i in made.input]
        made.output[: len(place.output)] = place.output
        place.CopyFrom(made)


_ON_MESSAGES: tuple[tuple[Callable[[random.Random, onnx.ModelProto, onnx.ModelProto], None], int], ...] = (
    (_change_a_field, 10),
    (_set_a_field, 5),
    (_change_dimension, 3),
    (_change_type, 3),
    (_change_operator, 3),
    (_rewire, 3),
    (_refer_to_itself, 1),
    (_nest, 1),
    (_move_data_outside, 1),
    (_borrow_a_node, 2),
)


def parsed(made: Made) -> onnx.ModelProto | None:
    """The message, where it still is one."""
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(made.model)
    except DecodeError:
        return None
    return proto
