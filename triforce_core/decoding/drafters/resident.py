"""Forwards of a model that is wholly on the device, recorded as CUDA graphs where possible.

A draft level runs many short forwards. On a GPU, launching their kernels one by one takes longer
than running them. So a forward of each size is recorded as a CUDA graph once it has run a few
times, and replayed from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from triforce_core.decoding.drafters.drafted_rows import TreeRows
from triforce_core.model.heads.taps import Taps
from triforce_core.model.transformer import Model
from triforce_core.plan.levels import LONGEST_RECORDED
from triforce_kernels import warmup
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.graphs import Recorder, Run
from triforce_offload.kv.caches.dense import DenseKV, FixedDense
from triforce_offload.link.trace import Tracer
from triforce_offload.memory.device import put
from triforce_offload.weights.store import ResidentWeights

# Runs of a forward before it is recorded: libraries initialise themselves at first use.
USES_BEFORE = 2


def padded(tokens: int) -> int:
    """Return the size of the recorded forward for `tokens` tokens, a power of two."""
    return 1 << (tokens - 1).bit_length()


class ResidentModel:
    """Forwards of a model over a DenseKV, to logits. A recorded forward serves every request.

    Eager and recorded forwards compute the same values, up to rounding.

    recorded: number of sizes recorded so far
    tapped: hidden states of the last forward's rows between layers, [rows, taps * hidden], if some
        are tapped; valid until the next
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
        taps: Sequence[int] = (),
        drafted: int = 0,
    ) -> None:
        """recorder: None to run everything eagerly
        name: name of the forwards in a trace
        taps: layers of which each forward of `logits` keeps the input, see `Taps`
        drafted: number of rows of the largest tree that recorded forwards continue
        """
        self.tapped: torch.Tensor | None = None
        self._taps = taps
        self.kv = kv
        self.recorded = 0
        self._model = model
        self._weights = weights
        self._recorder = recorder if model.recordable else None
        self._trace = trace
        self._name = name
        self._drafted = drafted
        self._forwards: dict[tuple[int, bool], _FixedForward] = {}

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
        self._forwards.clear()

    def _logits(
        self, tokens: torch.Tensor, position: int, rows: TreeRows | None, last: bool
    ) -> torch.Tensor:
        count = tokens.shape[0]
        size = padded(count)
        if self._recorder and size <= LONGEST_RECORDED and self._has_room(size, rows):
            kind = (size, rows is not None)
            forward = self._forwards.get(kind)
            if forward is None:
                forward = self._forwards[kind] = _FixedForward(
                    self._model,
                    self._weights,
                    self.kv,
                    size,
                    tokens.device,
                    0 if rows is None else self._drafted,
                    self._model.taps(self._taps, range(size)),
                )
            forward.take(tokens, position, rows)
            if forward.uses == USES_BEFORE:
                self._record(forward, size)
            out = forward.run()[:count]
            self.tapped = forward.taps and forward.taps.states[:count]
            return out[-1:] if last else out
        batch = _batch(tokens, position, rows)
        taps = self._model.taps(self._taps, range(count))
        hidden = self._model.forward(batch, self._weights, self.kv, taps=taps)
        self.tapped = taps and taps.states
        return self._model.logits(hidden[-1:] if last else hidden)

    def _has_room(self, size: int, rows: TreeRows | None) -> bool:
        padding = 0 if rows is None else size - len(rows.visible)
        fits = rows is None or rows.visible.shape[1] + padding <= self._drafted
        return fits and self.kv.has_room(size)

    def _record(self, forward: _FixedForward, size: int) -> None:
        try:
            warmup.note()
            forward.record(self._recorder)
            self.recorded += 1
        except RuntimeError as error:
            # The forward still runs kernel by kernel; it is only slower.
            warnings.warn(
                f"{self._name}: forwards of {size} tokens are launched kernel by kernel, since "
                f"recording them failed: {str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )


def _batch(tokens: torch.Tensor, position: int, rows: TreeRows | None) -> ForwardBatch:
    if rows is None:
        return ForwardBatch.text(tokens, position, tokens.device)
    positions = put(rows.positions, tokens.device)
    return ForwardBatch(tokens, positions, drafted=put(rows.visible, tokens.device, torch.bool))


class _FixedForward:
    """A forward of exactly `size` tokens, with inputs at fixed addresses.

    Padding tokens come after the real ones, which therefore do not attend to them. Their KV is
    written after the end of the KV.
    """

    def __init__(
        self,
        model: Model,
        weights: ResidentWeights,
        kv: DenseKV,
        size: int,
        device: torch.device,
        drafted: int,
        taps: Taps | None,
    ) -> None:
        """drafted: number of keys that some of the tokens do not see; 0 if they are a chain
        taps: takes hidden states between layers
        """
        self.taps = taps
        self.uses = 0
        self._model = model
        self._weights = weights
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._steps = torch.arange(size, device=device)
        self._visible: torch.Tensor | None = None
        if drafted:
            self._visible = torch.zeros(size, drafted, dtype=torch.bool, device=device)
        self._cache = FixedDense(kv, device)
        self._replay: Run | None = None
        embedded = model.no_states().new_zeros(size, model.config.hidden)
        self._embedded = embedded if model.embeds_apart else None

    def take(self, tokens: torch.Tensor, position: int, rows: TreeRows | None) -> None:
        """Set the inputs."""
        count = tokens.shape[0]
        self._tokens[:count] = tokens
        if self._embedded is not None:
            self._embedded.copy_(self._model.embed(self._tokens))
        if rows is None:
            torch.add(self._steps, position, out=self._positions)
        else:
            self._positions[:count] = put(rows.positions, tokens.device)
            self._visible.copy_(put(self._padded(rows.visible), tokens.device, torch.bool))
        self._cache.begin()

    def _padded(self, visible: torch.Tensor) -> torch.Tensor:
        """Return `visible` for all rows, of which the padding comes last, and with columns for keys
        before the tree, which all rows see.
        """
        size, drafted = self._visible.shape
        count, own = visible.shape
        before = drafted - (size - count) - own
        seen = torch.zeros(size, drafted, dtype=torch.bool)
        seen[:, :before] = True
        seen[:count, before : before + own] = visible
        return seen

    def run(self) -> torch.Tensor:
        """Return logits [size, vocab]; a recorded forward returns the same tensor each time."""
        self.uses += 1
        return self._compute() if self._replay is None else self._replay()

    def record(self, recorder: Recorder) -> None:
        self._replay = recorder.record(self._compute)

    def _compute(self) -> torch.Tensor:
        batch = ForwardBatch(self._tokens, self._positions, drafted=self._visible)
        embedded = None if self._embedded is None else self._embedded.clone()
        hidden = self._model.forward(
            batch, self._weights, self._cache, embedded=embedded, taps=self.taps
        )
        return self._model.logits(hidden)
