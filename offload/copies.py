"""The copies of a pass, by what is to cross for it at the moment."""

from __future__ import annotations

from collections.abc import Sequence

from offload.conveyor import Conveyor, Transfer
from offload.homes import Home
from offload.kv.store import KVStore
from offload.placement import Placement
from offload.schedule import Crossing, KVPlaces, Places, pass_schedule
from offload.weights import WeightStore


def start_copies(
    conveyor: Conveyor, weights: WeightStore, placement: Placement, texts: Sequence[KVStore]
) -> list[Crossing]:
    """Starts the copies of a pass over everything that some texts keep, and says what crosses."""
    shape = texts[0].shape
    layers = range(shape.layers)
    crossings = pass_schedule(
        Places(
            streamed_layers=placement.streamed_layers,
            layer_bytes=weights.crossing_bytes,
            texts=[
                KVPlaces(
                    [len(kv.homes(layer)) for layer in layers],
                    [kv.on_device(layer) for layer in layers],
                )
                for kv in texts
            ],
            block_bytes=shape.block_bytes,
        )
    ).crossings

    def home(crossing: Crossing) -> Home:
        if crossing.block is None:
            return weights.homes[crossing.layer]
        return texts[crossing.text].homes(crossing.layer)[crossing.block]

    # A block that planes have no room for is larger than others.
    crossings = [c._replace(nbytes=home(c).source.bytes.numel()) for c in crossings]
    conveyor.start(Transfer(c.key, c.ring, home(c).source) for c in crossings)
    return crossings
