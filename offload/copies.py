"""The copies of a pass, chosen by what has to cross the link at that moment."""

from __future__ import annotations

from collections.abc import Sequence

from triforce_offload.conveyor import Conveyor, Transfer
from triforce_offload.kv.caches.processor import ProcessorAttention
from triforce_offload.kv.store import KVStore
from triforce_offload.schedule import Crossing, KVPlaces, Places, pass_schedule
from triforce_offload.weights.locations import LayerLocation, Located
from triforce_offload.weights.store import WeightStore


class PassCopies:
    """Starts the copies of passes ahead of their compute, through one conveyor.

    At most one pass has its copies started at a time; `cancel` drops them.
    """

    def __init__(
        self,
        conveyor: Conveyor,
        weights: WeightStore,
        kv_index: Sequence[int | None],
        processor: ProcessorAttention | None = None,
    ) -> None:
        """kv_index: index of each layer among those that store KV in blocks, or None
        processor: attends to blocks that do not cross, if there are any
        """
        self.conveyor = conveyor
        self.processor = processor
        self._weights = weights
        self._kv_index = kv_index
        # Bytes that cross the link for each sequence in the pass whose copies were started.
        self._shares: dict[KVStore, int] = {}

    @property
    def begun(self) -> list[KVStore]:
        """The sequences of the pass whose copies were started and which has not been kept yet."""
        return list(self._shares)

    def begin(self, sequences: Sequence[KVStore]) -> None:
        """Start the copies of a pass over the whole context of these sequences. The copies of no
        other pass may be under way.
        """
        own, shared = [0] * len(sequences), 0
        weights = self._weights.in_passes
        for crossing in self._start(sequences, weights, computes=True):
            if crossing.block is None:
                shared += crossing.nbytes
            else:
                own[crossing.sequence] += crossing.nbytes
        count = len(sequences)
        for index, sequence in enumerate(sequences):
            # Shared bytes are rounded so that the shares add up to the bytes that crossed.
            part = shared * (index + 1) // count - shared * index // count
            self._shares[sequence] = own[index] + part

    def kept(self, sequence: KVStore) -> int:
        """End the pass for one sequence. Return the bytes that crossed for it."""
        return self._shares.pop(sequence, 0)

    def cancel(self) -> None:
        """Drop the copies of a pass that was started and not run, or not to its end."""
        try:
            self.conveyor.cancel()
        finally:
            if self.processor is not None:
                self.processor.drain()
        self._shares.clear()

    def begin_prefill(self, sequence: KVStore) -> None:
        """Start the copies of a prefill, which is not counted as a pass."""
        self._start([sequence], self._weights.locations, computes=False)

    def _start(
        self, sequences: Sequence[KVStore], weights: Sequence[LayerLocation], *, computes: bool
    ) -> list[Crossing]:
        """Start copies and return the crossings.

        weights: location of each layer. computes: whether the processor attends to blocks
        """
        shape, elsewhere = sequences[0].shape, self.processor if computes else None
        layers = range(shape.layers)
        crossings = pass_schedule(
            Places(
                layer_bytes=[each.source.bytes.numel() if each.source else 0 for each in weights],
                sequences=[
                    KVPlaces(
                        [len(kv.locations(layer)) for layer in layers],
                        [kv.on_device(layer) for layer in layers],
                        [elsewhere.blocks(kv, layer) for layer in layers] if elsewhere else (),
                    )
                    for kv in sequences
                ],
                block_bytes=shape.block_bytes,
                kv_index=self._kv_index,
            )
        ).crossings

        def location(crossing: Crossing) -> Located:
            if crossing.block is None:
                return weights[crossing.layer]
            return sequences[crossing.sequence].locations(crossing.layer)[crossing.block]

        # A block with more exceptions than the split format has room for is larger than the others.
        crossings = [c._replace(nbytes=location(c).source.bytes.numel()) for c in crossings]
        self.conveyor.start(Transfer(c.key, c.ring, location(c).source) for c in crossings)
        return crossings
