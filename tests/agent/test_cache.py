"""Kept answers: bounded, least recently used first out, and never another request's."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from agent.cache import Answer, ResponseCache, key_of
from agent.request import Output


def answer(nbytes: int, outputs: int = 1) -> Answer:
    # Numbers that Python does not share, as real ones are.
    return Answer(
        tuple(Output(index, (1000 + nbytes, 2000 + index), 4000 + nbytes) for index in range(outputs)),
        tuple(bytes([index]) * nbytes for index in range(outputs)),
    )


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_what_was_put_comes_back() -> None:
    cache = ResponseCache(1 << 20)
    assert cache.get(key(1)) is None
    cache.put(key(1), answer(100))
    assert cache.get(key(1)) == answer(100)
    assert (cache.hits, cache.misses, cache.evictions) == (1, 1, 0)


def test_what_was_not_asked_for_longest_goes_first() -> None:
    cache = ResponseCache(3 * answer(100).nbytes)
    for number in (1, 2, 3):
        cache.put(key(number), answer(100))
    cache.get(key(1))
    cache.put(key(4), answer(100))
    assert [cache.get(key(number)) is None for number in (1, 2, 3, 4)] == [False, True, False, False]
    assert cache.evictions == 1


def test_what_is_larger_than_the_limit_takes_nobody_s_place() -> None:
    cache = ResponseCache(answer(100).nbytes)
    cache.put(key(1), answer(100))
    cache.put(key(2), answer(101))
    assert (cache.get(key(1)), cache.get(key(2))) == (answer(100), None)


@given(st.integers(0, 8000), st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 3000)), max_size=60))
def test_it_is_a_map_that_forgets_in_order(limit: int, steps: list[tuple[bool, int, int]]) -> None:
    cache = ResponseCache(limit)
    model: OrderedDict[bytes, Answer] = OrderedDict()
    for is_put, number, nbytes in steps:
        if is_put:
            cache.put(key(number), answer(nbytes))
            if answer(nbytes).nbytes <= limit:
                model.pop(key(number), None)
                model[key(number)] = answer(nbytes)
                while sum(each.nbytes for each in model.values()) > limit:
                    model.popitem(last=False)
        else:
            assert cache.get(key(number)) == model.get(key(number))
            if key(number) in model:
                model.move_to_end(key(number))
        assert cache.nbytes == sum(each.nbytes for each in model.values()) <= limit
        assert len(cache) == len(model)


def test_the_limit_counts_what_python_adds() -> None:
    for outputs in (1, 10):
        tracemalloc.start()
        try:
            cache = ResponseCache(4 << 20)
            number = 0
            while not cache.evictions:
                number += 1
                cache.put(key(number), answer(30, outputs))
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert taken <= cache.limit_bytes


TENSORS = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=2), st.binary(max_size=3)), max_size=3)
REQUESTS = st.tuples(st.sampled_from(["1", "2"]), TENSORS, st.lists(st.integers(0, 2), max_size=2))


@given(REQUESTS, REQUESTS)
def test_equal_keys_are_of_equal_requests(
    one: tuple[str, list[tuple[list[int], bytes]], list[int]],
    other: tuple[str, list[tuple[list[int], bytes]], list[int]],
) -> None:
    assert (_key(one) == _key(other)) == (one == other)


def test_bytes_do_not_wander_between_tensors() -> None:
    assert _key(("1", [([2], b"ab"), ([2], b"c")], [])) != _key(("1", [([2], b"a"), ([2], b"bc")], []))


def _key(request: tuple[str, list[tuple[list[int], bytes]], list[int]]) -> bytes:
    version, tensors, outputs = request
    inputs = [memoryview(data) for _, data in tensors]
    return key_of(version, [shape for shape, _ in tensors], inputs, outputs)
