"""One round of decoding as a schedule: refresh, draft, and the pass that verifies.

The same transfers in the same order as `runtime.Session` hands to the conveyor, and the pieces of
compute that wait for them. `simulate` runs all of it on a virtual clock; `estimate` bounds the same
layer by layer, for a search over many plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from offload.placement import Demand, Placement, share_blocks
from offload.simulate import Copy, Timeline, Work, simulate
from triforce_core.planner.costs import Costs

WEIGHTS, KV = "weights", "kv"
_FEW_BLOCKS = 8
"""Up to which a layer's blocks are estimated one by one."""


@dataclass(frozen=True)
class Round:
    """length: tokens in the cache. tokens: that the pass verifies, the last one of the text too.

    scored: whether the pass scores chunks. draft_seconds, refresh_seconds: before the pass; its
    copies start with the draft, after the refresh. early_head: the pass's copies start before the
    head of the pass before it, as without drafts
    """

    costs: Costs
    demand: Demand
    placement: Placement
    length: int
    tokens: int
    scored: bool = False
    draft_seconds: float = 0.0
    refresh_seconds: float = 0.0
    early_head: bool = False

    @cached_property
    def streamed_blocks(self) -> tuple[int, ...]:
        """KV blocks that stream, of each layer."""
        demand = self.demand
        resident = min(self.placement.resident_kv_blocks, demand.kv_blocks)
        blocks = self.length // demand.kv.block_tokens
        shares = share_blocks(resident, demand.layers)
        return tuple(max(0, blocks - share) for share in shares)

    @cached_property
    def link_bytes(self) -> int:
        """What a pass brings to the device."""
        demand = self.demand
        weights = len(self.placement.streamed_layers) * demand.layer_bytes
        return weights + sum(self.streamed_blocks) * demand.kv.block_bytes

    @property
    def link_seconds(self) -> float:
        """The floor: no pass is faster than its bytes over the link."""
        return self.link_bytes / self._rate

    @property
    def head_seconds(self) -> float:
        return self.costs.head(self.tokens) + self.costs.round

    @cached_property
    def compute_seconds(self) -> float:
        """What a pass computes, its head included, if it never waits."""
        layers = sum(
            self._before + self._attended(streamed) + streamed * self._block + self._rest
            for streamed in self.streamed_blocks
        )
        return layers + self.head_seconds

    def schedule(self) -> tuple[list[Copy], list[Work], dict[str, int]]:
        """Transfers, compute and slots, for `offload.simulate.simulate`."""
        copies: list[Copy] = []
        works = [Work("refresh", self.refresh_seconds), Work("draft", self.draft_seconds)]
        if self.early_head:
            works.append(Work("head", self.head_seconds))
        demand, streamed_layers = self.demand, set(self.placement.streamed_layers)
        for layer, streamed in enumerate(self.streamed_blocks):
            held: tuple[int, ...] = ()
            if layer in streamed_layers:
                held = (len(copies),)
                copies.append(Copy(WEIGHTS, layer, demand.layer_bytes))
            before = self._before + self._attended(streamed)
            works.append(Work("layer", before, len(copies), (), layer))
            first = self.length // demand.kv.block_tokens - streamed
            for block in range(first, first + streamed):
                index = len(copies)
                copies.append(Copy(KV, layer, demand.kv.block_bytes, block))
                works.append(Work("layer", self._block, index + 1, (index,), layer))
            works.append(Work("layer", self._rest, 0, held, layer))
        if not self.early_head:
            works.append(Work("head", self.head_seconds))
        slots = {WEIGHTS: self.placement.weight_slots, KV: self.placement.kv_slots}
        return copies, works, slots

    def simulate(self) -> Timeline:
        copies, works, slots = self.schedule()
        return simulate(copies, works, slots, self._rate, self.refresh_seconds)

    def estimate(self) -> float:
        """Seconds of the round: what `simulate` gives, within a per cent.

        A layer's last block comes when the link has carried all its blocks, or when slots were free
        for them: all but the slots' own wait for a block to be read, and so follow compute.
        """
        link = self.refresh_seconds
        clock = self.refresh_seconds + self.draft_seconds
        clock += self.head_seconds if self.early_head else 0.0
        weight_seconds = self.demand.layer_bytes / self._rate
        copy = self.demand.kv.block_bytes / self._rate
        attend, slots = self._block, self.placement.kv_slots
        released: list[float] = []
        weights_released: list[float] = []
        streamed_layers = set(self.placement.streamed_layers)
        for layer, blocks in enumerate(self.streamed_blocks):
            if layer in streamed_layers:
                if len(weights_released) >= self.placement.weight_slots:
                    link = max(link, weights_released[-self.placement.weight_slots])
                link += weight_seconds
                clock = max(clock, link)
            clock += self._before + self._attended(blocks)
            if blocks > max(slots, _FEW_BLOCKS):
                if len(released) >= slots:
                    link = max(link, released[-slots])
                first = link + copy
                slower, faster = max(copy, attend), min(copy, attend)
                link = max(link + blocks * copy, clock + (blocks - slots) * slower + faster)
                clock = max(clock + blocks * attend, link + attend, first + blocks * attend)
                released = [clock - i * slower for i in reversed(range(slots))]
            else:
                for _ in range(blocks):
                    if len(released) >= slots:
                        link = max(link, released[-slots])
                    link += copy
                    clock = max(clock, link) + attend
                    released.append(clock)
            clock += self._rest
            if layer in streamed_layers:
                weights_released.append(clock)
        return clock + (0.0 if self.early_head else self.head_seconds)

    @property
    def _rate(self) -> float:
        return self.costs.hardware.stream_bytes_per_second

    @cached_property
    def _before(self) -> float:
        return self.costs.before(self.tokens)

    @cached_property
    def _block(self) -> float:
        """Attention to one block."""
        keys = self.demand.kv.block_tokens
        return self.costs.attend(self.tokens, keys, scored=self.scored)

    def _attended(self, streamed: int) -> float:
        """Attention to a layer's resident blocks."""
        return (self.length // self.demand.kv.block_tokens - streamed) * self._block

    @cached_property
    def _rest(self) -> float:
        """A layer from the hot tail on."""
        block = self.demand.kv.block_tokens
        tail = self.costs.attend(self.tokens, self.length % block + self.tokens, scored=self.scored)
        parts = self.length // block + 1
        return tail + self.costs.merge(self.tokens, parts) + self.costs.after(self.tokens)
