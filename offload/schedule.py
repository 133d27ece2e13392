"""What one pass moves and computes, in order: one author for whoever executes it.

The runtime turns the crossings into copies (`passes`), the planner gives the pieces seconds and
runs both on a virtual clock (`simulate`). No tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

WEIGHTS, KV = "weights", "kv"


class Crossing(NamedTuple):
    """Bytes that cross the link once in a pass.

    ring: the kind of slots they go through; block: of the layer's KV, None for its weights
    """

    ring: str
    layer: int
    block: int | None
    nbytes: int

    @property
    def key(self) -> tuple:
        """By which compute asks for it: unique in a schedule."""
        return (self.ring, self.layer) if self.block is None else self[:3]


class Kind(Enum):
    """BEFORE: a layer up to its attention, and attention to `blocks` blocks that lie on the device.
    BLOCK: attention to one block that came. AFTER: the hot tail, and the layer from there on.
    """

    BEFORE = "before"
    BLOCK = "block"
    AFTER = "after"


class Piece(NamedTuple):
    """What computes next.

    needs: how many crossings, from the first, must have come
    releases: indices of crossings whose slots are free afterwards
    """

    kind: Kind
    layer: int
    blocks: int
    needs: int
    releases: tuple[int, ...] = ()


class Schedule(NamedTuple):
    crossings: list[Crossing]
    pieces: list[Piece]


@dataclass(frozen=True)
class Places:
    """What of a model and a text lies where, as far as a schedule asks.

    streamed_layers: layers whose weights stream; layer_bytes: what of each then crosses
    kv_blocks: of each layer; resident_blocks: how many of them, the first ones, are on the device
    """

    streamed_layers: Collection[int]
    layer_bytes: Sequence[int]
    kv_blocks: Sequence[int]
    resident_blocks: Sequence[int]
    block_bytes: int


def pass_schedule(places: Places) -> Schedule:
    """Layer by layer: its weights if they stream, then its KV blocks in token order."""
    crossings: list[Crossing] = []
    pieces: list[Piece] = []
    for layer, blocks in enumerate(places.kv_blocks):
        held: tuple[int, ...] = ()
        if layer in places.streamed_layers:
            held = (len(crossings),)
            crossings.append(Crossing(WEIGHTS, layer, None, places.layer_bytes[layer]))
        resident = min(blocks, places.resident_blocks[layer])
        pieces.append(Piece(Kind.BEFORE, layer, resident, len(crossings)))
        for block in range(resident, blocks):
            index = len(crossings)
            crossings.append(Crossing(KV, layer, block, places.block_bytes))
            pieces.append(Piece(Kind.BLOCK, layer, 1, index + 1, (index,)))
        pieces.append(Piece(Kind.AFTER, layer, 0, 0, held))
    return Schedule(crossings, pieces)
