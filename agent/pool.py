"""Leases on the slots of the slab. Pure. No lease, no admission: what is in memory at once is what the plan counted."""

from __future__ import annotations


class Pool:
    """`slots` numbered places; a slot is leased to one owner at a time."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError("a pool needs at least one slot")
        self.slots = slots
        # The slot given back last is warm in the cache, so it is handed out first.
        self._free = list(range(slots - 1, -1, -1))
        self._owner: dict[int, int] = {}

    @property
    def leased(self) -> int:
        """Number of slots in use."""
        return len(self._owner)

    def lease(self, owner: int) -> int | None:
        """A free slot for `owner`, or None when all are in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._owner[slot] = owner
        return slot

    def pass_on(self, slot: int, owner: int, to: int) -> None:
        """Have a leased slot be another's; passing on what one does not hold is a fault and raises ValueError."""
        if self._owner.get(slot) != owner:
            raise ValueError(f"slot {slot} is not leased to {owner}")
        self._owner[slot] = to

    def release(self, slot: int, owner: int) -> None:
        """Give a slot back; giving back what one does not hold is a fault and raises ValueError."""
        if self._owner.get(slot) != owner:
            raise ValueError(f"slot {slot} is not leased to {owner}")
        del self._owner[slot]
        self._free.append(slot)
