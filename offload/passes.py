"""Passes of the full model over one or more sequences; streamed weights cross once for all."""

from __future__ import annotations

from collections.abc import Sequence

from triforce_offload.copies import PassCopies
from triforce_offload.forward_batch import Cache
from triforce_offload.kv.caches.sequences import SequenceCaches
from triforce_offload.kv.sequence import SequenceKV
from triforce_offload.weights.store import StreamedWeights


class Passes:
    """Runs passes. For every pass, call `begin` as soon as the previous pass is kept, so that its
    copies run while other work computes; then run a forward over `weights` and `cache`; then call
    `SequenceKV.keep` for each sequence.

    The sequences may differ from pass to pass. A prefill drops the copies of a pass that was begun,
    and runs over `prefill_weights`: the device computes all layers.
    """

    def __init__(
        self, copies: PassCopies, weights: StreamedWeights, prefill_weights: StreamedWeights
    ) -> None:
        self.weights = weights
        self.prefill_weights = prefill_weights
        self._copies = copies

    def begin(self, sequences: Sequence[SequenceKV]) -> None:
        """Start the copies of a pass over the whole context of these sequences, unless they are
        already under way.
        """
        stores = [sequence.kv for sequence in sequences]
        if self._copies.begun:
            if self._copies.begun == stores:
                return
            # Cancel only in this case: cancelled slots wait for everything that computes now.
            self._copies.cancel()
        for sequence in sequences:
            sequence.use_reclaimed()
        self._copies.begin(stores)

    def cache(self, sequences: Sequence[SequenceKV]) -> Cache:
        """Return the cache for a forward over these sequences' rows, in their order."""
        for index, sequence in enumerate(sequences):
            sequence.cache.index = index
        caches = [sequence.cache for sequence in sequences]
        return caches[0] if len(caches) == 1 else SequenceCaches(caches)

    def end(self) -> None:
        """Drop a pass that was begun and not run."""
        self._copies.cancel()
