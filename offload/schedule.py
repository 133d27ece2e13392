"""What one pass moves and computes, in order: one author for whoever executes it.

The runtime turns the crossings into copies (`passes`), the planner gives the pieces seconds and
runs both on a virtual clock (`simulate`). No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

WEIGHTS, KV = "weights", "kv"


class Crossing(NamedTuple):
    """Bytes that cross the link once in a pass.

    ring: the kind of slots they go through; block: of the layer's KV, None for its weights
    text: whose KV, in a pass over several texts
    """

    ring: str
    layer: int
    block: int | None
    nbytes: int
    text: int = 0

    @property
    def key(self) -> tuple:
        """By which compute asks for it: unique in a schedule."""
        if self.block is None:
            return (self.ring, self.layer)
        return kv_key(self.layer, self.block, self.text)


def kv_key(layer: int, block: int, text: int = 0) -> tuple:
    """By which compute asks for a block of KV."""
    return (KV, layer, block, text) if text else (KV, layer, block)


class Kind(Enum):
    """BEFORE: a layer up to its attention, and attention to `blocks` blocks that lie on the device,
    of all texts.
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


class KVPlaces(NamedTuple):
    """What of a text's KV lies where.

    blocks: of each layer; resident: how many of them, the first ones, are on the device
    """

    blocks: Sequence[int]
    resident: Sequence[int]


@dataclass(frozen=True)
class Places:
    """What of a model and of the texts of a pass lies where, as far as a schedule asks.

    layer_bytes: of the weights of each layer, those that cross the link; 0 for none
    texts: that the pass is over
    """

    layer_bytes: Sequence[int]
    texts: Sequence[KVPlaces]
    block_bytes: int


def pass_schedule(places: Places) -> Schedule:
    """Layer by layer: its weights if they stream, once for all texts, then each text's KV blocks in
    token order.
    """
    crossings: list[Crossing] = []
    pieces: list[Piece] = []
    for layer, nbytes in enumerate(places.layer_bytes):
        held: tuple[int, ...] = ()
        if nbytes:
            held = (len(crossings),)
            crossings.append(Crossing(WEIGHTS, layer, None, nbytes))
        kept = [min(text.blocks[layer], text.resident[layer]) for text in places.texts]
        pieces.append(Piece(Kind.BEFORE, layer, sum(kept), len(crossings)))
        for text, resident in enumerate(kept):
            for block in range(resident, places.texts[text].blocks[layer]):
                index = len(crossings)
                crossings.append(Crossing(KV, layer, block, places.block_bytes, text))
                pieces.append(Piece(Kind.BLOCK, layer, 1, index + 1, (index,)))
        pieces.append(Piece(Kind.AFTER, layer, 0, 0, held))
    return Schedule(crossings, pieces)
