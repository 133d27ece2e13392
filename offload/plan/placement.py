"""A placement: which layers and how much KV are on the device, on the host or in files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from triforce_offload.errors import UsageError

WEIGHT_SLOTS = 2
KV_SLOTS = 3
STAGING_SLOTS = 2


@dataclass(frozen=True)
class Placement:
    """Which layers and how much KV go where; `MemoryPlan` computes the memory they take. Layers not
    named in streamed_layers are resident.

    resident_kv_blocks: number of blocks on the device, of all layers together, over which they are
        spread evenly; a number above the total means all blocks
    reclaimed_kv_blocks: number of further blocks that are on the device between prefills, in memory
        that only a prefill needs
    copied_layers: layers with a draft copy on the device
    file_layers: streamed layers that every pass reads from the checkpoint, because the host has no
        room for them
    split_layers: streamed layers of which only the low bits stream; the high bits stay on the
        device and draft
    expert_layers: streamed layers of which only the experts are away; the rest of them is on the
        device
    expert_slots: number of experts of each of the expert_layers that the processor computes which
        are on the device as well: those that were used last
    processor_kv: share of the KV blocks in host memory alone to which the processor attends in
        passes, where they are
    processor_layers: streamed layers that only prefills copy to the device; in a pass the processor
        computes them, or their experts alone if the rest is on the device
    """

    streamed_layers: tuple[int, ...]
    embedding_resident: bool
    resident_kv_blocks: int
    weight_slots: int
    kv_slots: int
    staging_slots: int
    reclaimed_kv_blocks: int = 0
    copied_layers: tuple[int, ...] = ()
    file_layers: tuple[int, ...] = ()
    split_layers: tuple[int, ...] = ()
    processor_layers: tuple[int, ...] = ()
    processor_kv: float = 0.0
    expert_layers: tuple[int, ...] = ()
    expert_slots: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for values that no placement can have."""
        for name in LAYER_LISTS:
            layers = getattr(self, name)
            if not isinstance(layers, tuple) or not all(map(_is_count, layers)):
                raise UsageError(f"{name} of a placement cannot be {layers!r}")
        for name in (*_OF_STREAMED, "expert_layers"):
            if not set(layers := getattr(self, name)) <= set(self.streamed_layers):
                raise UsageError(f"{name} {list(layers)} are not all streamed_layers")
        apart = [("expert_layers", name) for name in ("split_layers", "file_layers")]
        for name, other in (*combinations(_OF_STREAMED, 2), *apart):
            if both := sorted(set(getattr(self, name)) & set(getattr(self, other))):
                raise UsageError(f"layers {both} cannot be both {name} and {other}")
        if self.expert_slots and not set(self.expert_layers) & set(self.processor_layers):
            raise UsageError(
                f"expert_slots {self.expert_slots} of a placement need expert_layers that the "
                "processor computes"
            )
        if not isinstance(self.embedding_resident, bool):
            raise UsageError(f"embedding_resident cannot be {self.embedding_resident!r}")
        if not isinstance(self.processor_kv, (int, float)) or not 0 <= self.processor_kv <= 1:
            raise UsageError(f"processor_kv of a placement cannot be {self.processor_kv!r}")
        for name in _COUNTS:
            if not _is_count(getattr(self, name)):
                raise UsageError(f"{name} of a placement cannot be {getattr(self, name)!r}")

    @property
    def can_draft(self) -> bool:
        """Whether every layer is on the device: itself, by its high bits or by a draft copy."""
        return set(self.streamed_layers) <= {*self.copied_layers, *self.split_layers}

    @property
    def uses_processor(self) -> bool:
        """Whether the processor computes parts of passes."""
        return bool(self.processor_layers) or self.processor_kv > 0

    def with_resident_blocks(self, blocks: int) -> Placement:
        """Return the placement with `blocks` resident KV blocks and none in reclaimed memory."""
        return replace(self, resident_kv_blocks=blocks, reclaimed_kv_blocks=0).with_slots()

    def with_slots(self) -> Placement:
        """Return the placement with slots for streamed KV, if it had none."""
        return replace(
            self,
            kv_slots=self.kv_slots or KV_SLOTS,
            staging_slots=self.staging_slots or STAGING_SLOTS,
        )


def left_to_processor(share: float, blocks: int) -> int:
    """Return how many of a layer's blocks that are not on the device the processor attends to."""
    return int(share * blocks + 0.5)


# Each streamed layer is in one of these at most.
_OF_STREAMED = ("file_layers", "split_layers", "processor_layers")
LAYER_LISTS = ("streamed_layers", "copied_layers", *_OF_STREAMED, "expert_layers")
_COUNTS = ("resident_kv_blocks", "weight_slots", "kv_slots", "staging_slots", "reclaimed_kv_blocks")
_COUNTS += ("expert_slots",)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
