"""Pools of experts: those of a layer that were used last are on the device, while host memory has
all of them.

In a pass the device computes the chosen experts that are in the pool, and the processor the others.
Consecutive tokens choose many of the same experts, so each of the others then takes the place of
the one that was used longest ago. A prefill fills a pool with the experts of its last tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from triforce_offload.errors import LinkError
from triforce_offload.link.link import Event, Link
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import Allocation, DeviceMemory
from triforce_offload.plan.memory_plan import LayerPlan
from triforce_offload.weights.experts import MOST_INSERTED, RecentExperts
from triforce_offload.weights.layouts import FlatLayout, Views


class Part(NamedTuple):
    """One tensor of the experts, as flat bytes.

    start: first byte among the bytes of all experts
    nbytes: bytes of one expert
    slots: bytes of the experts on the device, slot after slot
    """

    start: int
    nbytes: int
    slots: torch.Tensor

    def of_expert(self, experts: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the bytes of one expert. experts: bytes of all experts"""
        first = self.start + expert * self.nbytes
        return experts[first : first + self.nbytes]

    def of_slot(self, slot: int) -> torch.Tensor:
        return self.slots[slot * self.nbytes : (slot + 1) * self.nbytes]


class PoolCounters(NamedTuple):
    """What passes found in pools. An expert that several rows of a pass chose counts once.

    hits, misses: number of experts that were in a pool, and of those that were not
    inserted_bytes: bytes that crossed the link to pools
    """

    hits: int = 0
    misses: int = 0
    inserted_bytes: int = 0

    def __sub__(self, other: PoolCounters) -> PoolCounters:
        return PoolCounters(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class ExpertPool:
    """The experts of one layer that are on the device as well as in host memory.

    views: their tensors, slot after slot as all experts' tensors are expert after expert
    recent: which experts these are
    hits, misses, inserted_bytes: as in PoolCounters
    """

    def __init__(
        self,
        layer: int,
        layout: FlatLayout,
        plan: LayerPlan,
        memory: torch.Tensor,
        host: torch.Tensor,
        link: Link,
    ) -> None:
        """layout, plan: of the layer
        memory: bytes of the pool on the device
        host: bytes of all experts, the last part of the layer
        """
        sizes, slots = plan.experts, plan.expert_slots
        own = layout.of_experts(slots, sizes.count)
        self.views = own.views(memory)
        self.slots = slots
        self.recent = RecentExperts(sizes.count, slots)
        self.hits = self.misses = self.inserted_bytes = 0
        self._layer, self._host, self._link = layer, host, link
        self._parts = [
            Part(
                layout.offsets[name] - layout.first_bytes,
                stored.nbytes // slots,
                memory[own.offsets[name] :][: stored.nbytes],
            )
            for name, stored in own.formats.items()
        ]
        # Copies to slots that no pass has waited for.
        self._coming: list[tuple[int, Event]] = []
        # The last two parts of a prefill's rows, of which the very last may be short.
        self._noted: list[torch.Tensor] = []

    def divide(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors [rows, active] for the experts that a pass chose: the slot of each (-1
        if the pool does not have it), and the expert itself if the pool does not have it (else -1).
        What the device computes next may read the slots.

        chosen: experts of each row, [rows, active] int64 on the host
        Raises LinkError.
        """
        self.finish()
        slot_of = self.recent.slot_of
        slots = torch.tensor([[slot_of[expert] for expert in row] for row in chosen.tolist()])
        return slots, chosen.where(slots < 0, -1)

    def used(self, chosen: torch.Tensor) -> None:
        """Note what a pass used, after the launches that read the slots. Start copies of experts
        that were missing.

        chosen: as for `divide`
        """
        rows = chosen.flatten().tolist()
        hits, missing = self.recent.after_pass(rows)
        self.hits += hits
        self.misses += len(missing)
        for expert in missing[:MOST_INSERTED]:
            if (slot := self.recent.make_room(rows)) is None:
                return
            # The device may be reading the slot. Nothing finds it until the copy is under way.
            after = (self._link.record(),)
            for part in self._parts:
                source = part.of_expert(self._host, expert)
                what = ("expert", self._layer, expert)
                event = self._link.to_device(part.of_slot(slot), source, after, what)
                self._coming.append((slot, event))
                self.inserted_bytes += part.nbytes
            self.recent.put(expert, slot)

    def note(self, chosen: torch.Tensor) -> None:
        """Note what the next rows of a prefill chose, [rows, active] int64 on the device."""
        self._noted = [*self._noted[-1:], chosen]

    def fill(self, experts: torch.Tensor) -> None:
        """Fill the pool with the experts that rows of a prefill used last, of those noted since the
        last call.

        experts: bytes of all experts on the device
        Raises LinkError.
        """
        noted, self._noted = self._noted, []
        if not noted:
            return
        chosen = come(torch.cat(noted)).cpu()
        self.finish()
        wanted = self.recent.after_prefill(chain.from_iterable(reversed(chosen.tolist())))
        for expert in wanted:
            if self.recent.slot_of[expert] >= 0:
                continue
            if (slot := self.recent.make_room(wanted)) is None:
                return
            for part in self._parts:
                part.of_slot(slot).copy_(part.of_expert(experts, expert))
            self.recent.put(expert, slot)

    def close(self) -> None:
        """Drop all tensors, so that no one who still refers to the pool keeps their memory."""
        self.views = Views()
        self._parts.clear()
        self._noted.clear()

    def finish(self) -> None:
        """Make later compute start after the copies to slots. Raises LinkError."""
        while self._coming:
            slot, event = self._coming.pop()
            try:
                self._link.wait(event)
            except LinkError:
                self.recent.empty(slot)
                raise


class ExpertPools(dict[int, ExpertPool]):
    """The pools of all layers that have one, by layer."""

    def __init__(
        self,
        layouts: Sequence[FlatLayout],
        plans: Sequence[LayerPlan],
        hosts: Iterable[torch.Tensor | None],
        memory: DeviceMemory,
        link: Link,
    ) -> None:
        """layouts, plans, hosts: of each layer: its layout, its plan, and the bytes of it that are
        not on the device, if host memory has them

        Raises DoesNotFitError.
        """
        self._memory = memory
        self._of_given_up = PoolCounters()
        sizes = [plan.pool_bytes for plan in plans]
        self._allocation: Allocation | None = None
        if any(sizes):
            self._allocation = memory.allocate(sum(sizes), "experts")
            parts = zip(layouts, plans, self._allocation.bytes.split(sizes), hosts, strict=True)
            for layer, (layout, plan, own, host) in enumerate(parts):
                if plan.pool_bytes:
                    self[layer] = ExpertPool(layer, layout, plan, own, host, link)

    def counters(self) -> PoolCounters:
        """Return the sums over all layers, of all passes so far."""
        counted = ((each.hits, each.misses, each.inserted_bytes) for each in self.values())
        return PoolCounters(*map(sum, zip(self._of_given_up, *counted, strict=True)))

    def give_up(self) -> bool:
        """Free all pools: the processor computes every expert from then on. Return whether there
        were any. Raises LinkError.
        """
        if not self:
            return False
        for pool in self.values():
            pool.finish()
        self._of_given_up = self.counters()
        self.close()
        return True

    def close(self) -> None:
        for pool in self.values():
            pool.close()
        self.clear()
        if self._allocation is not None:
            self._memory.free(self._allocation)
            self._allocation = None
