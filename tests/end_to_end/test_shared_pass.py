"""Requests that wait while weights are streamed share the next pass, with real agents."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent.backends.base import ArenaOptions
from agent.engine.channel import Done, Layout, Run, Slab
from agent.engine.passes import Engine, _arena
from agent.laid_out import STATE
from compile.options import Options
from compile.pipeline import compile_model
from compile.shapes import parse_shape
from targets.board import load_board
from targets.bundle import Residency
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving, stopped, until
from tests.support.models import init, model, node, normal, save, value

WIDTH, SEGMENTS, SLOTS = 512, 4, 4


@pytest.fixture(autouse=True)
def _state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each test its own, whatever this machine has; the agents that are started inherit it."""
    monkeypatch.setenv(STATE, str(tmp_path / "state"))


def chain(folder: Path, residency: Residency) -> Path:
    bundle = bundles.chain(folder / f"{residency.value}.tfb", [residency] * SEGMENTS, 2, WIDTH, slots=SLOTS)
    if residency.needs_finalise:
        code, _, err = run_agent("finalise", str(bundle))
        assert code == 0, err
    return bundle


def request_of(rows: int, **parameters: int) -> bytes:
    data = np.random.default_rng(rows).standard_normal((rows, WIDTH)).tolist()
    inputs = [{"name": "x", "datatype": "FP32", "shape": [rows, WIDTH], "data": data}]
    return json.dumps({"parameters": parameters, "inputs": inputs}).encode()


def data_of(answer: tuple[int, bytes, dict[str, str]]) -> list[float]:
    status, body, _ = answer
    assert status == 200, body
    return list(json.loads(body)["outputs"][0]["data"])


@contextlib.contextmanager
def waiting(agent: Agent, bodies: list[bytes]) -> Iterator[list[Future[tuple[int, bytes, dict[str, str]]]]]:
    """Requests of which the first runs and the others are ready, in a moment that lasts as long as the block."""
    with ThreadPoolExecutor(len(bodies)) as threads, stopped(agent.engine_pid):
        answers = []
        for at, body in enumerate(bodies):
            answers.append(threads.submit(agent.post, body))
            until(lambda: agent.metric("tightfit_running") == 1)
            until(lambda: agent.metric("tightfit_queue_depth") == at)  # noqa: B023 - ended before the next turn
        yield answers


@pytest.fixture
def patience(tmp_path: Path) -> tuple[str, str]:
    """The options of an agent whose engine may stand still for long."""
    config = tmp_path / "agent.toml"
    config.write_text("[requests]\ntimeout_s = 120\n[engine]\nhang_s = 120\n")
    return "--config", str(config)


def test_those_that_wait_share_a_pass(tmp_path: Path, patience: tuple[str, str]) -> None:
    """Four requests in two passes, with the very answers that each gets alone."""
    with serving(chain(tmp_path, Residency.HEAP), tmp_path / "log", *patience) as agent:
        alone = [data_of(agent.post(request_of(rows))) for rows in (1, 2, 3, 4)]
        with waiting(agent, [request_of(rows) for rows in (1, 2, 3, 4)]) as answers:
            pass
        assert [data_of(answer.result()) for answer in answers] == alone
        assert agent.metric("tightfit_pass_seconds_count") == 8
    with serving(chain(tmp_path, Residency.STREAMED), tmp_path / "log", *patience) as agent:
        assert [data_of(agent.post(request_of(rows))) for rows in (1, 2, 3, 4)] == alone
        passes, streamed = agent.metric("tightfit_pass_seconds_count"), agent.metric("tightfit_streamed_bytes_total")
        assert passes == 4
        with waiting(agent, [request_of(rows) for rows in (1, 2, 3, 4)]) as answers:
            pass
        assert [data_of(answer.result()) for answer in answers] == alone
        assert agent.metric("tightfit_pass_seconds_count") - passes == 2
        brought_in = agent.metric("tightfit_streamed_bytes_total") - streamed
        one = SEGMENTS * 2 * WIDTH * WIDTH * 4
        # What is read ahead for the pass to come may or may not be counted yet.
        assert one < brought_in < 3 * one
        assert agent.stop() == 0
    assert "error" not in agent.log


def test_who_gave_up_before_it_began_is_no_part_of_it(tmp_path: Path, patience: tuple[str, str]) -> None:
    with serving(chain(tmp_path, Residency.STREAMED), tmp_path / "log", *patience) as agent:
        alone = [data_of(agent.post(request_of(rows))) for rows in (1, 3)]
        bodies = [request_of(1), request_of(3), request_of(2, timeout=3_000_000)]
        with waiting(agent, bodies) as (first, last, late):
            status, body, _ = late.result()
            assert (status, "deadline" in json.loads(body)["error"]) == (504, True)
            assert agent.metric("tightfit_queue_depth") == 1
        assert [data_of(first.result()), data_of(last.result())] == alone
        assert agent.metric("tightfit_pass_seconds_count") == 4
        # What runs goes on to its end, though nobody waits for it, and the slot is free again.
        with waiting(agent, [request_of(1, timeout=300_000)]) as (late,):
            assert late.result()[0] == 504
        until(lambda: agent.metric("tightfit_in_flight") == 0)
        assert data_of(agent.post(request_of(3))) == alone[1]


def test_the_arena_of_one_run_is_enough_for_all_of_a_pass(tmp_path: Path) -> None:
    """However much crosses, and of whatever sizes: at the largest shapes, in an arena that cannot grow."""
    rows, k, wide = 512, 128, 384
    hidden = [(f"h{at}", wide if at % 2 else k // 2) for at in range(4)]
    nodes, weights, last = [], [], "x"
    for at, (name, width) in enumerate(hidden):
        weights += [init(f"u{at}", normal(k, width, seed=at)), init(f"v{at}", normal(width, k, seed=at + 9))]
        nodes += [
            node("MatMul", [last, f"u{at}"], [name], name=f"up{at}"),
            node("MatMul", [name, f"v{at}"], [f"d{at}"], name=f"down{at}"),
            node("Add", [f"d{at}", last], [f"r{at}"], name=f"add{at}"),
        ]
        last = f"r{at}"
    outputs = [value(name, ["n", size]) for name, size in ((last, k), ("h1", wide))]
    source = save(tmp_path, model(nodes, [value("x", ["n", k])], outputs, weights))
    shapes = (parse_shape(f"x=1..{rows},{k}"),)
    options = Options(shapes=shapes, residency=Residency.STREAMED, slots=SLOTS, segments=6)
    bundle = tmp_path / "wide.tfb"
    manifest = compile_model(source, load_board("raspberry-pi-5-4gb"), bundle, options)
    code, _, err = run_agent("finalise", str(bundle))
    assert code == 0, err
    (finalised,) = (tmp_path / "state" / "finalised").iterdir()

    load = msgspec.structs.replace(manifest.plan.phase("load"), terms=())
    plan = msgspec.structs.replace(manifest.plan, phases=(load, manifest.plan.phase("run")), budget_bytes=0)
    planned = sum(each.nbytes for each in plan.phase("run").terms if each.name in ("activations", "workspace"))
    assert _arena(plan) == ArenaOptions(planned, planned)
    slab = Slab.create(Layout.of(manifest.contract, SLOTS))
    engine = Engine(bundle, msgspec.structs.replace(manifest, plan=plan), 1, slab, (), finalised)
    rng = np.random.default_rng(0)
    for slot in range(SLOTS):
        slab.input(slot, 0).view(np.float32)[:] = rng.standard_normal(rows * k, np.float32)
    runs = [Run(slot, slot, ((rows, k),), (rows * k * 4,), (0, 1)) for slot in range(SLOTS)]
    alone = []
    for run in runs:
        assert isinstance(engine.run([[run]])[1][0], Done)
        alone.append([slab.output(run.slot, index).tobytes() for index in (0, 1)])
        slab.output(run.slot, 0)[:] = slab.output(run.slot, 1)[:] = 0
    for _ in range(2):
        _, answers = engine.run([[run] for run in runs])
        assert [answer for answer in answers if not isinstance(answer, Done)] == []
        assert [[slab.output(run.slot, index).tobytes() for index in (0, 1)] for run in runs] == alone

    # Rows that are put together are no more than one request of the largest shape has.
    assert manifest.contract.batch_rows == rows
    few = rows // 3
    parts = [Run(slot, slot, ((few, k),), (few * k * 4,), (0, 1)) for slot in range(SLOTS)]
    expected = [np.frombuffer(each[0], np.float32)[: few * k] for each in alone]
    for _ in range(2):
        for slot in range(SLOTS):
            slab.output(slot, 0)[:] = slab.output(slot, 1)[:] = 0
        _, answers = engine.run([parts[:3], parts[3:]])
        assert [answer for answer in answers if not isinstance(answer, Done)] == []
        for slot in range(SLOTS):
            np.testing.assert_allclose(
                slab.output(slot, 0).view(np.float32)[: few * k], expected[slot], rtol=1e-4, atol=1e-4
            )
    engine.close()
