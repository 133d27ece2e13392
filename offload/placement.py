"""What lives on the device and what streams: a simple rule, weights first, then KV blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.kv.shape import KVShape

WEIGHT_SLOTS = 2
KV_SLOTS = 3
# While a pass attends to so many blocks on the device a link brings one: a card's memory is some 40
# times as fast as its link, a block split is read three or four times over, and kernels for it
# are launched.
_BLOCKS_WHILE_ONE_COMES = 8
# Whole layers on the host that are read from files ahead of their crossing.
READ_AHEAD = 2
STAGING_SLOTS = 2


@dataclass(frozen=True)
class Demand:
    """What a model and a context ask for. Sizes in bytes.

    layer_bytes: of each layer's weights, as they are stored
    low_bytes: of these, what passes alone read: the low bits; empty where there are none
    head_bytes: final norm and output matrix, always on the device
    embedding_bytes: the input embedding if it is a matrix of its own, 0 when tied to the head
    reading_bytes: temporaries of reading a prompt that fills the context
    pass_bytes: temporaries of a pass, and of drafting and drawing
    drafting_bytes: everything that drafts, such as a retrieval cache, always on the device
    int4_bytes: of a layer's copy in fewer bits, which drafts where the layer itself streams;
        0 where there is none
    int4_all: whether resident layers have such a copy too
    decoding_bytes: of temporaries that computing with such copies takes besides
    gather_bytes: of buffers through which chunks of streamed KV are retrieved; as many on the host
    sequences: texts that passes are over at once, each of up to context_tokens. What drafts and
        retrieves is that of all, temporaries are those of one
    """

    layer_bytes: tuple[int, ...]
    head_bytes: int
    embedding_bytes: int
    reading_bytes: int
    pass_bytes: int
    kv: KVShape
    context_tokens: int
    max_pass_tokens: int
    drafting_bytes: int = 0
    gather_bytes: int = 0
    int4_bytes: int = 0
    int4_all: bool = False
    decoding_bytes: int = 0
    low_bytes: tuple[int, ...] = ()
    sequences: int = 1

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    @cached_property
    def weights_bytes(self) -> int:
        """Of all layers."""
        return sum(self.layer_bytes)

    def streamed_bytes(self, placement: Placement) -> int:
        """Weights that cross the link in each pass."""
        return sum(self.crossing_bytes(layer, placement) for layer in placement.streamed_layers)

    def slot_bytes(self, placement: Placement) -> int:
        """Of a weight slot, which takes any layer that streams."""
        streamed = placement.streamed_layers
        return max((self.crossing_bytes(layer, placement) for layer in streamed), default=0)

    def crossing_bytes(self, layer: int, placement: Placement) -> int:
        """What crosses the link of a layer that streams."""
        halved = layer in placement.split_layers
        return self.low_bytes[layer] if halved else self.layer_bytes[layer]

    @property
    def kv_blocks(self) -> int:
        """Blocks of all layers and texts when these are full; the newest tokens are in tails."""
        return self.sequences * self.layers * (self.context_tokens // self.kv.block_tokens)

    @property
    def temporary_bytes(self) -> int:
        """Of passes, or of reading one text while others wait for theirs."""
        others = (self.sequences - 1) * self.pass_bytes
        return others + max(self.reading_bytes, self.pass_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Always on the device, without temporaries."""
        own = self.kv.tail_bytes(self.max_pass_tokens) + self.kv.scratch_bytes
        return self.head_bytes + self.drafting_bytes + self.sequences * own


@dataclass(frozen=True)
class Placement:
    """Where everything goes. The layers not named in streamed_layers are resident.

    resident_kv_blocks: of all layers together, over which they are spread evenly; more than
        there are means all
    reclaimed_kv_blocks: how many more are on the device between texts that are read, in memory that
        only reading needs
    int4_layers: those with a copy in fewer bits on the device, by which they draft
    file_layers: those of the streamed ones that are read from the checkpoint in each pass, since
        the host has no room for them
    split_layers: those of the streamed ones of which the low bits alone stream; by the high
        ones, which stay on the device, they draft
    """

    streamed_layers: tuple[int, ...]
    embedding_resident: bool
    resident_kv_blocks: int
    weight_slots: int
    kv_slots: int
    staging_slots: int
    reclaimed_kv_blocks: int = 0
    int4_layers: tuple[int, ...] = ()
    file_layers: tuple[int, ...] = ()
    split_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for what no placement can hold."""
        for name in LAYER_LISTS:
            layers = getattr(self, name)
            if not isinstance(layers, tuple) or not all(map(_is_count, layers)):
                raise UsageError(f"{name} of a placement cannot be {layers!r}")
        for name in ("file_layers", "split_layers"):
            if not set(layers := getattr(self, name)) <= set(self.streamed_layers):
                raise UsageError(f"{name} {list(layers)} are not all streamed_layers")
        if both := sorted(set(self.file_layers) & set(self.split_layers)):
            raise UsageError(f"layers {both} cannot be in files and be split")
        if not isinstance(self.embedding_resident, bool):
            raise UsageError(f"embedding_resident cannot be {self.embedding_resident!r}")
        for name in _COUNTS:
            if not _is_count(getattr(self, name)):
                raise UsageError(f"{name} of a placement cannot be {getattr(self, name)!r}")

    @property
    def can_draft(self) -> bool:
        """Whether each layer is on the device, itself, by its high bits or by a copy in fewer
        bits.
        """
        return set(self.streamed_layers) <= {*self.int4_layers, *self.split_layers}

    def with_resident_blocks(self, blocks: int) -> Placement:
        """So many KV blocks on the device and none in reclaimed memory; the others stream."""
        return replace(self, resident_kv_blocks=blocks, reclaimed_kv_blocks=0).with_slots()

    def with_slots(self) -> Placement:
        """With slots for KV that streams, if it had none."""
        return replace(
            self,
            kv_slots=self.kv_slots or KV_SLOTS,
            staging_slots=self.staging_slots or STAGING_SLOTS,
        )


LAYER_LISTS = ("streamed_layers", "int4_layers", "file_layers", "split_layers")
_COUNTS = ("resident_kv_blocks", "weight_slots", "kv_slots", "staging_slots", "reclaimed_kv_blocks")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def place(demand: Demand, limit_bytes: int) -> Placement:
    """The placement of a model and its longest context within `limit_bytes` of the device.

    Raises DoesNotFitError, with what the least placement needs, when even that does not fit.
    """
    everything = _everything(demand)
    if device_bytes(demand, everything) <= limit_bytes:
        return everything
    streamed = 0
    # With all high bits on the device, or none: by these the whole model drafts.
    halved = bool(demand.low_bytes)
    if halved:
        halved = device_bytes(demand, _least(demand, demand.layers, halved=True)) <= limit_bytes
    least = _least(demand, streamed, halved=halved)
    while (spare := limit_bytes - device_bytes(demand, least)) < 0:
        if streamed == demand.layers:
            raise DoesNotFitError(
                f"device memory for {demand.context_tokens} tokens of context with everything "
                "streamed",
                least_bytes(demand, streamed_layers=demand.layers),
                limit_bytes,
                "give more device memory",
            )
        # So many more do not suffice: none gives more than the largest, but which ones stream
        # changes too.
        largest = max(demand.low_bytes if halved else demand.layer_bytes)
        streamed += max(1, -spare // (2 * largest))
        streamed = min(streamed, demand.layers)
        least = _least(demand, streamed, halved=halved)
    embedding_resident = demand.embedding_bytes <= spare
    if embedding_resident:
        spare -= demand.embedding_bytes
    block = demand.kv.block_bytes
    resident, lent = _blocks(demand, spare)
    # A layer's blocks on the device come before those that stream: slots take what the link brings
    # meanwhile.
    ahead = min(_slots_ahead(demand, resident + lent), resident * block // demand.kv.slot_bytes)
    if ahead:
        least = replace(least, kv_slots=least.kv_slots + ahead)
        resident, lent = _blocks(demand, spare - ahead * demand.kv.slot_bytes)
    return replace(
        least,
        embedding_resident=embedding_resident,
        resident_kv_blocks=resident,
        reclaimed_kv_blocks=lent,
    )


def _blocks(demand: Demand, spare: int) -> tuple[int, int]:
    """Blocks that so many bytes keep on the device, and that are lent what reading a prompt took
    besides.
    """
    block = demand.kv.block_bytes
    resident = min(spare // block, demand.kv_blocks)
    # Of several texts one may be read at any time.
    lendable = 0
    if demand.sequences == 1:
        lendable = spare - resident * block + max(0, demand.reading_bytes - demand.pass_bytes)
    return resident, min(lendable // block, demand.kv_blocks - resident)


def _slots_ahead(demand: Demand, kept: int) -> int:
    """Slots beside KV_SLOTS, where so many blocks are on the device and the others stream."""
    if kept < demand.layers:
        return 0
    streamed = (demand.kv_blocks - kept) / demand.layers
    return math.ceil(min(streamed, kept / demand.layers / _BLOCKS_WHILE_ONE_COMES))


def least_bytes(demand: Demand, *, streamed_layers: int) -> int:
    """The least device memory with which no more than `streamed_layers` layers stream."""
    placements = [_least(demand, streamed) for streamed in range(streamed_layers + 1)]
    return min(device_bytes(demand, each) for each in (_everything(demand), *placements))


def _everything(demand: Demand) -> Placement:
    """All on the device; where blocks are split, with a way for one that has no room there."""
    slots = int(demand.kv.split)
    return Placement(
        (), True, demand.kv_blocks, 0, slots, slots, int4_layers=_int4_layers(demand, ())
    )


def _least(demand: Demand, streamed: int, *, halved: bool = False) -> Placement:
    """The placement that takes least with so many layers streamed, or their low bits."""
    kv_slots, staging_slots = (KV_SLOTS, STAGING_SLOTS) if demand.kv_blocks else (0, 0)
    layers = spread(streamed, demand.layers)
    return Placement(
        layers,
        False,
        0,
        min(WEIGHT_SLOTS, streamed),
        kv_slots,
        staging_slots,
        int4_layers=_int4_layers(demand, () if halved else layers),
        split_layers=layers if halved else (),
    )


def _int4_layers(demand: Demand, streamed: tuple[int, ...]) -> tuple[int, ...]:
    if not demand.int4_bytes:
        return ()
    return tuple(range(demand.layers)) if demand.int4_all else streamed


def device_bytes(demand: Demand, placement: Placement) -> int:
    """Device memory that a placement takes when its context is full: while the prompt is read, or
    in passes if that is more.
    """
    resident_weights = demand.weights_bytes - demand.streamed_bytes(placement)
    resident_blocks = min(placement.resident_kv_blocks, demand.kv_blocks)
    slots = placement.kv_slots + placement.staging_slots
    lent = placement.reclaimed_kv_blocks * demand.kv.block_bytes
    return (
        demand.fixed_bytes
        + (demand.gather_bytes if resident_blocks < demand.kv_blocks else 0)
        + max(demand.temporary_bytes, demand.sequences * demand.pass_bytes + lent)
        + (demand.embedding_bytes if placement.embedding_resident else 0)
        + resident_weights
        + len(placement.int4_layers) * demand.int4_bytes
        + (demand.decoding_bytes if placement.int4_layers else 0)
        + placement.weight_slots * demand.slot_bytes(placement)
        + slots * demand.kv.slot_bytes
        + resident_blocks * demand.kv.block_bytes
    )


def crossing_bytes(demand: Demand, placement: Placement) -> int:
    """Bytes that cross the link in a pass over a full context, with reclaimed memory in use."""
    on_device = placement.resident_kv_blocks + placement.reclaimed_kv_blocks
    blocks = max(0, demand.kv_blocks - on_device)
    return demand.streamed_bytes(placement) + blocks * demand.kv.block_bytes


def streams(demand: Demand, placement: Placement) -> bool:
    """Whether anything crosses the link in passes over a full context."""
    return crossing_bytes(demand, placement) > 0


def host_bytes(demand: Demand, placement: Placement) -> int:
    """Host memory that a placement takes when its context is full."""
    streamed_blocks = max(0, demand.kv_blocks - placement.resident_kv_blocks)
    in_files = sum(demand.layer_bytes[layer] for layer in placement.file_layers)
    return (
        demand.streamed_bytes(placement)
        - in_files
        + (READ_AHEAD * max(demand.layer_bytes) if in_files else 0)
        + streamed_blocks * demand.kv.block_bytes
        + (0 if placement.embedding_resident else demand.embedding_bytes)
        + (demand.gather_bytes if streamed_blocks else 0)
    )


def place_on_host(demand: Demand, placement: Placement, limit_bytes: int) -> Placement:
    """The same with as many of the streamed layers on the host as `limit_bytes` of it hold; the
    others are read from files in each pass. All are if even that is too much.
    """
    streamed = [x for x in placement.streamed_layers if x not in placement.split_layers]
    for count in range(len(placement.file_layers), len(streamed) + 1):
        in_files = tuple(streamed[i] for i in spread(count, len(streamed)))
        placed = replace(placement, file_layers=in_files if count else ())
        if host_bytes(demand, placed) <= limit_bytes:
            break
    return placed


def check_placement(demand: Demand, placement: Placement, limit_bytes: int) -> None:
    """Raises DoesNotFitError if a placement needs more than `limit_bytes` of the device, and
    UsageError if it has nothing to stream through, or layers that the model has not.
    """
    for name in LAYER_LISTS:
        if (last := max(getattr(placement, name), default=0)) >= demand.layers:
            raise UsageError(f"{name} of a placement cannot hold {last} of {demand.layers} layers")
    if placement.reclaimed_kv_blocks and demand.sequences > 1:
        raise UsageError("a placement lends memory to the KV of one text, not of several at once")
    if placement.split_layers and not demand.low_bytes:
        raise UsageError("split_layers of a placement are of weights that are kept split")
    needed = device_bytes(demand, placement)
    if needed > limit_bytes:
        raise DoesNotFitError(
            "device memory for this placement", needed, limit_bytes, "let more of it stream"
        )
    if placement.streamed_layers and placement.weight_slots < 1:
        raise UsageError("a placement that streams weights needs at least one weight slot")
    # A block that cannot be split streams, wherever others are.
    streamed_kv = demand.kv.split or demand.kv_blocks > placement.resident_kv_blocks
    if streamed_kv and min(placement.kv_slots, placement.staging_slots) < 1:
        raise UsageError("a placement that streams KV needs KV slots and staging slots")


def check_host(demand: Demand, placement: Placement, limit_bytes: int) -> None:
    """Raises DoesNotFitError if `limit_bytes` of host memory do not hold what streams."""
    needed = host_bytes(demand, placement)
    if needed > limit_bytes:
        raise DoesNotFitError(
            f"host memory for {demand.context_tokens} tokens of context",
            needed,
            limit_bytes,
            "give more host memory, or more device memory",
        )


def spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` of `layers` layers, evenly apart, so that the link never rests for long."""
    return tuple((2 * i + 1) * layers // (2 * count) for i in range(count))


def share_blocks(blocks: int, layers: int) -> tuple[int, ...]:
    """`blocks` resident blocks divided over the layers, at most one apart."""
    return tuple(blocks // layers + (layer < blocks % layers) for layer in range(layers))
