"""Forwards of a model that is wholly on the device, recorded as CUDA graphs where possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_core.decoding.drafters.drafted_rows import TreeRows
from triforce_core.decoding.recorded import RecordedForwards, fits, forwards_of, padded
from triforce_core.model.heads.joins import NOTHING, Tapped
from triforce_core.model.transformer import Model
from triforce_core.plan.levels import LONGEST_RECORDED
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.graphs import Recorder
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.fixed import FixedDense
from triforce_offload.link.trace import Tracer
from triforce_offload.memory.device import put
from triforce_offload.weights.store import ResidentWeights


class ResidentModel:
    """Forwards of a model over a DenseKV, to logits. A recorded forward serves every request.

    tapped: what a drafter takes of the last forward's rows, see `Taps.states`; valid until the next
    """

    def __init__(
        self,
        model: Model,
        weights: ResidentWeights,
        kv: DenseKV,
        recorder: Recorder | None,
        trace: Tracer,
        name: str,
        *,
        taps: Tapped = NOTHING,
        drafted: int = 0,
    ) -> None:
        """recorder: None to run everything eagerly
        name: name of the forwards in a trace
        taps: what each forward of `logits` keeps for a drafter
        drafted: number of rows of the largest tree that recorded forwards continue
        """
        self.tapped: torch.Tensor | None = None
        self._taps = taps
        self.kv = kv
        self._model = model
        self._weights = weights
        self._trace = trace
        self._name = name
        self._drafted = drafted
        self._recorded: RecordedForwards[torch.Tensor] | None = None
        if recorder is not None and model.recordable:
            cache = FixedDense(kv, model.device)
            forward = forwards_of(model, weights, cache)
            self._recorded = RecordedForwards(
                *(model, cache, lambda inputs: model.logits(forward(inputs)), recorder, name),
                taps=taps,
            )

    @property
    def vocab(self) -> int:
        """Size of the model's vocabulary."""
        return self._model.config.vocab

    def logits(
        self,
        tokens: torch.Tensor,
        position: int,
        rows: TreeRows | None = None,
        *,
        last: bool = False,
    ) -> torch.Tensor:
        """Run tokens [n], the first at `position`, after the end of the KV. The end does not move.

        rows: positions of the tokens, and what each sees, if they continue a tree

        Returns float32 logits after each token, [n, vocab], or if `last`, after the last token
        only, [1, vocab]. Use them before the next call, which may overwrite them.
        """
        with self._trace.compute(self._name, tokens=tokens.shape[0]):
            return self._logits(tokens, position, rows, last)

    def of_tree(self, tree: ForwardBatch, rows: Sequence[int]) -> torch.Tensor:
        """Run a tree after the end of the KV. The end does not move. Trees are never recorded.

        Returns float32 logits after the given rows of the tree, [rows, vocab].
        """
        with self._trace.compute(self._name, tokens=tree.rows):
            hidden = self._model.forward(tree, self._weights, self.kv)
            return self._model.logits(hidden[put(rows, hidden.device)])

    def close(self) -> None:
        """Release recorded forwards and their memory."""
        self._recorded = None

    def _logits(
        self, tokens: torch.Tensor, position: int, rows: TreeRows | None, last: bool
    ) -> torch.Tensor:
        count = tokens.shape[0]
        size = padded(count)
        room = size <= LONGEST_RECORDED and fits(self.kv, size, rows, self._drafted)
        if self._recorded and room:
            out, self.tapped = self._recorded.run(size, tokens, position, rows, self._drafted)
            return out[count - 1 : count] if last else out[:count]
        batch = _batch(tokens, position, rows)
        taps = self._model.taps(self._taps, range(count))
        hidden = self._model.forward(batch, self._weights, self.kv, taps=taps)
        self.tapped = taps and taps.states
        return self._model.logits(hidden[-1:] if last else hidden)


def _batch(tokens: torch.Tensor, position: int, rows: TreeRows | None) -> ForwardBatch:
    if rows is None:
        return ForwardBatch.text(tokens, position, tokens.device)
    positions = put(rows.positions, tokens.device)
    return ForwardBatch(tokens, positions, drafted=put(rows.visible, tokens.device, torch.bool))
