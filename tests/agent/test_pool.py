"""Leases on slots."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from agent.pool import Pool

SLOTS = 3


class Leases(RuleBasedStateMachine):
    """Any order of leases and releases keeps every slot with one owner."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(SLOTS)
        self.model: dict[int, int] = {}
        self.owners = 0

    @rule(target=held)
    def lease(self) -> tuple[int, int] | None:
        self.owners += 1
        slot = self.pool.lease(self.owners)
        assert (slot is None) == (len(self.model) == SLOTS)
        if slot is None:
            return None
        assert slot not in self.model
        self.model[slot] = self.owners
        return slot, self.owners

    @rule(lease=consumes(held))
    def release(self, lease: tuple[int, int] | None) -> None:
        if lease is not None:
            self.pool.release(*lease)
            del self.model[lease[0]]

    @rule(slot=st.integers(-1, SLOTS), owner=st.integers(-5, 0))
    def strangers_cannot_release(self, slot: int, owner: int) -> None:
        with pytest.raises(ValueError, match="not leased"):
            self.pool.release(slot, owner)

    @invariant()
    def counts(self) -> None:
        assert self.pool.leased == len(self.model)


TestLeases = Leases.TestCase


def test_a_slot_cannot_be_released_twice() -> None:
    pool = Pool(1)
    slot = pool.lease(7)
    assert slot == 0
    pool.release(slot, 7)
    with pytest.raises(ValueError, match="slot 0 is not leased to 7"):
        pool.release(slot, 7)


def test_a_pool_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Pool(0)
