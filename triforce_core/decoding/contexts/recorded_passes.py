"""Passes of one context that are recorded as CUDA graphs, as long as nothing of them streams."""

from __future__ import annotations

import torch

from triforce_core.decoding.contexts.models import Models
from triforce_core.decoding.drafters.drafted_rows import TreeRows
from triforce_core.decoding.recorded import RecordedForwards, forwards_of, padded
from triforce_core.model.heads.joins import NOTHING, Tapped
from triforce_core.plan.levels import LONGEST_RECORDED
from triforce_offload.forward_batch import ForwardBatch, lines_of, visible_rows
from triforce_offload.kv.caches.fixed import FixedPass
from triforce_offload.kv.sequence import SequenceKV
from triforce_offload.weights.store import ResidentWeights


class RecordedPasses:
    """The passes over one sequence that are recorded: those over a few rows, of a model whose
    weights and KV are all on the device, without a retrieval level.

    A graph has the addresses of the sequence's KV blocks, so passes are recorded anew when there is
    another block, or when one has moved.
    """

    def __init__(self, models: Models, sequence: SequenceKV) -> None:
        self._models = models
        self._sequence = sequence
        self._forwards: RecordedForwards[torch.Tensor] | None = None
        # What the forwards were recorded for: the version of the KV, addresses of blocks, taps.
        self._version = -1
        self._addresses: torch.Tensor | None = None
        self._taps = NOTHING
        self._all_here = False

    def fits(self, rows: int) -> bool:
        """Whether a pass over this number of rows may run here."""
        if not self._models.records_passes or rows > LONGEST_RECORDED:
            return False
        store = self._sequence.kv
        if store.version != self._version:
            self._version = store.version
            layers = range(store.shape.layers)
            self._all_here = all(
                store.on_device(layer) == len(store.locations(layer)) for layer in layers
            )
            addresses = store.addresses()
            if self._addresses is None or not torch.equal(addresses, self._addresses):
                self._forwards = None
            self._addresses = addresses
        return self._all_here

    def run(self, batch: ForwardBatch, taps: Tapped) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a pass that `fits`. Return the hidden states of its rows, and what is tapped of them,
        or None. Both are valid until the next pass.
        """
        if self._forwards is None or taps != self._taps:
            self._taps = taps
            self._forwards = self._new()
        size = min(padded(batch.rows), self._sequence.kv.max_pass_tokens)
        rows = None
        if batch.parents is not None:
            lines, states = None, self._sequence.recent.states
            if states is not None:
                lines = lines_of(batch.parents, states.shape.taps)
            rows = TreeRows(batch.positions, visible_rows(batch.parents), lines)
        self._sequence.cache.ran(batch)
        with self._models.runtime.trace.compute("pass", tokens=batch.rows):
            start = self._sequence.length
            hidden, tapped = self._forwards.run(size, batch.tokens, start, rows, size)
            return hidden[: batch.rows], tapped

    def close(self) -> None:
        """Release the recorded passes."""
        self._forwards = None

    def _new(self) -> RecordedForwards[torch.Tensor]:
        """Return forwards of which none is recorded yet."""
        models, sequence, target = self._models, self._sequence, self._models.target
        cache = FixedPass(sequence.kv, sequence.recent, target.device)
        compute = forwards_of(target, ResidentWeights(models.runtime.weights), cache)
        return RecordedForwards(
            *(target, cache, compute, models.recorder, "passes"), taps=self._taps
        )
