"""Plans that were tampered with, in bundles as the compiler makes them."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import helper

from agent.certificate import check_certificate
from agent.external_data import outside
from agent.models import open_model
from bench.big_model import Shape, generate
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import MIB, Board, load_board
from targets.budget import FINALISE, MemoryPlan, Phase, Term, budget_bytes
from targets.bundle import MANIFEST, Manifest, Residency, dumps, read_manifest, sealed
from targets.errors import BudgetError, BundleError, TightfitError
from targets.recipe import memory_bytes, parse_recipe
from targets.tensor import DType
from tests.support.bundles import dense, model_of, plan_of
from tests.support.decoders import decoder
from tests.support.images import CLASSIFIER, COLOURS
from tests.support.models import save

BUDGET = 3400 * MIB
BOARD = load_board("raspberry-pi-5-4gb")
HEAP, MAPPED, STREAMED = Residency.HEAP, Residency.MAPPED, Residency.STREAMED


def board_of(budget: int) -> Board:
    """A board of that name that leaves about `budget` bytes."""
    total = -(-budget * 100 // 85 // MIB)
    memory = msgspec.structs.replace(BOARD.memory, mem_total_mib=total, physical_mib=total, os_reserve_mib=1)
    return msgspec.structs.replace(BOARD, memory=memory)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle from the heap, one that is mapped, one that is streamed but for a segment or two, one whose requests can
    be put together, one with a recipe."""
    folder = tmp_path_factory.mktemp("made")
    source = folder / "decoder.onnx"
    generate(source, Shape(hidden=256, layers=6, heads=4, dtype="float32"))
    shapes = (parse_shape("x=1,1..4,256"),)
    int4 = Options("int4", shapes, segments=2, slots=2)
    compile_model(source, BOARD, folder / "heap", int4)
    compile_model(source, BOARD, folder / "mapped", dataclasses.replace(int4, residency=MAPPED))
    compile_model(source, board_of(168 * MIB), folder / "mixed", Options(shapes=shapes, segments=6))
    x, y = dense("x", DType.FLOAT32, 1, 3, 8, 8), dense("y", DType.FLOAT32, 1, 3)
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["m"]), helper.make_node("Flatten", ["m"], ["y"])]
    (folder / "labels.txt").write_text(COLOURS)
    n, w = dense("x", DType.FLOAT32, "n", 64, largest=512), {"w": np.ones((64, 16), np.float32)}
    rows = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], [n], [dense("y", DType.FLOAT32, "n", 16, largest=128)], w
    )
    compile_model(save(folder, rows), BOARD, folder / "rows", Options(shapes=(parse_shape("x=1..8,64"),)))
    recipe = Options(recipe=parse_recipe(CLASSIFIER, "test"), assets=(folder / "labels.txt",))
    compile_model(save(folder, model_of(nodes, [x], [y])), BOARD, folder / "recipe", recipe)
    bundles = {name: folder / name for name in NAMES}
    for bundle in bundles.values():
        open_model(bundle, BUDGET)
    placed = {name: {s.residency for s in read_manifest(bundle).segments} for name, bundle in bundles.items()}
    assert placed == {"heap": {HEAP}, "mapped": {MAPPED}, "mixed": {MAPPED, STREAMED}, "rows": {HEAP}, "recipe": {HEAP}}
    return bundles


NAMES = ("heap", "mapped", "mixed", "rows", "recipe")


@pytest.fixture
def kept(made: dict[str, Path]) -> Iterator[dict[str, Path]]:
    """The same, with their manifests put back afterwards."""
    before = {bundle: (bundle / MANIFEST).read_bytes() for bundle in made.values()}
    yield made
    for bundle, data in before.items():
        (bundle / MANIFEST).write_bytes(data)


# --- any change at all


def paths(node: Any, start: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where every number, text and list is."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if not isinstance(node, dict):
        yield start
    for key, value in inner:
        yield from paths(value, (*start, key))


def changed(value: Any, data: st.DataObject) -> Any:
    """Something else in its place, of its own type or of another."""
    huge = st.sampled_from([0, -1, 1 << 31, 1 << 63, 10**30, 10**400, 0.5, "", None])
    if isinstance(value, list) and value:
        at = data.draw(st.integers(0, len(value) - 1))
        twice, without = [*value, value[at]], [*value[:at], *value[at + 1 :]]
        swapped = [value[at], *value[:at], *value[at + 1 :]]
        return data.draw(st.sampled_from([twice, without, swapped, [], None]))
    if isinstance(value, bool) or not isinstance(value, int):
        return data.draw(st.one_of(huge, st.text(max_size=5), st.sampled_from(["heap", "mapped", "file", "x"])))
    return data.draw(st.one_of(huge, st.integers(-3, 3).map(lambda step: value + step), st.just(value // 2)))


def tampered(bundle: Path, data: st.DataObject) -> dict[str, Any]:
    """The manifest's JSON with one leaf or list of plan, contract or segments changed."""
    fields: dict[str, Any] = json.loads((bundle / MANIFEST).read_bytes())
    part = data.draw(st.sampled_from(["plan", "contract", "segments"]))
    *path, last = data.draw(st.sampled_from(sorted(paths(fields[part], (part,)), key=str)))
    node: Any = fields
    for key in path:
        node = node[key]
    value = changed(copy.deepcopy(node[last]), data)
    assume((value, type(value)) != (node[last], type(node[last])))
    node[last] = value
    return fields


def same(data: bytes, manifest: Manifest) -> bool:
    """Whether it says what the manifest says: a list that was left out may be the one that is the default."""
    try:
        return msgspec.json.decode(data, type=Manifest) == manifest
    except (msgspec.DecodeError, OverflowError):
        return False


@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_change_is_refused(made: dict[str, Path], name: str, data: st.DataObject) -> None:
    bundle = made[name]
    before = (bundle / MANIFEST).read_bytes()
    text = json.dumps(tampered(bundle, data)).encode()
    assume(not same(text, read_manifest(bundle)))
    try:
        (bundle / MANIFEST).write_bytes(text)
        with pytest.raises((BundleError, BudgetError)) as caught:
            open_model(bundle, BUDGET)
        assert "\n" not in str(caught.value)
    finally:
        (bundle / MANIFEST).write_bytes(before)


@given(name=st.sampled_from(NAMES), data=st.data())
def test_what_is_sealed_again_is_taken_or_refused_in_one_line(
    made: dict[str, Path], name: str, data: st.DataObject
) -> None:
    bundle = made[name]
    before, refusal = (bundle / MANIFEST).read_bytes(), ""
    try:
        manifest = msgspec.json.decode(json.dumps(tampered(bundle, data)), type=Manifest)
    except (msgspec.DecodeError, OverflowError):
        return
    try:
        (bundle / MANIFEST).write_bytes(dumps(sealed(manifest)))
        open_model(bundle, BUDGET)
    except TightfitError as error:
        refusal = str(error)
    finally:
        (bundle / MANIFEST).write_bytes(before)
    assert "\n" not in refusal


# --- what stands against somebody who seals what he changed


def with_term(plan: MemoryPlan, phase: str, name: str, nbytes: int) -> MemoryPlan:
    def of(term: Term) -> Term:
        return msgspec.structs.replace(term, nbytes=nbytes) if term.name == name else term

    phases = [
        msgspec.structs.replace(each, terms=tuple(map(of, each.terms))) if phase in (each.name, "") else each
        for each in plan.phases
    ]
    return msgspec.structs.replace(plan, phases=tuple(phases))


def least_of(bundle: Path, manifest: Manifest) -> dict[tuple[str, str], int]:
    """(phase, term) -> the fewest bytes that the bundle allows it."""
    plan, contract, recipe = manifest.plan, manifest.contract, manifest.recipe
    load, run = plan.phase("load"), plan.phase("run")
    inputs = sum(spec.max_nbytes for spec in contract.inputs)
    least = {
        ("run", "io_slots"): plan.slots * (inputs + sum(spec.max_nbytes for spec in contract.outputs)),
        ("run", "bodies"): 2 * plan.slots * max(inputs, recipe.decode.max_bytes if recipe else 0),
        ("run", "activations"): plan.arena.height,
        ("", "runtime"): BOARD.memory.runtime_fixed_mib * MIB,
        ("load", "runtime"): run.nbytes("runtime"),
        ("load", "service"): run.nbytes("service"),
        ("load", "session"): run.nbytes("session"),
        ("load", "weights"): run.nbytes("weights"),
    }
    if contract.batch:
        least["run", "batch"] = inputs
    if recipe:
        least["run", "recipe"] = memory_bytes(recipe, contract)
    if plan.sweep:
        sizes, streamed = plan.sweep.segment_bytes, plan.sweep.streamed
        least["run", "mapped_weights"] = sum(nbytes for at, nbytes in enumerate(sizes) if at not in streamed)
        places = [[sizes[at] for at in streamed[start::2]] for start in (0, 1)]
        least["run", "ring"] = sum(max(place, default=0) for place in places)
    else:
        files = [bundle / segment.file for segment in manifest.segments]
        term, other = ("mapped_weights", "weights") if run.nbytes("weights") == 0 else ("weights", "mapped_weights")
        least["run", term] = max(sum(outside(file).nbytes for file in files) - run.nbytes(other), 0)
    assert all(load.term(name) or run.term(name) for _, name in least)
    return {place: nbytes for place, nbytes in least.items() if nbytes}


@given(name=st.sampled_from(NAMES), data=st.data())
def test_no_term_can_be_understated(made: dict[str, Path], name: str, data: st.DataObject) -> None:
    bundle = made[name]
    manifest = read_manifest(bundle)
    before = (bundle / MANIFEST).read_bytes()
    (phase, term), least = data.draw(st.sampled_from(sorted(least_of(bundle, manifest).items())))
    nbytes = data.draw(st.one_of(st.just(least - 1), st.integers(0, least - 1)))
    try:
        plan = with_term(manifest.plan, phase, term, nbytes)
        (bundle / MANIFEST).write_bytes(dumps(sealed(msgspec.structs.replace(manifest, plan=plan))))
        with pytest.raises(BudgetError):
            open_model(bundle, BUDGET)
    finally:
        (bundle / MANIFEST).write_bytes(before)


Change = Callable[[Manifest], Manifest]


def of_plan(**changes: Callable[[Any], Any]) -> Change:
    def change(manifest: Manifest) -> Manifest:
        new = {name: how(getattr(manifest.plan, name)) for name, how in changes.items()}
        return msgspec.structs.replace(manifest, plan=msgspec.structs.replace(manifest.plan, **new))

    return change


def of_sweep(**changes: Callable[[Any], Any]) -> Change:
    return of_plan(
        sweep=lambda sweep: msgspec.structs.replace(sweep, **{k: how(getattr(sweep, k)) for k, how in changes.items()})
    )


def of_arena(**changes: Callable[[Any], Any]) -> Change:
    return of_plan(
        arena=lambda arena: msgspec.structs.replace(arena, **{k: how(getattr(arena, k)) for k, how in changes.items()})
    )


def of_input(nbytes: Callable[[int], int]) -> Change:
    def change(manifest: Manifest) -> Manifest:
        first, *others = manifest.contract.inputs
        smaller = msgspec.structs.replace(first, max_nbytes=nbytes(first.max_nbytes))
        contract = msgspec.structs.replace(manifest.contract, inputs=(smaller, *others))
        return msgspec.structs.replace(manifest, contract=contract)

    return change


def wider(manifest: Manifest) -> Manifest:
    ranges = {name: type(dim)(dim.min, dim.opt, dim.max + 1) for name, dim in manifest.contract.dims.items()}
    return msgspec.structs.replace(manifest, contract=msgspec.structs.replace(manifest.contract, dims=ranges))


def placed(residency: Residency, *at: int) -> Change:
    def change(manifest: Manifest) -> Manifest:
        segments = [
            msgspec.structs.replace(each, residency=residency) if not at or step in at else each
            for step, each in enumerate(manifest.segments)
        ]
        return msgspec.structs.replace(manifest, segments=tuple(segments))

    return change


def without_phase(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    return tuple(phase for phase in phases if phase.name != FINALISE)


def without_term(name: str) -> Callable[[tuple[Phase, ...]], tuple[Phase, ...]]:
    return lambda phases: tuple(Phase(p.name, tuple(t for t in p.terms if t.name != name)) for p in phases)


def twice(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    return tuple(Phase(p.name, (*p.terms, p.terms[0])) for p in phases)


def at_the_start(buffers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every buffer at the start of the arena: those that are live together overlap."""
    return tuple(msgspec.structs.replace(buffer, offset=0) for buffer in buffers)


def less(nbytes: int) -> int:
    return nbytes - 1


UNDERSTATED: dict[str, tuple[str, Change, str]] = {
    "more than the board leaves": ("heap", of_plan(budget_bytes=lambda _: budget_bytes(BOARD) + 1), "leaves"),
    "more slots": ("heap", of_plan(slots=lambda slots: slots + 1), "for its 3 slots"),
    "no slots": ("heap", of_plan(slots=lambda _: 0), "no slots"),
    "an input's bytes": ("heap", of_input(less), "its dimensions allow"),
    "a wider range": ("heap", wider, "its dimensions allow"),
    "a lower arena": ("heap", of_arena(height=lambda _: 64), "past the arena"),
    "another lower bound": ("heap", of_arena(lower_bound=less), "lower bound"),
    "buffers on each other": ("heap", of_arena(buffers=at_the_start), "live together and overlap"),
    "bodies are not counted": ("heap", of_plan(phases=without_term("bodies")), "0 B for bodies"),
    "slots are not counted": ("heap", of_plan(phases=without_term("io_slots")), "nothing of 'io_slots'"),
    "images are not counted": ("recipe", of_plan(phases=without_term("recipe")), "0 B for images"),
    "batches are not counted": (
        "rows",
        of_plan(phases=without_term("batch")),
        "0 B for requests that are put together",
    ),
    "a term twice": ("heap", of_plan(phases=twice), "counts 'runtime' twice"),
    "the heap's weights mapped": ("heap", placed(MAPPED), "has no phase finalise"),
    "one of them mapped": ("heap", placed(MAPPED, 1), "heap and mapped, which no plan has"),
    "one of them streamed": ("mapped", placed(STREAMED, 1), "are streamed"),
    "all of them streamed": ("mapped", placed(STREAMED), "are streamed"),
    "mapped weights on the heap": ("mapped", placed(HEAP), "has a phase finalise"),
    "nothing is finalised": ("mapped", of_plan(phases=without_phase), "has no phase finalise"),
    "all of a sweep stays": ("mixed", placed(MAPPED), "are streamed"),
    "all is swept": ("mixed", placed(STREAMED), "are streamed"),
    "a sweep that is not told of": ("mixed", of_plan(sweep=lambda _: None), "are streamed"),
    "fewer are streamed": ("mixed", of_sweep(streamed=lambda steps: steps[1:]), "do not add up"),
    "a pass reads less": ("mixed", of_sweep(pass_bytes=less), "do not add up"),
}


@pytest.mark.parametrize("what", UNDERSTATED)
def test_what_is_derived_again_is_refused(kept: dict[str, Path], what: str) -> None:
    name, change, message = UNDERSTATED[what]
    manifest = read_manifest(kept[name])
    (kept[name] / MANIFEST).write_bytes(dumps(sealed(change(manifest))))
    with pytest.raises((BudgetError, BundleError), match=message) as caught:
        open_model(kept[name], BUDGET)
    assert "\n" not in str(caught.value)


def test_the_bytes_of_a_swept_segment_are_those_of_its_weights(kept: dict[str, Path]) -> None:
    """Less of everything, so that the sweep agrees with itself."""
    manifest = read_manifest(kept["mixed"])
    sweep = manifest.plan.sweep
    assert sweep is not None
    small = tuple(outside(kept["mixed"] / s.file).whole - 1 for s in manifest.segments)
    places = [[small[step] for step in sweep.streamed[start::2]] for start in (0, 1)]
    passing = sum(sum(place) for place in places if len(place) > 1)
    smaller = msgspec.structs.replace(sweep, segment_bytes=small, pass_bytes=passing, lru_bytes=0, belady_bytes=0)
    plan = msgspec.structs.replace(manifest.plan, sweep=smaller)
    run = plan.phase("run")
    room = plan.budget_bytes - (run.total_bytes - run.nbytes("mapped_weights") - run.nbytes("ring"))
    plan = msgspec.structs.replace(
        plan,
        sweep=msgspec.structs.replace(
            smaller, lru_bytes=sum(small) if sum(small) > room else 0, belady_bytes=max(sum(small) - room, 0)
        ),
    )
    (kept["mixed"] / MANIFEST).write_bytes(dumps(sealed(msgspec.structs.replace(manifest, plan=plan))))
    with pytest.raises(BudgetError, match=r"for the weights of segments/00\.onnx, which need"):
        open_model(kept["mixed"], BUDGET)


def test_tables_of_swept_segments_count_by_their_rows(tmp_path: Path) -> None:
    ids, y = dense("ids", DType.INT64, 1, 4), dense("y", DType.FLOAT32, 1, 4, 64)
    weights = {
        "table": np.random.default_rng(0).standard_normal((4096, 64), np.float32),
        "matrix": np.random.default_rng(1).standard_normal((64, 64), np.float32),
    }
    nodes = [helper.make_node("Gather", ["table", "ids"], ["h"]), helper.make_node("MatMul", ["h", "matrix"], ["y"])]
    source = save(tmp_path, model_of(nodes, [ids], [y], weights))
    manifest = compile_model(source, BOARD, tmp_path / "m.tfb", Options(residency=STREAMED))
    size = outside(tmp_path / "m.tfb" / manifest.segments[0].file)
    assert (size.whole, size.nbytes) == (64 * 64 * 4, (4096 + 64) * 64 * 4)
    assert manifest.plan.sweep is not None
    assert size.whole <= manifest.plan.sweep.segment_bytes[0] < size.nbytes
    open_model(tmp_path / "m.tfb", BUDGET)


def test_of_a_board_that_is_not_known_the_machine_alone_counts(kept: dict[str, Path]) -> None:
    manifest = read_manifest(kept["heap"])
    for target in ("my-board", "/etc/hostname.toml"):
        plan = msgspec.structs.replace(manifest.plan, budget_bytes=8 << 30)
        foreign = msgspec.structs.replace(manifest, target=target, plan=plan)
        (kept["heap"] / MANIFEST).write_bytes(dumps(sealed(foreign)))
        open_model(kept["heap"], BUDGET)


def test_a_tokenizer_that_is_not_counted(tmp_path: Path) -> None:
    folder = decoder(tmp_path / "decoder.tfb")
    manifest = read_manifest(folder)
    check_certificate(manifest)
    plan = plan_of(manifest.contract)
    with pytest.raises(BudgetError, match=r"the plan counts 0 B for the tokenizer, which need"):
        check_certificate(msgspec.structs.replace(manifest, plan=plan))


def test_state_needs_two_places_as_large_as_the_larger(tmp_path: Path) -> None:
    manifest = read_manifest(decoder(tmp_path / "decoder.tfb"))
    specs = (*manifest.contract.inputs, *manifest.contract.outputs)
    without = 2 * sum(spec.max_nbytes for spec in specs)
    tokenizer = manifest.plan.phase("run").nbytes("tokenizer")
    plan = plan_of(manifest.contract, io_slots=without, tokenizer=tokenizer)
    with pytest.raises(BudgetError, match="for its 2 slots, which need"):
        check_certificate(msgspec.structs.replace(manifest, plan=plan))
