"""What one round of decoding costs: refresh, draft, and the pass that verifies.

The pass is the schedule that the runtime executes (`triforce_offload.schedule`), each of its pieces
with seconds, on a virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from triforce_core.planner.costs import Costs
from triforce_offload.placement import Demand, Placement, share_blocks
from triforce_offload.schedule import KV, WEIGHTS, Crossing, Kind, KVPlaces, Places, pass_schedule
from triforce_offload.simulate import ReadFromDisk, Timeline, Work, simulate


@dataclass(frozen=True)
class RoundCost:
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
    def places(self) -> Places:
        """Between texts that are read: reclaimed memory holds KV."""
        demand, placement = self.demand, self.placement
        resident = placement.resident_kv_blocks + placement.reclaimed_kv_blocks
        resident = min(resident, demand.kv_blocks) // demand.sequences
        shares = share_blocks(resident, demand.layers)
        return Places(
            streamed_layers=frozenset(placement.streamed_layers),
            layer_bytes=[demand.crossing_bytes(layer, placement) for layer in range(demand.layers)],
            texts=[KVPlaces([self._blocks] * demand.layers, shares)],
            block_bytes=demand.kv.block_bytes,
        )

    @cached_property
    def link_bytes(self) -> int:
        """What a pass brings to the device."""
        places = self.places
        blocks = sum(max(0, self._blocks - share) for share in places.texts[0].resident)
        weights = self.demand.streamed_bytes(self.placement)
        return weights + blocks * places.block_bytes

    @property
    def link_seconds(self) -> float:
        """What a pass's bytes take over the link. Nobody waits for those that come while
        drafting: a pass may be a little faster, a round is not.
        """
        return self.link_bytes / self._rate + self.disk_seconds

    @property
    def disk_bytes(self) -> int:
        """What a pass reads from files."""
        return sum(self.demand.layer_bytes[layer] for layer in self.placement.file_layers)

    @property
    def _disk(self) -> ReadFromDisk | None:
        hardware = self.costs.hardware
        rate = hardware.disk_bytes_per_second
        if not self.placement.file_layers or rate is None:
            return None
        # All GPUs read from it at once.
        return ReadFromDisk(frozenset(self.placement.file_layers), rate / hardware.gpus)

    @property
    def disk_seconds(self) -> float:
        """What reading from files takes beyond crossing the link."""
        if (disk := self._disk) is None:
            return 0.0
        return max(0.0, self.disk_bytes / disk.bytes_per_second - self.disk_bytes / self._rate)

    @cached_property
    def compute_seconds(self) -> float:
        """What a pass computes, its head included, if it never waits."""
        seconds = self._seconds
        layer = seconds[Kind.BEFORE] + self._blocks * seconds[Kind.BLOCK] + seconds[Kind.AFTER]
        return self.demand.layers * layer + self.head_seconds

    @property
    def head_seconds(self) -> float:
        return self.costs.head(self.tokens) + self.costs.round

    @property
    def least_seconds(self) -> float:
        """What a round takes at the least: its compute; or what crosses after the draft, during
        which no more crosses than the slots hold.
        """
        placement, demand = self.placement, self.demand
        ahead = placement.weight_slots * demand.slot_bytes(placement)
        ahead += placement.kv_slots * demand.kv.block_bytes
        # Those ahead may be the slowest.
        crossing = max(0, self.link_bytes - ahead) / self._rate
        if disk := self._disk:
            crossing += max(0.0, self.disk_seconds - ahead / disk.bytes_per_second)
        return self.refresh_seconds + self.draft_seconds + max(self.compute_seconds, crossing)

    @cached_property
    def executed(self) -> tuple[list[Crossing], list[Work], Timeline]:
        """What crosses, what computes, and when."""
        schedule, seconds = pass_schedule(self.places), self._seconds
        works = [Work("refresh", self.refresh_seconds), Work("draft", self.draft_seconds)]
        head = Work("head", self.head_seconds)
        if self.early_head:
            works.append(head)
        attend = seconds[Kind.BLOCK]
        for kind, layer, blocks, needs, releases in schedule.pieces:
            # Attention is all that a BLOCK computes.
            own = attend if kind is Kind.BLOCK else seconds[kind] + blocks * attend
            works.append(Work("layer", own, needs, releases, layer))
        if not self.early_head:
            works.append(head)
        slots = {WEIGHTS: self.placement.weight_slots, KV: self.placement.kv_slots}
        timeline = simulate(
            schedule.crossings,
            works,
            slots,
            self._rate,
            copies_begin=self.refresh_seconds,
            read_from_disk=self._disk,
        )
        return schedule.crossings, works, timeline

    @property
    def seconds(self) -> float:
        """What the round takes on the virtual clock."""
        return self.executed[2].seconds

    @property
    def pass_seconds(self) -> float:
        """What the round takes after its draft."""
        return self.seconds - self.draft_seconds - self.refresh_seconds

    @property
    def prefetched_bytes(self) -> int:
        """What of a pass crosses before it begins: while drafting, as far as the slots take it."""
        crossings, _, timeline = self.executed
        begins = self.refresh_seconds + self.draft_seconds
        early = 0.0
        for crossing, (began, ended) in zip(crossings, timeline.crossings, strict=True):
            if began >= begins:
                break
            share = (min(ended, begins) - began) / (ended - began)
            early += share * crossing.nbytes
        return round(early)

    @property
    def _rate(self) -> float:
        return self.costs.hardware.stream_bytes_per_second

    @property
    def _blocks(self) -> int:
        """KV blocks of each layer."""
        return self.length // self.demand.kv.block_tokens

    @cached_property
    def _seconds(self) -> dict[Kind, float]:
        """Seconds of each kind of piece; of BEFORE without the blocks that it attends to."""
        costs, tokens, block = self.costs, self.tokens, self.demand.kv.block_tokens
        tail = costs.attend(tokens, self.length % block + tokens, scored=self.scored)
        merge = costs.merge(tokens, self._blocks + 1)
        return {
            Kind.BEFORE: costs.before(tokens),
            Kind.BLOCK: costs.attend(tokens, block, scored=self.scored)
            + costs.decode_block(self.demand.kv),
            Kind.AFTER: tail + merge + costs.after(tokens),
        }
