"""A memory plan: how much each layer and the KV take of the device, the host and the link.

A plan is the requirements of a model and a context, with a placement. Every size that follows from
a placement is computed here, once; loading, passes, statistics and the planner read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property

from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.kv.shape import KVShape
from triforce_offload.plan.placement import LAYER_LISTS, Placement, left_to_processor
from triforce_offload.plan.requirements import Requirements
from triforce_offload.weights.experts import ExpertSizes

# Number of whole host layers that are read from files ahead of their crossing.
READ_AHEAD = 2


class Where(Enum):
    """Where the exact weights of a layer are between passes.

    SPLIT: high bits on the device, low bits in host memory
    HOST, PROCESSOR: in host memory, all of them or the experts alone; in passes they cross the
        link, or the processor computes with them where they are
    FILE: in the checkpoint's files, which every pass reads
    """

    DEVICE = "device"
    SPLIT = "split"
    HOST = "host"
    PROCESSOR = "processor"
    FILE = "file"


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is kept. Sizes in bytes.

    nbytes: size of its exact weights as they are stored
    low_bytes: size of the low bits of its split matrices; 0 if nothing is split
    expert_bytes: size of its experts, if these alone are away; else 0
    copy_bytes: size of its draft copy on the device; 0 for none
    expert_slots: number of its experts that are on the device and in host memory
    experts: sizes of its experts one by one, if some are
    """

    where: Where
    nbytes: int
    low_bytes: int = 0
    expert_bytes: int = 0
    copy_bytes: int = 0
    expert_slots: int = 0
    experts: ExpertSizes | None = None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the experts that are on the device as well."""
        return self.experts.pool_bytes(self.expert_slots) if self.experts else 0

    @property
    def device_bytes(self) -> int:
        """Bytes of exact weights that stay on the device."""
        if self.where is Where.DEVICE:
            return self.nbytes
        away = self.low_bytes if self.where is Where.SPLIT else self.expert_bytes
        return self.nbytes - away if away else 0

    @property
    def prefill_link_bytes(self) -> int:
        """Bytes that cross the link in a prefill."""
        return self.nbytes - self.device_bytes

    @property
    def link_bytes(self) -> int:
        """Bytes that cross the link in each pass."""
        return 0 if self.where is Where.PROCESSOR else self.prefill_link_bytes

    @property
    def processor_bytes(self) -> int:
        """Bytes that the processor computes with in each pass, of experts all that there are."""
        return self.prefill_link_bytes if self.where is Where.PROCESSOR else 0

    @property
    def host_bytes(self) -> int:
        return 0 if self.where is Where.FILE else self.prefill_link_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes that each pass reads from files."""
        return self.link_bytes if self.where is Where.FILE else 0

    @property
    def can_draft(self) -> bool:
        """Whether the retrieval level finds the layer on the device, exactly or in fewer bits."""
        return bool(self.copy_bytes) or self.where in (Where.DEVICE, Where.SPLIT)

    def draft_bytes(self, *, high_bits: bool) -> int:
        """Return the bytes that a step of the retrieval level reads. high_bits: whether it reads
        only the high bits of split matrices
        """
        if self.copy_bytes:
            return self.copy_bytes
        high_only = high_bits or self.where is Where.SPLIT
        return self.nbytes - self.low_bytes if high_only else self.nbytes


# Most layers of a model are placed alike, and planning makes many plans.
_layer_plan = cache(LayerPlan)


@dataclass(frozen=True)
class KVPlan:
    """How the KV of all layers and sequences is kept when their contexts are full.

    blocks: number of blocks of all layers and sequences
    resident: number of these that are always on the device
    reclaimed: number of further blocks that are in the prefill workspace after a prefill
    processor_share: share of the others to which the processor attends
    """

    shape: KVShape
    blocks: int
    resident: int
    reclaimed: int
    processor_share: float = 0.0

    @property
    def away(self) -> int:
        """Number of blocks that are not on the device in passes."""
        return max(0, self.blocks - self.resident - self.reclaimed)

    @property
    def by_processor(self) -> int:
        """Number of these to which the processor attends, if they are spread evenly over layers."""
        each, more = divmod(self.away, self.shape.layers) if self.away else (0, 0)
        count = left_to_processor(self.processor_share, each) * (self.shape.layers - more)
        return count + left_to_processor(self.processor_share, each + 1) * more

    @property
    def streamed(self) -> int:
        """Number of blocks that cross the link in each pass."""
        return self.away - self.by_processor

    @property
    def device_bytes(self) -> int:
        """Bytes of resident blocks, without those in reclaimed memory."""
        return self.resident * self.shape.block_bytes

    @property
    def reclaimed_bytes(self) -> int:
        return self.reclaimed * self.shape.block_bytes

    @property
    def link_bytes(self) -> int:
        return self.streamed * self.shape.block_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of blocks in host memory. Blocks in reclaimed memory have a place there too."""
        return (self.blocks - self.resident) * self.shape.block_bytes


# Fields of a placement that change no layer, and what follows from layers alone.
_NOT_OF_LAYERS = {
    *("embedding_resident", "resident_kv_blocks", "reclaimed_kv_blocks", "processor_kv"),
    *("weight_slots", "kv_slots", "staging_slots"),
}
_OF_LAYERS = (
    *("layers", "weights_link_bytes", "weights_prefill_link_bytes", "weights_file_bytes"),
    *("processor_bytes", "slot_bytes"),
)


@dataclass(frozen=True)
class MemoryPlan:
    """Where everything of a model and its contexts goes, and how many bytes it takes there."""

    requirements: Requirements
    placement: Placement

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        needs, placement = self.requirements, self.placement
        copies, apart = set(placement.copied_layers), set(placement.expert_layers)
        where = dict.fromkeys(placement.streamed_layers, Where.HOST)
        for kind, layers in (
            (Where.SPLIT, placement.split_layers),
            (Where.FILE, placement.file_layers),
            (Where.PROCESSOR, placement.processor_layers),
        ):
            where |= dict.fromkeys(layers, kind)
        plans = []
        for layer, nbytes in enumerate(needs.layer_bytes):
            low = needs.low_bytes[layer] if needs.low_bytes else 0
            if not low and where.get(layer) is Where.SPLIT:
                del where[layer]  # no matrix of it could be split
            experts = needs.expert_bytes[layer] if layer in apart and needs.expert_bytes else 0
            copy = needs.copy_bytes[layer] if layer in copies and needs.copy_bytes else 0
            plan = where.get(layer, Where.DEVICE), nbytes, low, experts, copy
            if experts and placement.expert_slots and where[layer] is Where.PROCESSOR:
                plan = *plan, placement.expert_slots, needs.experts[layer]
            plans.append(_layer_plan(*plan))
        return tuple(plans)

    @cached_property
    def kv(self) -> KVPlan:
        blocks = self.requirements.kv_blocks
        resident = min(self.placement.resident_kv_blocks, blocks)
        placement = self.placement
        reclaimed, share = placement.reclaimed_kv_blocks, placement.processor_kv
        return KVPlan(self.requirements.kv, blocks, resident, reclaimed, share)

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        """Layers that are not on the device, at least in part."""
        return tuple(sorted(self.placement.streamed_layers))

    @cached_property
    def weights_link_bytes(self) -> int:
        """Bytes of weights that cross the link in each pass."""
        return sum(layer.link_bytes for layer in self.layers)

    @cached_property
    def weights_prefill_link_bytes(self) -> int:
        """Bytes of weights that cross the link in a prefill."""
        return sum(layer.prefill_link_bytes for layer in self.layers)

    @cached_property
    def processor_bytes(self) -> int:
        """Bytes of weights that the processor computes with in each pass."""
        return sum(layer.processor_bytes for layer in self.layers)

    @cached_property
    def weights_file_bytes(self) -> int:
        """Bytes of these that each pass reads from files."""
        return sum(layer.file_bytes for layer in self.layers)

    @property
    def link_bytes(self) -> int:
        """Bytes that cross the link in a pass over a full context, with reclaimed memory in use."""
        return self.weights_link_bytes + self.kv.link_bytes

    @property
    def streams(self) -> bool:
        """Whether passes over a full context wait for the link, or for the processor."""
        return self.link_bytes > 0 or self.processor_bytes > 0 or self.kv.by_processor > 0

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a weight slot, which has room for any streamed layer."""
        return max(layer.prefill_link_bytes for layer in self.layers)

    @property
    def layer_counts(self) -> dict[str, int]:
        """How many layers there are, and how many are kept in each way."""
        return {
            "layers": len(self.layers),
            "resident_weight_layers": sum(not layer.prefill_link_bytes for layer in self.layers),
            "copied_layers": sum(layer.copy_bytes > 0 for layer in self.layers),
            "file_layers": sum(layer.where is Where.FILE for layer in self.layers),
            "split_layers": sum(layer.where is Where.SPLIT for layer in self.layers),
            "processor_layers": sum(layer.where is Where.PROCESSOR for layer in self.layers),
            "expert_layers": sum(layer.expert_bytes > 0 for layer in self.layers),
            "expert_slots": max(layer.expert_slots for layer in self.layers),
        }

    @property
    def can_draft(self) -> bool:
        """Whether every layer is on the device: itself, by its high bits or by a draft copy."""
        return all(layer.can_draft for layer in self.layers)

    @cached_property
    def device_parts(self) -> Mapping[str, int]:
        """Device memory by purpose during the prefill of a full context, or during passes if these
        take more.
        """
        needs, placement, kv = self.requirements, self.placement, self.kv
        ends = needs.head_bytes + (needs.embedding_bytes if placement.embedding_resident else 0)
        copies = sum(layer.copy_bytes for layer in self.layers)
        passes = needs.sequences * needs.pass_workspace_bytes
        return {
            "weights": sum(layer.device_bytes for layer in self.layers) + ends,
            "expert_pools": sum(layer.pool_bytes for layer in self.layers),
            "kv": kv.device_bytes + needs.tail_bytes,
            "windows": needs.window_bytes,
            "states": needs.state_bytes,
            "draft_copies": copies,
            "drafting": needs.drafting_bytes
            + (needs.gather_bytes if kv.resident < kv.blocks else 0),
            "slots": placement.weight_slots * self.slot_bytes
            + (placement.kv_slots + placement.staging_slots) * needs.kv.slot_bytes
            + needs.sequences * needs.kv.scratch_bytes,
            "workspace": max(needs.temporary_bytes, passes + kv.reclaimed_bytes)
            + (needs.decoding_bytes if copies else 0),
        }

    @property
    def device_bytes(self) -> int:
        """Device memory of a full context."""
        return sum(self.device_parts.values())

    @property
    def host_bytes(self) -> int:
        """Host memory of a full context."""
        needs = self.requirements
        ahead = READ_AHEAD * max(needs.layer_bytes) if self.placement.file_layers else 0
        return (
            sum(layer.host_bytes for layer in self.layers)
            + ahead
            + self.kv.host_bytes
            + needs.marks_bytes
            + needs.looked_up_bytes
            + (0 if self.placement.embedding_resident else needs.embedding_bytes)
            + (needs.gather_bytes if self.kv.resident < self.kv.blocks else 0)
        )

    def placed(self, **changes: object) -> MemoryPlan:
        """Return the plan with other values of its placement."""
        plan = replace(self, placement=replace(self.placement, **changes))
        if changes.keys() <= _NOT_OF_LAYERS:
            # A search asks for many plans with the same layers.
            known = {name: self.__dict__[name] for name in _OF_LAYERS if name in self.__dict__}
            plan.__dict__.update(known)
        return plan

    def check(self, limit_bytes: int) -> None:
        """Raise DoesNotFitError if the plan needs more than `limit_bytes` of the device, and
        UsageError if it streams without slots, or names layers that the model does not have.
        """
        needs, placement, count = self.requirements, self.placement, len(self.layers)
        for name in LAYER_LISTS:
            if (last := max(getattr(placement, name), default=0)) >= count:
                raise UsageError(f"{name} of a placement cannot hold {last} of {count} layers")
        if placement.reclaimed_kv_blocks and needs.sequences > 1:
            raise UsageError(
                "a placement reclaims memory for the KV of one text, not of several at once"
            )
        if placement.split_layers and not needs.low_bytes:
            raise UsageError("split_layers of a placement are of weights that are split")
        if placement.expert_layers and not needs.expert_bytes:
            raise UsageError(
                "expert_layers of a placement are of weights with experts, not in split layers "
                "(--weights split-experts splits each for itself)"
            )
        self._check_expert_slots()
        if (needed := self.device_bytes) > limit_bytes:
            raise DoesNotFitError(
                "device memory for this placement", needed, limit_bytes, "let more of it stream"
            )
        if placement.streamed_layers and placement.weight_slots < 1:
            raise UsageError("a placement that streams weights needs at least one weight slot")
        # A block that cannot be split streams, even if all others are on the device.
        streams_kv = self.kv.blocks > (0 if needs.kv.split else self.kv.resident)
        if streams_kv and min(placement.kv_slots, placement.staging_slots) < 1:
            raise UsageError("a placement that streams KV needs KV slots and staging slots")

    def _check_expert_slots(self) -> None:
        slots = self.placement.expert_slots
        for index, layer in enumerate(self.layers):
            if layer.expert_slots and layer.experts is None:
                raise UsageError(
                    f"expert_slots of a placement: layer {index} has its experts in a format that "
                    "does not keep one after the other"
                )
            if layer.experts and slots > layer.experts.count:
                raise UsageError(
                    f"expert_slots of a placement cannot be {slots}: layer {index} has "
                    f"{layer.experts.count} experts"
                )
