"""What one round of decoding costs: refresh, draft, and the pass that verifies.

The pass is the schedule that the runtime executes (`triforce_offload.schedule`), each of its pieces
with seconds, on a virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from triforce_core.plan.simulation.costs import Costs
from triforce_offload.kv.shape import KVShape
from triforce_offload.plan.memory_plan import MemoryPlan, Where
from triforce_offload.plan.placing import share_blocks
from triforce_offload.plan.simulate import ReadFromDisk, Timeline, Work, simulate
from triforce_offload.schedule import KV, WEIGHTS, Crossing, Kind, KVPlaces, Places, pass_schedule


@dataclass(frozen=True)
class RoundCost:
    """length: tokens in the cache. tokens: that the pass verifies, the last one of the text too.

    scored: whether the pass scores chunks. draft_seconds, refresh_seconds: before the pass; its
    copies start with the draft, after the refresh. early_head: the pass's copies start before the
    head of the pass before it, as without drafts
    """

    costs: Costs
    memory: MemoryPlan
    length: int
    tokens: int
    scored: bool = False
    draft_seconds: float = 0.0
    refresh_seconds: float = 0.0
    early_head: bool = False

    @cached_property
    def places(self) -> Places:
        """Between texts that are read: reclaimed memory holds KV."""
        kv = self.memory.kv
        resident = min(kv.resident + kv.reclaimed, kv.blocks) // self.memory.requirements.sequences
        return Places(
            layer_bytes=[layer.link_bytes for layer in self.memory.layers],
            texts=[
                KVPlaces([self._blocks] * kv.shape.layers, share_blocks(resident, kv.shape.layers))
            ],
            block_bytes=kv.shape.block_bytes,
        )

    @cached_property
    def link_bytes(self) -> int:
        """What a pass brings to the device."""
        places = self.places
        blocks = sum(max(0, self._blocks - share) for share in places.texts[0].resident)
        return self.memory.weights_link_bytes + blocks * places.block_bytes

    @property
    def link_seconds(self) -> float:
        """What a pass's bytes take over the link. Nobody waits for those that come while
        drafting: a pass may be a little faster, a round is not.
        """
        return self.link_bytes / self._rate + self.disk_seconds

    @property
    def disk_bytes(self) -> int:
        """What a pass reads from files."""
        return self.memory.weights_file_bytes

    @property
    def _disk(self) -> ReadFromDisk | None:
        hardware = self.costs.hardware
        rate = hardware.disk_bytes_per_second
        if not self.disk_bytes or rate is None:
            return None
        layers = enumerate(self.memory.layers)
        in_files = frozenset(index for index, layer in layers if layer.where is Where.FILE)
        # All GPUs read from it at once.
        return ReadFromDisk(in_files, rate / hardware.gpus)

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
        return len(self.memory.layers) * layer + self.head_seconds

    @property
    def head_seconds(self) -> float:
        return self.costs.head(self.tokens) + self.costs.round

    @property
    def least_seconds(self) -> float:
        """What a round takes at the least: its compute; or what crosses after the draft, during
        which no more crosses than the slots hold.
        """
        placement = self.memory.placement
        ahead = placement.weight_slots * self.memory.slot_bytes
        ahead += placement.kv_slots * self._shape.block_bytes
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
        placement = self.memory.placement
        slots = {WEIGHTS: placement.weight_slots, KV: placement.kv_slots}
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
        return self.length // self._shape.block_tokens

    @property
    def _shape(self) -> KVShape:
        return self.memory.kv.shape

    @cached_property
    def _seconds(self) -> dict[Kind, float]:
        """Seconds of each kind of piece; of BEFORE without the blocks that it attends to."""
        costs, tokens, block = self.costs, self.tokens, self._shape.block_tokens
        tail = costs.attend(tokens, self.length % block + tokens, scored=self.scored)
        merge = costs.merge(tokens, self._blocks + 1)
        return {
            Kind.BEFORE: costs.before(tokens),
            Kind.BLOCK: costs.attend(tokens, block, scored=self.scored)
            + costs.decode_block(self._shape),
            Kind.AFTER: tail + merge + costs.after(tokens),
        }
