"""Slots: the rows of device state (last token, sampling parameters, page table) that running requests own.

Owns which slot is free. Knows nothing of what a slot holds.
"""

from __future__ import annotations


class SlotPool:
    """Hands out the lowest free slot, so that the used ones stay dense."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    def allocate(self) -> int:
        """A free slot; there must be one."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert slot not in self._free, f"slot {slot} released twice"
        self._free.append(slot)
        self._free.sort(reverse=True)
