"""The slab and the socket, both ends in one process."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.engine import channel
from agent.engine.channel import Done, Layout, Pass, Passed, Run, RunError, Slab, most_runs
from agent.errors import AgentError
from targets.tensor import Contract, DimRange, DType, TensorSpec

sizes = st.lists(st.integers(0, 300), min_size=1, max_size=5)


def contract_of(inputs: list[int], outputs: list[int]) -> Contract:
    return Contract(
        tuple(TensorSpec(f"i{n}", DType.UINT8, (size,), size) for n, size in enumerate(inputs)),
        tuple(TensorSpec(f"o{n}", DType.UINT8, (size,), size) for n, size in enumerate(outputs)),
        {},
    )


@given(sizes, sizes, st.integers(1, 4))
def test_every_tensor_has_a_place_of_its_own(inputs: list[int], outputs: list[int], slots: int) -> None:
    layout = Layout.of(contract_of(inputs, outputs), slots)
    places = [
        (slot * layout.slot_bytes + start, size)
        for slot in range(slots)
        for start, size in (*layout.inputs, *layout.outputs)
    ]
    for (start, size), (following, _) in zip(places, [*places[1:], (layout.nbytes, 0)], strict=True):
        assert start % channel.ALIGN == 0
        assert start + size <= following
    assert [size for _, size in (*layout.inputs, *layout.outputs)] == [*inputs, *outputs]


def test_there_are_no_more_slots_than_a_pass_can_name() -> None:
    few, many = contract_of([8], [8]), contract_of([8] * 300, [8] * 300)
    assert Layout.of(few, 256).slots == 256
    assert Layout.of(many, 256).slots == most_runs(many) < 256


def test_both_ends_see_one_memory() -> None:
    layout = Layout.of(contract_of([5], [3]), 2)
    gateway = Slab.create(layout)
    engine = Slab(os.dup(gateway.fd), layout)
    gateway.input(1, 0)[:] = np.arange(5)
    assert engine.input(1, 0).tolist() == [0, 1, 2, 3, 4]
    assert engine.input(0, 0).tolist() == [0] * 5
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(engine.fd, 0)
    with pytest.raises(ValueError, match="slot 2 is not one of 2"):
        gateway.input(2, 0)
    seen = gateway.input(1, 0)
    gateway.close_fd()
    gateway.close_fd()
    engine.close_fd()
    assert seen[4] == 4


@pytest.mark.parametrize("nbytes", [0, 3, 16 << 10, (16 << 10) + 1, 1 << 20])
def test_tensors_are_copied_to_their_place(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    slab = Slab.create(Layout.of(contract_of([1 << 20], [3]), 2))
    slab.put(1, 0, data)
    slab.put(1, 0, memoryview(data))
    assert slab.input(1, 0)[:nbytes].tobytes() == data
    assert not slab.input(1, 0)[nbytes:].any()
    assert not slab.input(0, 0).any()
    slab.close()


def test_tensors_are_copied_no_further_than_their_place() -> None:
    slab = Slab.create(Layout.of(contract_of([5], [3]), 2))
    slab.put(1, 0, memoryview(bytes([1, 2, 3])))
    assert slab.input(1, 0).tolist() == [1, 2, 3, 0, 0]
    assert not slab.input(0, 0).any()
    slab.output(1, 0)[:] = [7, 8, 9]
    assert slab.seen(1, 0, 2).tolist() == [7, 8]
    for slot, nbytes in ((1, 6), (2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="has room for 5"):
            slab.put(slot, 0, memoryview(bytes(nbytes)))
    for slot, nbytes in ((1, 4), (2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="has room for 3"):
            slab.seen(slot, 0, nbytes)
    slab.close()


def slabs_in_memory() -> int:
    return Path("/proc/self/maps").read_text().count("tightfit-slab")


def test_a_slab_that_is_closed_is_no_more_in_memory() -> None:
    gc.collect()  # those of other tests
    before = slabs_in_memory()
    slab = Slab.create(Layout.of(contract_of([5], [3]), 2))
    slab.input(0, 0)[:] = 1
    slab.output(1, 0)
    slab.put(0, 0, memoryview(b"1"))
    assert slabs_in_memory() == before + 1
    slab.close()
    assert slabs_in_memory() == before


def test_messages_keep_their_boundaries() -> None:
    gateway, engine = channel.socket_pair()
    with gateway, engine:
        runs = [Run(number, 0, ((2, 3),), (24,), (0,)) for number in range(3)]
        passes = [Pass(((runs[0],),)), Pass((tuple(runs[1:]), (runs[0],)))]
        for each in passes:
            channel.send_to_engine(gateway, each)
        assert [channel.receive_in_engine(engine) for _ in passes] == passes
        replies = [Passed(0.5, 4096), Done(1, ((0, (2,), 8),)), RunError(2, "fault", "x")]
        channel.send_to_gateway(engine, *replies)
        channel.send_to_gateway(engine, replies[0])
        assert channel.receive_in_gateway(gateway) == replies
        assert channel.receive_in_gateway(gateway) == replies[:1]
        engine.close()
        assert channel.receive_in_gateway(gateway) is None


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(1, 40))
def test_as_many_runs_as_are_promised_fit_into_a_message(ranks: list[int], outputs: int) -> None:
    shapes = [((1 << 62) - 1,) * rank for rank in ranks]
    contract = Contract(
        tuple(
            TensorSpec(f"i{n}", DType.UINT8, tuple(f"d{n}.{at}" for at in range(rank)), 1)
            for n, rank in enumerate(ranks)
        ),
        tuple(TensorSpec(f"o{n}", DType.UINT8, (1,), 1) for n in range(outputs)),
        {f"d{n}.{at}": DimRange(1, 1, (1 << 62) - 1) for n, rank in enumerate(ranks) for at in range(rank)},
    )
    run = Run((1 << 63) - 1, 255, tuple(shapes), ((1 << 62) - 1,) * len(ranks), tuple(range(outputs)))
    gateway, engine = channel.socket_pair()
    with gateway, engine:
        for runs in (((run,),) * most_runs(contract), ((run,) * most_runs(contract),)):
            whole = Pass(runs)
            channel.send_to_engine(gateway, whole)
            assert channel.receive_in_engine(engine) == whole


def test_a_message_that_is_too_large_is_not_sent() -> None:
    run = Run(1, 0, ((1,) * (1 << 17),), (1,), (0,))
    gateway, engine = channel.socket_pair()
    with gateway, engine:
        with pytest.raises(AgentError, match=r"a message of .* to the engine, at most 64.0 KiB pass"):
            channel.send_to_engine(gateway, Pass(((run,),)))
        with pytest.raises(AgentError, match=r"a message of .* to the gateway, at most 64.0 KiB pass"):
            channel.send_to_gateway(engine, RunError(1, "fault", "x" * (1 << 17)))


def test_answers_that_exceed_a_packet_come_in_several() -> None:
    answers = [RunError(number, "fault", "x" * 1000) for number in range(200)]
    gateway, engine = channel.socket_pair()
    with gateway, engine:
        channel.send_to_gateway(engine, *answers)
        engine.close()
        received = []
        while (packet := channel.receive_in_gateway(gateway)) is not None:
            assert len(packet) > 1
            received += packet
    assert received == answers


@given(st.binary(min_size=1, max_size=100))
def test_anything_else_on_the_channel_is_a_decode_error_or_a_message(data: bytes) -> None:
    gateway, engine = channel.socket_pair()
    with gateway, engine:
        engine.send(data)
        with contextlib.suppress(msgspec.DecodeError):
            assert channel.receive_in_gateway(gateway) is not None


def test_the_pair_is_one_of_packets() -> None:
    gateway, engine = channel.socket_pair()
    with gateway, engine:
        assert gateway.type & socket.SOCK_SEQPACKET
