"""Cost of one round of decoding: the refresh, the draft and the verify pass.

The pass follows the schedule that the runtime executes (`triforce_offload.schedule`). Each of its
pieces takes its seconds on a virtual clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from triforce_core.plan.levels import LONGEST_RECORDED
from triforce_core.plan.simulation.costs.forward import Costs
from triforce_core.plan.simulation.processor import Processor
from triforce_offload.errors import UsageError
from triforce_offload.kv.shape import KVShape
from triforce_offload.plan.memory_plan import MemoryPlan, Where
from triforce_offload.plan.placement import left_to_processor
from triforce_offload.plan.placing import share_blocks
from triforce_offload.plan.simulate import ReadFromDisk, Timeline, Work, simulate
from triforce_offload.schedule import KV, WEIGHTS, Crossing, Kind, KVPlaces, Places, pass_schedule

# Shares of the KV that are tried are multiples of one in this many.
_SHARES = 20


@dataclass(frozen=True)
class RoundCost:
    """The cost of one round.

    length: number of tokens in the KV cache of each sequence
    tokens: number of rows of the pass: of each sequence, the draft tokens and the last token
    scored: whether the pass scores chunks
    draft_seconds, refresh_seconds: duration of the draft and of the refresh before it; the copies
        of the pass start with the draft
    early_head: whether the copies of the pass start before the head of the previous pass, as in
        decoding without drafts
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
        """The places of weights and KV after the prefill, when reclaimed memory has KV. All
        sequences have as much KV.
        """
        kv = self.memory.kv
        resident = min(kv.resident + kv.reclaimed, kv.blocks) // self._sequences
        sequence = self._sequence(share_blocks(resident, kv.shape.layers))
        return Places(
            layer_bytes=[layer.link_bytes for layer in self.memory.layers],
            sequences=[sequence] * self._sequences,
            block_bytes=kv.shape.block_bytes,
            kv_index=self.memory.requirements.kv_index,
        )

    def _sequence(self, resident: Sequence[int]) -> KVPlaces:
        """Return where the KV is. resident: blocks of each layer that are on the device"""
        blocks, share = self._blocks, self.memory.placement.processor_kv
        counts = [left_to_processor(share, max(0, blocks - first)) for first in resident]
        elsewhere = [range(first, first + n) for first, n in zip(resident, counts, strict=True)]
        return KVPlaces([blocks] * len(resident), resident, elsewhere if share else ())

    @cached_property
    def link_bytes(self) -> int:
        """Bytes that a pass copies to the device."""
        places, sequence = self.places, self.places.sequences[0]
        blocks = sum(max(0, self._blocks - share) for share in sequence.resident)
        kv = places.block_bytes * (self._sequences * blocks - self._elsewhere)
        return self.memory.weights_link_bytes + kv + self._inserted_bytes

    @property
    def _inserted_bytes(self) -> int:
        """Bytes of experts that cross to pools while the pass computes other layers."""
        experts = (layer.experts.nbytes for layer in self.memory.layers if layer.expert_slots)
        return round(self.processor.inserted * sum(experts))

    @cached_property
    def _elsewhere(self) -> int:
        """Number of blocks of all layers and sequences to which the processor attends."""
        return self._sequences * sum(map(len, self.places.sequences[0].by_processor))

    @property
    def link_seconds(self) -> float:
        """Time in which the bytes of a pass cross the link. Some of them cross while drafting, so a
        pass may be a little faster than this, but a round is not.
        """
        return self.link_bytes / self._rate + self.disk_seconds

    @property
    def disk_bytes(self) -> int:
        """Bytes that a pass reads from files."""
        return self.memory.weights_file_bytes

    @property
    def _disk(self) -> ReadFromDisk | None:
        hardware = self.costs.hardware
        rate = hardware.disk_bytes_per_second
        if not self.disk_bytes or rate is None:
            return None
        layers = enumerate(self.memory.layers)
        in_files = frozenset(index for index, layer in layers if layer.where is Where.FILE)
        # All GPUs read from the disk at once.
        return ReadFromDisk(in_files, rate / hardware.gpus)

    @property
    def disk_seconds(self) -> float:
        """Time that reading from files takes beyond the time on the link."""
        if (disk := self._disk) is None:
            return 0.0
        return max(0.0, self.disk_bytes / disk.bytes_per_second - self.disk_bytes / self._rate)

    @cached_property
    def compute_seconds(self) -> float:
        """Compute time of a pass, its head included, without waits."""
        seconds, full = self._seconds, self._shape.layers
        blocks = self._sequences * self._blocks
        layer = seconds[Kind.BEFORE] + blocks * seconds[Kind.BLOCK] + seconds[Kind.AFTER]
        layers = full * layer + sum(self._recent_seconds.values())
        layers += len(self._by_processor) * self._longer
        if elsewhere := self._elsewhere:
            # In each layer the device waits for the processor's part, or the other way round.
            own = (full * blocks - elsewhere) * seconds[Kind.BLOCK]
            theirs = self.attention_seconds
            # On a machine without a GPU the device is the processor.
            both = own + theirs if self.costs.hardware.emulated else max(own, theirs)
            layers += both - full * blocks * seconds[Kind.BLOCK]
        return layers + self.head_seconds

    @cached_property
    def attention_seconds(self) -> float:
        """Seconds in which the processor attends to its blocks."""
        if not (blocks := self._elsewhere):
            return 0.0
        shape = self._shape
        if self.costs.hardware.emulated:
            return blocks * self._seconds[Kind.BLOCK]
        self._check_rates()
        keys, nbytes = blocks * shape.block_tokens, blocks * shape.block_bytes
        layers = sum(map(bool, self.places.sequences[0].by_processor))
        processor = replace(self.processor, tokens=self._rows)
        return processor.attention_seconds(layers, keys, nbytes, self.link_bytes)

    @property
    def fastest_kv_shares(self) -> set[float]:
        """Shares of the KV away from the device that the processor might be left: none, all, and
        those between which link and processor end together, if they never wait for one another.
        """
        if not self.memory.kv.away:
            return {0.0}

        def cost(step: int) -> RoundCost:
            return replace(self, memory=self.memory.placed(processor_kv=step / _SHARES))

        def computes(step: int) -> bool:
            found = cost(step)
            return found.compute_seconds >= found.link_seconds

        # The larger the share, the longer it computes, and the shorter the link is busy.
        enough = bisect_left(range(_SHARES), True, key=computes)
        return {0.0, max(0, enough - 1) / _SHARES, enough / _SHARES, 1.0}

    @cached_property
    def processor_seconds(self) -> float:
        """Seconds in which the processor computes its layers.

        Raises UsageError if its rates are not known.
        """
        if not (layers := len(self._by_processor)):
            return 0.0
        self._check_rates()
        return self.processor.seconds(layers, self.link_bytes)

    @cached_property
    def processor(self) -> Processor:
        placement = self.memory.placement
        return Processor(
            self.costs, self.tokens, bool(placement.expert_layers), placement.expert_slots
        )

    def _check_rates(self) -> None:
        if not self.processor.known:
            raise UsageError(
                "what the CPU computes needs its rates: give --host-bandwidth and "
                "--host-flops, or let `triforce env --probe` measure those of this machine"
            )

    @property
    def _aside(self) -> dict[int, float]:
        """Seconds in which the processor attends to its blocks of each layer that has some."""
        sequence, index = self.places.sequences[0], self.places.kv_index
        blocks = {
            layer: self._sequences * len(sequence.by_processor[kv])
            for layer, kv in enumerate(index)
            if kv is not None and sequence.by_processor
        }
        return {
            layer: self.attention_seconds * count / self._elsewhere
            for layer, count in blocks.items()
            if count
        }

    @cached_property
    def _by_processor(self) -> frozenset[int]:
        """Layers that the processor computes."""
        return frozenset(self.memory.placement.processor_layers)

    @cached_property
    def _longer(self) -> float:
        """Seconds that a layer takes longer on the processor than on the device."""
        if not (layers := len(self._by_processor)):
            return 0.0
        return self.processor_seconds / layers - self.processor.on_device

    @property
    def head_seconds(self) -> float:
        return self.costs.head(self.tokens) + self.costs.round

    @property
    def least_seconds(self) -> float:
        """Lower bound of a round: the refresh and the draft, then the longer of compute and the
        copies after the draft. No more than the slots have room for can cross during the draft.
        """
        placement = self.memory.placement
        ahead = placement.weight_slots * self.memory.slot_bytes
        ahead += placement.kv_slots * self._shape.block_bytes
        # The copies made ahead may be the slowest ones.
        crossing = max(0, self.link_bytes - ahead) / self._rate
        if disk := self._disk:
            crossing += max(0.0, self.disk_seconds - ahead / disk.bytes_per_second)
        return self.refresh_seconds + self.draft_seconds + max(self.compute_seconds, crossing)

    @cached_property
    def executed(self) -> tuple[list[Crossing], list[Work], Timeline]:
        """The crossings, the compute work, and their timeline."""
        schedule, seconds = pass_schedule(self.places), self._seconds
        works = [Work("refresh", self.refresh_seconds), Work("draft", self.draft_seconds)]
        head = Work("head", self.head_seconds)
        if self.early_head:
            works.append(head)
        attend, aside = seconds[Kind.BLOCK], self._aside
        for kind, layer, blocks, needs, releases in schedule.pieces:
            # A BLOCK piece computes only attention.
            own = attend if kind is Kind.BLOCK else seconds[kind] + blocks * attend
            if kind is Kind.AFTER and self.places.kv_index[layer] is None:
                own = self._recent_seconds[layer] - seconds[Kind.BEFORE]
            by_processor = layer in self._by_processor
            if by_processor and kind is Kind.AFTER:
                own += self._longer
            # A run shows a layer of which it computes the experts alone where the rest is.
            by_processor = by_processor and not self.processor.experts_only
            meanwhile = aside.get(layer, 0.0) if kind is Kind.BEFORE else 0.0
            if self.costs.hardware.emulated:
                own, meanwhile = own + meanwhile, 0.0
            joins = kind is Kind.AFTER and layer in aside
            work = Work("layer", own, needs, releases, layer, by_processor, meanwhile, joins)
            works.append(work)
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
        """Duration of the round on the virtual clock."""
        return max(self.executed[2].seconds, self.link_seconds if self._inserted_bytes else 0.0)

    @property
    def pass_seconds(self) -> float:
        """Duration of the round after its draft."""
        return self.seconds - self.draft_seconds - self.refresh_seconds

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of a pass that cross before it begins: while drafting, limited by the slots."""
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
        """Number of KV blocks of each layer."""
        return self.length // self._shape.block_tokens

    @property
    def _sequences(self) -> int:
        return self.memory.requirements.sequences

    @property
    def _rows(self) -> int:
        """Number of rows of each sequence."""
        return self.tokens // self._sequences

    @property
    def _shape(self) -> KVShape:
        return self.memory.kv.shape

    @cached_property
    def _recorded(self) -> bool:
        """Whether the pass is recorded as a graph."""
        needs = self.memory.requirements
        away = self.link_bytes or self.memory.placement.uses_processor or self._elsewhere
        return needs.records_passes and not away and self.tokens <= LONGEST_RECORDED

    @cached_property
    def _recent_seconds(self) -> dict[int, float]:
        """Seconds of each layer that keeps no KV in blocks."""
        costs, tokens, config = self.costs, self.tokens, self.costs.config
        keys, recorded, found = self.length + self._rows, self._recorded, {}
        beside = costs.before(tokens, recorded=recorded) + costs.after(tokens, recorded=recorded)
        for layers in filter(None, (config.window_layers, config.recurrent_layers)):
            mixer = config.layers[layers[0]].mixer
            mixed = self._sequences * costs.recent(mixer, self._rows, keys, recorded=recorded)
            found |= dict.fromkeys(layers, beside + mixed)
        return found

    @cached_property
    def _seconds(self) -> dict[Kind, float]:
        """Seconds of each kind of piece, without the attention to blocks in BEFORE."""
        costs, tokens, block = self.costs, self.tokens, self._shape.block_tokens
        scored, recorded, rows = self.scored, self._recorded, self._rows
        rest = self.length % block + rows
        tail = costs.attend(rows, rest, scored=scored, recorded=recorded)
        tail += costs.merge(rows, self._blocks + 1, recorded=recorded)
        return {
            Kind.BEFORE: costs.before(tokens, recorded=recorded),
            Kind.BLOCK: costs.attend(rows, block, scored=scored, recorded=recorded)
            + costs.decode_block(self._shape, recorded=recorded),
            Kind.AFTER: self._sequences * tail + costs.after(tokens, recorded=recorded),
        }
