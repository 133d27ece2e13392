"""What one pass copies and computes, in order. Runtime and planner share this one schedule.

The runtime turns the crossings into copies (`copies`); the planner assigns a duration to each piece
and runs both on a virtual clock (`simulate`). The module uses no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

WEIGHTS, KV = "weights", "kv"


class Crossing(NamedTuple):
    """Bytes that cross the link once in a pass.

    ring: the kind of slots that they go through
    layer: index of the layer; for KV, among the layers that store KV in blocks
    block: index of the layer's KV block; None for the layer's weights
    sequence: index of the sequence whose KV it is, in a pass over several sequences
    """

    ring: str
    layer: int
    block: int | None
    nbytes: int
    sequence: int = 0

    @property
    def key(self) -> tuple:
        """The key by which compute asks for these bytes: unique in a schedule."""
        if self.block is None:
            return (self.ring, self.layer)
        return kv_key(self.layer, self.block, self.sequence)


def kv_key(layer: int, block: int, sequence: int = 0) -> tuple:
    """Return the key by which compute asks for a block of KV."""
    return (KV, layer, block, sequence) if sequence else (KV, layer, block)


class Kind(Enum):
    """The kinds of compute in a layer.

    BEFORE: the layer up to its attention, and attention to the `blocks` blocks of all sequences
        that are on the device
    BLOCK: attention to one streamed block
    AFTER: attention to the hot tail, and the rest of the layer
    """

    BEFORE = "before"
    BLOCK = "block"
    AFTER = "after"


class Piece(NamedTuple):
    """A piece of compute.

    needs: number of crossings, counted from the first, that must be complete before it starts
    releases: indices of crossings whose slots are free after it
    """

    kind: Kind
    layer: int
    blocks: int
    needs: int
    releases: tuple[int, ...] = ()


class Schedule(NamedTuple):
    crossings: list[Crossing]
    pieces: list[Piece]


class KVPlaces(NamedTuple):
    """Where the KV of one sequence is.

    blocks: number of blocks of each layer that stores KV in blocks
    resident: number of these, counted from the first, that are on the device
    by_processor: which of each layer's blocks the processor attends to, where they are in host
        memory; empty if it attends to none
    """

    blocks: Sequence[int]
    resident: Sequence[int]
    by_processor: Sequence[range] = ()


@dataclass(frozen=True)
class Places:
    """Where the weights of a model and the KV of a pass's sequences are, for building a schedule.

    layer_bytes: bytes of each layer's weights that cross the link; 0 for none
    sequences: the sequences of the pass
    kv_index: index of each layer among those that store KV in blocks, None for any other layer
    """

    layer_bytes: Sequence[int]
    sequences: Sequence[KVPlaces]
    block_bytes: int
    kv_index: Sequence[int | None]


def pass_schedule(places: Places) -> Schedule:
    """Return the schedule of a pass, layer by layer: the layer's weights if they stream, once for
    all sequences, then each sequence's KV blocks in token order.
    """
    crossings: list[Crossing] = []
    pieces: list[Piece] = []
    for layer, nbytes in enumerate(places.layer_bytes):
        held: tuple[int, ...] = ()
        if nbytes:
            held = (len(crossings),)
            crossings.append(Crossing(WEIGHTS, layer, None, nbytes))
        kv = places.kv_index[layer]
        sequences = [] if kv is None else places.sequences
        kept = [min(sequence.blocks[kv], sequence.resident[kv]) for sequence in sequences]
        pieces.append(Piece(Kind.BEFORE, layer, sum(kept), len(crossings)))
        for index, (sequence, resident) in enumerate(zip(sequences, kept, strict=True)):
            elsewhere = sequence.by_processor[kv] if sequence.by_processor else ()
            for block in range(resident, sequence.blocks[kv]):
                if block in elsewhere:
                    continue
                place = len(crossings)
                crossings.append(Crossing(KV, kv, block, places.block_bytes, index))
                pieces.append(Piece(Kind.BLOCK, layer, 1, place + 1, (place,)))
        pieces.append(Piece(Kind.AFTER, layer, 0, 0, held))
    return Schedule(crossings, pieces)
