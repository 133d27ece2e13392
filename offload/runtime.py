"""What lives longer than any sequence on a device: link, memory, weights, slots and passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain

import torch

from triforce_offload.conveyor import Conveyor
from triforce_offload.copies import PassCopies
from triforce_offload.errors import LinkError
from triforce_offload.kv.caches.processor import ProcessorAttention
from triforce_offload.kv.evictions import StagingSlots
from triforce_offload.kv.index.store import IndexStore
from triforce_offload.kv.recent.store import RecentStore
from triforce_offload.kv.recent.stores import RecentStores
from triforce_offload.kv.sequence import SequenceKV
from triforce_offload.kv.states.store import StateStore
from triforce_offload.kv.store import KVStore
from triforce_offload.kv.windows.store import WindowStore
from triforce_offload.link.link import Link
from triforce_offload.link.trace import Tracer
from triforce_offload.memory.device import Allocation, DeviceMemory
from triforce_offload.memory.host import HostBlocks, HostMemory
from triforce_offload.passes import Passes
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placing import share_blocks
from triforce_offload.schedule import KV, WEIGHTS
from triforce_offload.weights.expert_pool import ExpertPools
from triforce_offload.weights.layouts import FlatLayout
from triforce_offload.weights.store import Fill, Loaded, StreamedWeights, WeightStore


class Runtime:
    """Link, device memory, weights, slots and host blocks of one engine, on one device.

    passes: the passes over sequences that `sequence` created
    """

    def __init__(
        self,
        memory: DeviceMemory,
        host: HostMemory,
        link: Link,
        plan: MemoryPlan,
        layouts: Sequence[FlatLayout],
        fill: Fill,
        trace: Tracer,
        loaded: Loaded = lambda layer: None,
    ) -> None:
        """Allocate and fill the layers' weights according to the plan.

        layouts: layout of each layer
        fill, loaded: as in WeightStore
        trace: receives what passes compute

        Raises DoesNotFitError and whatever `fill` raises.
        """
        self.memory = memory
        self.host = host
        self.link = link
        self.trace = trace
        self.plan = plan
        shape, placement = plan.kv.shape, plan.placement
        with ExitStack() as undo:
            self.host_blocks = HostBlocks(shape.block_bytes, host)
            undo.callback(self.host_blocks.close)
            self.dense_blocks = HostBlocks(shape.dense_block_bytes, host)
            undo.callback(self.dense_blocks.close)
            self.weights = WeightStore(layouts, plan.layers, memory, host, fill, loaded)
            undo.callback(self.weights.close)
            hosts = [each.source and each.source.bytes for each in self.weights.locations]
            self.expert_pools = ExpertPools(layouts, plan.layers, hosts, memory, link)
            undo.callback(self.expert_pools.close)
            self._rings: list[list[Allocation]] = []
            self.conveyor = Conveyor(
                link,
                {
                    WEIGHTS: self._ring(placement.weight_slots, plan.slot_bytes, "weight slots"),
                    KV: self._ring(placement.kv_slots, shape.slot_bytes, "KV slots"),
                },
            )
            staging = self._ring(placement.staging_slots, shape.slot_bytes, "staging slots")
            self._staged = self._rings.pop()
            self._staging = StagingSlots(staging, link)
            processor = None
            if plan.kv.by_processor:
                processor = ProcessorAttention(shape, placement.processor_kv, link, trace)
                undo.callback(processor.close)
            kv_index = plan.requirements.kv_index
            self._copies = PassCopies(self.conveyor, self.weights, kv_index, processor)
            through = layouts, self.conveyor, trace, self.expert_pools
            self.passes = Passes(
                self._copies,
                StreamedWeights(self.weights.in_passes, *through, prefills=False),
                StreamedWeights(self.weights.locations, *through, prefills=True),
            )
            undo.pop_all()

    @property
    def streams(self) -> bool:
        """See MemoryPlan.streams."""
        return self.plan.streams

    def sequence(self) -> SequenceKV:
        """Allocate memory for one sequence: its tail, its share of the KV blocks on the device, its
        windows and states, and the temporaries of its forwards.

        Raises DoesNotFitError.
        """
        plan, needs = self.plan, self.plan.requirements
        resident = plan.kv.resident // needs.sequences
        kv = KVStore(
            plan.kv.shape,
            needs.max_pass_tokens,
            share_blocks(resident, plan.kv.shape.layers),
            self.memory,
            self.host_blocks,
            self.link,
            self._staging,
            self.dense_blocks,
        )
        with ExitStack() as undo:
            undo.callback(kv.close)
            shapes = needs.windows, needs.states, needs.ngrams, needs.index
            kinds = WindowStore, StateStore, StateStore, IndexStore
            stores: list[RecentStore | None] = []
            for shape, kind in zip(shapes, kinds, strict=True):
                stores.append(shape and kind(shape, needs.max_pass_tokens, self.memory))
                if stores[-1]:
                    undo.callback(stores[-1].close)
            recent = RecentStores(*stores)
            sequence = SequenceKV(kv, self._copies, self.memory, plan, recent)
            undo.pop_all()
        return sequence

    def give_up_resident(self, sequence: SequenceKV) -> bool:
        """See `SequenceKV.give_up_resident`. sequence: the only sequence of the engine"""
        if not sequence.give_up_resident():
            return False
        self.plan = self.plan.placed(resident_kv_blocks=0)
        return True

    def give_up_pools(self) -> bool:
        """See `ExpertPools.give_up`."""
        if not self.expert_pools.give_up():
            return False
        self.plan = self.plan.placed(expert_slots=0)
        return True

    def close(self) -> None:
        with suppress(LinkError):
            self.link.synchronize()
        self.conveyor.close()
        if self._copies.processor is not None:
            self._copies.processor.close()
        self.expert_pools.close()
        self.weights.close()
        self.host_blocks.close()
        self.dense_blocks.close()
        for allocation in (*chain(*self._rings), *self._staged):
            self.memory.free(allocation)
        self._rings.clear()
        self._staged.clear()
        self._staging.close()

    def _ring(self, slots: int, slot_bytes: int, purpose: str) -> list[torch.Tensor]:
        # Slots are allocated one by one, so that some of them can be freed.
        ring: list[Allocation] = []
        self._rings.append(ring)
        ring.extend(self.memory.allocate(slot_bytes, purpose) for _ in range(slots))
        return [allocation.bytes for allocation in ring]
