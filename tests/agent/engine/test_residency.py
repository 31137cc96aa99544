"""Where weights are while a bundle is served: the life cycle by itself, and what real engines answer and hold."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from agent.backends.base import ArenaOptions, Array, BackendError, SessionOptions
from agent.engine import paging
from agent.engine.residency import Sessions, Source
from agent.external_data import external_bytes
from agent.laid_out import STATE
from agent.memory import pss_by_kind
from targets.bundle import Residency
from targets.tensor import Contract, DType
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving
from tests.support.bundles import MIB, dense, model_of

HEAP, MAPPED, STREAMED, UNPACKED = Residency.HEAP, Residency.MAPPED, Residency.STREAMED, Residency.UNPACKED


@pytest.fixture(autouse=True)
def _state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each test its own, whatever this machine has; the agents that are started inherit it."""
    monkeypatch.setenv(STATE, str(tmp_path / "state"))


class MappedSession:
    """A session whose weights are the file beside its graph, mapped as the runtime maps it; a run reads all but rows
    of its last quarter."""

    def __init__(self, graph: Path) -> None:
        self.name = graph.name
        with graph.with_suffix(".bin").open("rb") as file:
            # 2 MiB apart, so that no two mappings can be made one.
            self._maps = [mmap.mmap(file.fileno(), QUARTER, mmap.MAP_PRIVATE, offset=at * QUARTER) for at in range(4)]

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:  # noqa: ARG002
        read = [np.frombuffer(each, np.uint8) for each in self._maps]
        return [np.array([each[::4096].sum() for each in read[:3]]), read[3][:1].copy()]

    def close(self) -> None:
        self.name = ""


class MappingBackend:
    """Loads sessions, and remembers which."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def describe(self) -> str:
        return "mapping 1"

    def prepare(self, arena: ArenaOptions) -> None: ...

    def lay_out(self, source: Path, target: Path, options: SessionOptions) -> None: ...

    def load_session(self, path: Path, options: SessionOptions) -> MappedSession:  # noqa: ARG002
        self.loaded.append(path.name)
        return MappedSession(path)


QUARTER = 1 << 20


def cached(file: Path) -> int:
    """Bytes of the file that are in the page cache (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // 4096))()
        view = np.frombuffer(mapped, np.uint8)
        assert libc.mincore(view.ctypes.data, len(mapped), pages) == 0
        del view
    return sum(page & 1 for page in pages) * 4096


def sessions_of(folder: Path, *residencies: Residency) -> Sessions:
    sources = []
    for step, residency in enumerate(residencies):
        weights = folder / f"{step}.bin"
        weights.write_bytes(os.urandom(4 * QUARTER))
        descriptor = os.open(weights, os.O_RDONLY)
        os.fsync(descriptor)  # only clean pages can be let go
        os.close(descriptor)
        laid_out = weights if residency.needs_finalise else None
        sources.append(Source(folder / f"{step}.onnx", SessionOptions(1, {}, residency), laid_out))
    sessions = Sessions(MappingBackend(), sources)
    if STREAMED in residencies and cached(folder / f"{residencies.index(STREAMED)}.bin"):
        pytest.skip("pages of files in the temporary folder stay in memory, as they do on tmpfs")
    return sessions


def settle(sessions: Sessions) -> None:
    """Wait until what was to be read and let go has been."""
    sessions._thread.submit(int).result()


def one_pass(sessions: Sessions, folder: Path, count: int) -> list[list[int]]:
    """MiB of each file that are in the page cache when a turn has run, for every turn."""
    seen = []
    for step in range(count):
        with sessions.turn(step) as session:
            session.run({}, [])
            settle(sessions)
            seen.append([cached(folder / f"{other}.bin") >> 20 for other in range(count)])
    return seen


def test_every_session_is_loaded_once(tmp_path: Path) -> None:
    backend = MappingBackend()
    sources = []
    for step, residency in enumerate((HEAP, MAPPED, STREAMED, UNPACKED)):
        weights = tmp_path / f"{step}.bin"
        weights.write_bytes(bytes(4 * QUARTER))
        sources.append(Source(tmp_path / f"{step}.onnx", SessionOptions(1, {}, residency), weights))
    sessions = Sessions(backend, sources)
    for _ in range(3):
        one_pass(sessions, tmp_path, 4)
    assert backend.loaded == ["0.onnx", "1.onnx", "2.onnx", "3.onnx"]
    sessions.close()


def sums(folder: Path, step: int) -> list[int]:
    """What a run of the segment gives."""
    data = np.fromfile(folder / f"{step}.bin", np.uint8).reshape(4, QUARTER)
    return [int(quarter[::4096].sum()) for quarter in data[:3]]


def turn(sessions: Sessions, step: int) -> tuple[list[int], int]:
    """(what a run of the segment gives, the first byte of its rows); what is read ahead has been read meanwhile."""
    with sessions.turn(step) as session:
        settle(sessions)
        found, rows = session.run({}, [])
        return found.tolist(), int(rows[0])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_streamed_segments_take_turns_in_two_places(tmp_path: Path, count: int) -> None:
    sessions = sessions_of(tmp_path, *[STREAMED] * count)
    one_pass(sessions, tmp_path, count)  # what is read is not known before
    settle(sessions)
    assert locked_bytes() == min(count, 2) * 3 * QUARTER
    assert sessions.streamed_bytes == 0
    for passes in range(1, 4):
        for step in range(count):
            rows = (tmp_path / f"{step}.bin").read_bytes()[3 * QUARTER]
            assert turn(sessions, step) == (sums(tmp_path, step), rows)
            # Other files were read just now, this one past the page cache.
            paging.drop(tmp_path / f"{step}.bin", ())
        settle(sessions)
        # Who has a place for itself is read once. The first of a pass is read ahead at the end of the one before.
        shared = {1: 0, 2: 0, 3: 2}.get(count, count)
        own = min(count, 2) if count < 3 else count - shared
        assert sessions.streamed_bytes == (own + passes * shared + (shared > 0)) * 3 * QUARTER
    assert sum(cached(tmp_path / f"{step}.bin") for step in range(count)) == 0
    sessions.close()
    assert locked_bytes() == 0


def test_pages_that_stay_are_held_beside_streamed_ones(tmp_path: Path) -> None:
    sessions = sessions_of(tmp_path, STREAMED, MAPPED, STREAMED, MAPPED)
    one_pass(sessions, tmp_path, 4)
    assert locked_bytes() == (2 + 2) * 3 * QUARTER
    sessions.close()
    assert locked_bytes() == 0


def test_pages_are_not_held_where_nothing_pushes_them_out(tmp_path: Path) -> None:
    sessions = sessions_of(tmp_path, MAPPED, HEAP)
    one_pass(sessions, tmp_path, 2)
    assert locked_bytes() == 0
    sessions.close()


def locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmLck:"))


def test_turns_that_do_not_come_as_foreseen(tmp_path: Path) -> None:
    sessions = sessions_of(tmp_path, STREAMED, STREAMED, STREAMED)
    with pytest.raises(RuntimeError, match="broke"), sessions.turn(1):
        raise RuntimeError("broke")
    one_pass(sessions, tmp_path, 3)
    for step in (0, 2, 2, 1, 0, 1, 2, 0):
        assert turn(sessions, step)[0] == sums(tmp_path, step)
    with pytest.raises(RuntimeError, match="broke"), sessions.turn(1):
        raise RuntimeError("broke")
    assert [turn(sessions, step)[0] for step in range(3)] == [sums(tmp_path, step) for step in range(3)]
    sessions.close()


def test_weights_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """A run of the segment would be killed by the kernel, or compute with what was there before."""
    sessions = sessions_of(tmp_path, STREAMED, STREAMED, STREAMED, STREAMED)
    one_pass(sessions, tmp_path, 4)
    whole = (tmp_path / "2.bin").read_bytes()
    os.truncate(tmp_path / "2.bin", QUARTER + 5000)
    for _ in range(2):
        assert [turn(sessions, step)[0] for step in (0, 1)] == [sums(tmp_path, step) for step in (0, 1)]
        with pytest.raises(BackendError, match=r"2\.bin ends after .*, 3\.0 MiB are needed"), sessions.turn(2):
            pytest.fail("it has no weights")
    with (tmp_path / "2.bin").open("r+b") as file:
        file.write(whole)
    assert turn(sessions, 2)[0] == sums(tmp_path, 2)
    sessions.close()


def test_a_ring_that_finds_no_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = sessions_of(tmp_path, STREAMED, STREAMED, STREAMED)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BackendError, match="cannot reserve memory for streamed weights: No space left"):
        one_pass(sessions, tmp_path, 3)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="broke"), sessions.turn(1):
        raise RuntimeError("broke")
    assert [turn(sessions, step)[0] for step in range(3)] == [sums(tmp_path, step) for step in range(3)]
    sessions.close()


# --- real engines


def ask(agent: Agent, rows: int, width: int = 256) -> bytes:
    """The outputs' bytes of a request that is always the same."""
    data = np.random.default_rng(rows).standard_normal((rows, width), np.float32).tobytes()
    head = (
        f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[{rows},{width}],'
        f'"parameters":{{"binary_data_size":{len(data)}}}}}],"parameters":{{"binary_data_output":true}}}}'
    ).encode()
    status, body, headers = agent.post(head + data, {"Inference-Header-Content-Length": str(len(head))})
    assert status == 200, body
    return body[int(headers["Inference-Header-Content-Length"]) :]


def finalise(bundle: Path, *arguments: str) -> None:
    code, _, err = run_agent("finalise", str(bundle), *arguments)
    assert code == 0, err


@pytest.mark.parametrize("int4", [False, True], ids=["float", "int4"])
def test_every_residency_answers_bit_for_bit_the_same(tmp_path: Path, int4: bool) -> None:
    bundle = bundles.chain(tmp_path / "chain.tfb", [HEAP] * 3, layers=2, int4=int4)
    finalise(bundle, "--residency", "mapped")
    answers = {}
    # With 4-bit codes that are not laid out another kernel computes, and slowly.
    for residency in (HEAP, MAPPED, STREAMED) if int4 else Residency:
        with serving(bundle, tmp_path / "log", "--residency", residency.value) as agent:
            answers[residency] = [ask(agent, rows) for rows in (1, 4, 1, 3)]
            assert agent.stop() == 0
        assert ("made for another residency" in agent.log) == (residency is not HEAP)
    assert answers[HEAP][0] == answers[HEAP][2] != answers[HEAP][1]
    assert answers[MAPPED] == answers[STREAMED] == answers[HEAP]
    # A product with a matrix that is not laid out adds up in another order.
    for found, expected in zip(answers.get(UNPACKED, []), answers[HEAP], strict=False):
        np.testing.assert_allclose(np.frombuffer(found, "f4"), np.frombuffer(expected, "f4"), rtol=0, atol=1e-5)


def test_each_segment_is_where_the_bundle_says(tmp_path: Path) -> None:
    """Mapped and streamed segments in one bundle, request after request, and nobody warns."""
    mixed = bundles.chain(tmp_path / "mixed.tfb", [STREAMED, MAPPED, STREAMED, MAPPED, STREAMED, STREAMED])
    plain = bundles.chain(tmp_path / "plain.tfb", [HEAP] * 6)
    finalise(mixed)
    with serving(plain, tmp_path / "plain.log") as agent:
        expected = [ask(agent, rows) for rows in (1, 2, 3, 4)]
    with serving(mixed, tmp_path / "log") as agent:
        before = agent.metric("tightfit_streamed_bytes_total")
        assert [ask(agent, rows) for rows in (1, 2, 3, 4)] == expected
        streamed = agent.metric("tightfit_streamed_bytes_total") - before
        one = sum(external_bytes(mixed / "segments" / f"{step}.onnx") for step in ("00", "02", "04", "05"))
        # What was read ahead for the pass to come may or may not be counted yet.
        assert 3 * one < streamed < 5 * one
    assert "warning" not in agent.log


def test_values_outlive_the_segment_that_gave_them(tmp_path: Path) -> None:
    """Even a weight that is an output as it stands, in whose place other weights are when it is read."""
    x, h, c, d, y, z = (dense(name, DType.FLOAT32, 512) for name in "xhcdyz")
    weight, other = np.arange(512, dtype=np.float32), np.full(512, 7, np.float32)
    shape = np.array([512])
    first = model_of(
        [helper.make_node("Identity", ["x"], ["h"]), helper.make_node("Reshape", ["c", "shape"], ["d"])],
        [x],
        [h, c, d],
        {"c": weight, "shape": shape},
    )
    second = model_of([helper.make_node("Add", ["h", "v"], ["y"])], [h], [y], {"v": other})
    third = model_of([helper.make_node("Sum", ["y", "c", "d", "w"], ["z"])], [y, c, d], [z], {"w": other})
    bundle = bundles.write_bundle(tmp_path / "constant.tfb", [first, second, third], Contract((x,), (c, z), {}))
    finalise(bundle, "--residency", "streamed")
    with serving(bundle, tmp_path / "log", "--residency", "streamed") as agent:
        for _ in range(4):
            status, text, _ = agent.post(
                {"inputs": [{"name": "x", "datatype": "FP32", "shape": [512], "data": [0.0] * 512}]}
            )
            assert status == 200, text
            found = [output["data"] for output in json.loads(text)["outputs"]]
            assert found == [weight.tolist(), (2 * weight + 14).tolist()]


def test_memory_by_residency(tmp_path: Path) -> None:
    """60 MiB of weights in three segments: on the heap, in the file, two thirds of them at most, in the file."""
    bundle = bundles.chain(tmp_path / "big.tfb", [HEAP] * 3, layers=5, width=1024)
    finalise(bundle, "--residency", "mapped")  # what is streamed comes from the same files
    memory = {}
    for residency in (HEAP, MAPPED, STREAMED):
        with serving(bundle, tmp_path / "log", "--residency", residency.value) as agent:
            answer = ask(agent, 4, 1024)
            assert len(answer) == struct.calcsize("f") * 4 * 1024
            memory[residency] = pss_by_kind(agent.engine_pid)
    anonymous = {residency: kinds["anonymous"] for residency, kinds in memory.items()}
    file = {residency: kinds["file"] for residency, kinds in memory.items()}
    assert anonymous[HEAP] - anonymous[MAPPED] > 50 * MIB
    assert anonymous[HEAP] - anonymous[STREAMED] > 50 * MIB
    assert file[MAPPED] - file[HEAP] > 50 * MIB
    assert file[MAPPED] - file[STREAMED] > 15 * MIB


FREED = """
import ctypes
from agent.engine.residency import give_freed_blocks_back
from agent.memory import pss_by_kind
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
give_freed_blocks_back()
before = pss_by_kind("self")["anonymous"]
for size in (8 << 20, 4 << 20):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
print(pss_by_kind("self")["anonymous"] - before)
"""


def test_a_large_block_is_given_back_when_it_is_freed() -> None:
    """By itself malloc keeps the second one: the first, freed, has taught it to."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < MIB
