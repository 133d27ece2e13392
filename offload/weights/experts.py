"""Experts one by one: their sizes, and which of them a pool holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from triforce_offload.weights.formats import aligned

# Experts of a layer that cross the link to its pool after a pass at most: more would keep the next
# pass waiting.
MOST_INSERTED = 2


@dataclass(frozen=True)
class ExpertSizes:
    """Experts whose bytes follow one another in each of their tensors.

    count: number of experts
    tensors: bytes of each tensor of one expert
    """

    count: int
    tensors: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(self.tensors)

    def pool_bytes(self, slots: int) -> int:
        """Return the bytes of a pool of some of the experts."""
        return sum(aligned(slots * nbytes) for nbytes in self.tensors)


class RecentExperts:
    """Which of a layer's experts are in the slots of a pool: those that were used last.

    slot_of: slot of each expert, -1 for none
    expert_in: expert in each slot, -1 for none
    """

    def __init__(self, count: int, slots: int) -> None:
        self.slot_of = [-1] * count
        self.expert_in = [-1] * slots
        # When each expert was used last: a pass is one tick, a prefill as many as there are slots.
        self._used = [0] * count
        self._clock = 0

    def after_pass(self, chosen: Iterable[int]) -> tuple[int, list[int]]:
        """Note the experts that the rows of a pass chose. Return how many of them were in slots,
        and those to insert: the ones that most rows chose of the others.
        """
        self._clock += 1
        rows: dict[int, int] = {}
        for expert in chosen:
            rows[expert] = rows.get(expert, 0) + 1
            self._used[expert] = self._clock
        missing = [expert for expert in rows if self.slot_of[expert] < 0]
        missing.sort(key=rows.__getitem__, reverse=True)
        return len(rows) - len(missing), missing

    def after_prefill(self, chosen: Iterable[int]) -> list[int]:
        """Note the experts that the rows of a prefill chose, last ones first. Return those that
        should be in the slots.
        """
        self._clock += len(self.expert_in)
        wanted: dict[int, None] = {}
        for expert in chosen:
            if expert not in wanted:
                self._used[expert] = self._clock - len(wanted)
                wanted[expert] = None
            if len(wanted) == len(self.expert_in):
                break
        return list(wanted)

    def make_room(self, keep: Collection[int]) -> int | None:
        """Empty the slot of the expert that was used longest ago, unless one is empty. Return the
        slot; None if all experts in slots are to be kept.
        """
        slot = min(range(len(self.expert_in)), key=self._last_use)
        if self.expert_in[slot] in keep:
            return None
        self.empty(slot)
        return slot

    def put(self, expert: int, slot: int) -> None:
        """Note that an expert is in an empty slot."""
        self.expert_in[slot] = expert
        self.slot_of[expert] = slot

    def empty(self, slot: int) -> None:
        """Note that a slot holds nothing."""
        if (expert := self.expert_in[slot]) >= 0:
            self.slot_of[expert] = self.expert_in[slot] = -1

    def _last_use(self, slot: int) -> int:
        expert = self.expert_in[slot]
        return -1 if expert < 0 else self._used[expert]
