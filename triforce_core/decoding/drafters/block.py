"""The drafter that predicts a block of tokens at once, see `joins.DFlash`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from triforce_core.decoding.contexts import calls
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import limited
from triforce_core.decoding.drafters.drafted_rows import TreeRows
from triforce_core.decoding.drafters.of_states import DrafterOfStates, Given
from triforce_core.decoding.recorded import Inputs, RecordedForwards, padded
from triforce_core.decoding.trees.growing import Tree
from triforce_core.model.heads.dflash import Block, DFlashModel
from triforce_core.plan.levels import BLOCK_STATES
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.fixed import FixedDense
from triforce_offload.memory.device import put
from triforce_offload.weights.store import ResidentWeights


class BlockDrafter(DrafterOfStates[DenseKV]):
    """A drafter on a text. It keeps the keys and values of the text's recent tokens, which come
    from the hidden states of the level above. One forward over a block, behind these, gives the
    distributions of all drafted tokens; with a selector they depend on the token before.

    Ranks that share the model share the drafter. Each keeps the keys and values of its heads; the
    first rank says when a block runs.
    """

    first = 0

    def __init__(self, given: Given[DenseKV]) -> None:
        """The KV has room for the recent tokens and a block."""
        super().__init__(given)
        self._model: DFlashModel = given.model
        model = self._model
        self.window = model.join.context
        # Position of the first token whose keys the KV has.
        self._begin = 0
        self._rows = model.join.rows
        self._masks = put([model.join.mask] * (self._rows - 1), model.device)
        # What the last block predicts, and how many of its positions were asked for.
        self._block: Block | None = None
        self._asked = 0
        if given.recorder is not None and model.recordable:
            cache = FixedDense(self._kv, model.device)
            compute = _forwards_of(model, self._weights, cache)
            self._recorded: RecordedForwards[Block] | None = RecordedForwards(
                model, cache, compute, given.recorder, "DFlash"
            )

    @property
    def most(self) -> int:
        """Number of tokens of the largest draft, a tree."""
        return self._kv.capacity

    @property
    def deepest(self) -> int:
        """Number of tokens that a block predicts."""
        return self._rows - 1

    def note(self, start: int, tapped: torch.Tensor) -> None:
        """DrafterOfStates.note."""
        self.roll_back(start)
        further = max(0, len(tapped) - self.window)
        start, tapped = start + further, tapped[further:]
        if start != self._end:
            # Tokens between these and the known ones are missing.
            self._begin, self._kv.end = start, 0
        self._make_room(len(tapped))
        for part in tapped.split(BLOCK_STATES):
            positions = torch.arange(len(part), device=self.device) + self._end
            states = self._model.states(part)
            self._model.remember(positions, states, self._weights, self._kv)
            self._kv.keep(range(len(part)))

    def roll_back(self, tokens: int) -> None:
        """Drafter.roll_back."""
        self._kv.end = max(0, min(self._kv.end, tokens - self._begin))
        self._block = None

    def close(self) -> None:
        """Drafter.close."""
        self._block = None
        super().close()

    def catch_up(self, text: Text, count: int) -> torch.Tensor | None:
        """ModelDrafter.catch_up."""
        last = len(text.tokens) - 1
        self._block = None
        if not self._kv.end or self._end < last:
            return None
        self.roll_back(last)
        return put(text.tokens[last:], self.device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """ModelDrafter.forward: run a block behind the text's last token, or only look at its next
        position.
        """
        if self._block is None:
            call = calls.RunHead(tokens, (self._kv.end,), None)
            self._tell(call)
            self._block, self._asked = self.run(tokens, call.start, None), 0
        position, self._asked = self._asked, self._asked + 1
        return limited(self._model.after(self._block, position, tokens))

    def forward_tree(self, tree: Tree, rows: Sequence[int]) -> torch.Tensor:
        """ModelDrafter.forward_tree."""
        depth = tree.depths[rows[0]]
        tokens = put([tree.tokens[row - 1] for row in rows], self.device)
        return limited(self._model.after(self._block, depth, tokens))

    def have_drawn(self, tokens: torch.Tensor) -> None:
        """ModelDrafter.have_drawn: a block is never continued."""

    @property
    def _end(self) -> int:
        """Position of the token behind those that the KV has."""
        return self._begin + self._kv.end

    def _make_room(self, count: int) -> None:
        """Forget the earliest tokens, an eighth of the window at least, if there is no room for
        `count` further ones and a block.
        """
        kv = self._kv
        if kv.end + count <= self.window:
            return
        kept = max(0, min(self.window - count, self.window - self.window // 8))
        dropped = kv.end - min(kv.end, kept)
        kv.rows[:, :, :, : kv.end - dropped] = kv.rows[:, :, :, dropped : kv.end].clone()
        kv.end -= dropped
        self._begin += dropped

    def run(
        self,
        tokens: torch.Tensor,
        start: tuple[int, ...] | None,
        parents: tuple[int, ...] | None,
    ) -> Block:
        """DrafterOfStates.run: a block behind the text's last token, [1].

        start: number of the text's tokens that the KV has
        """
        (self._kv.end,) = start
        tokens, count, size = torch.cat((tokens, self._masks)), self._rows, padded(self._rows)
        first, rows = self._end, None
        if not all(self._model.join.causal):
            positions = torch.arange(first, first + count)
            rows = TreeRows(positions, torch.ones(count, count, dtype=torch.bool))
        with self._trace.compute("DFlash", tokens=count):
            if self._recorded:
                return self._recorded.run(size, tokens, first, rows, size)[0]
            batch = ForwardBatch.text(tokens, first, self.device)
            if rows is not None:
                seen = put(rows.visible, self.device, torch.bool)
                batch = ForwardBatch(tokens, batch.positions, drafted=seen)
            return self._model.block(batch, self._weights, self._kv)


def _forwards_of(
    model: DFlashModel, weights: ResidentWeights, cache: FixedDense
) -> Callable[[Inputs], Block]:
    """Return the forwards of a drafter that may be recorded."""

    def compute(inputs: Inputs) -> Block:
        return model.block(inputs.batch, weights, cache, inputs.embedded)

    return compute
