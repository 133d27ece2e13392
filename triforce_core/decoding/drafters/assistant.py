"""The drafter that runs a Gemma 4 assistant, see `joins.Assistant`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import limited
from triforce_core.decoding.drafters.drafted_rows import TreeRows
from triforce_core.decoding.drafters.of_states import Given, TokenDrafter
from triforce_core.decoding.recorded import Inputs, RecordedForwards, padded
from triforce_core.model.heads.assistant import AssistantModel
from triforce_core.model.heads.head import After
from triforce_core.model.heads.joins import LONGEST_RECORDED_HEAD
from triforce_core.plan.levels import BLOCK_STATES, SINKS, WINDOW
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.copied import CopiedKV
from triforce_offload.memory.device import put
from triforce_offload.weights.store import ResidentWeights


class AssistantDrafter(TokenDrafter[CopiedKV]):
    """An assistant on a text. Each drafted token is run at the position of the text's last token,
    with the state after the token that it follows, and attends to the text alone. So drafted tokens
    leave nothing behind, and rows of a tree do not see one another.
    """

    first = SINKS

    def __init__(self, given: Given[CopiedKV], most: int) -> None:
        """most: number of tokens of the largest draft"""
        super().__init__(given)
        self.most = most
        self._model: AssistantModel = given.model
        self.window = self._model.config.joins.context
        # States after the text's recent tokens, the first of them at `_begin`.
        self._recent = self._model.no_states()
        self._begin = 0
        if given.recorder is not None and self._model.recordable:
            compute = _forwards_of(self._model, self._weights, self._kv)
            self._recorded: RecordedForwards[After] | None = RecordedForwards(
                *(self._model, self._kv, compute, given.recorder, "assistant"), has_states=True
            )

    def note(self, start: int, tapped: torch.Tensor) -> None:
        """DrafterOfStates.note."""
        self.roll_back(start)
        for first in range(0, len(tapped), BLOCK_STATES):
            part = tapped[first : first + BLOCK_STATES]
            positions = torch.arange(len(part), device=self.device) + start + first
            keys = self._model.keys(part, positions)
            for kind, rows in zip(self._kv.kinds, keys, strict=True):
                kind.write(start + first, rows)
        states = self._model.states(tapped[-WINDOW:])
        begin = start + len(tapped) - len(states)
        if begin != self._begin + len(self._recent):
            self._begin, self._recent = begin, states
            return
        both = torch.cat((self._recent, states))
        self._begin += max(0, len(both) - WINDOW)
        self._recent = both[-WINDOW:]

    def roll_back(self, tokens: int) -> None:
        """Drafter.roll_back."""
        self._kv.forget(tokens)
        self._recent = self._recent[: max(0, tokens - self._begin)]

    def catch_up(self, text: Text, count: int) -> torch.Tensor | None:
        """ModelDrafter.catch_up."""
        last = len(text.tokens) - 1
        if self._kv.end < last or not self._begin < last <= self._begin + len(self._recent):
            return None
        self.roll_back(last)
        if not all(map(len, self._kv.kinds)):
            # A cut may leave nothing of a short window.
            return None
        self._start = (last,)
        return put(text.tokens[last:], self.device)

    def run(
        self,
        tokens: torch.Tensor,
        start: tuple[int, ...] | None,
        parents: tuple[int, ...] | None,
    ) -> torch.Tensor:
        """TokenDrafter.run.

        start: position of the text's last token
        """
        if start:
            self.roll_back(*start)
        states = self._recent[-1:] if start else self._before(parents)
        with self._trace.compute("assistant", tokens=len(tokens)):
            after = self._after(tokens, states)
            self._have_run(after, of_text=start is not None)
            return limited(after.logits)

    def _after(self, tokens: torch.Tensor, states: torch.Tensor) -> After:
        """Run rows behind the text. Return what follows them. Logits are valid until the next
        call.
        """
        count, place = len(tokens), self._begin + len(self._recent)
        positions, rows = torch.full((count,), place), None
        if count > 1:
            # All rows attend as the first one does, see `CopiedKV`.
            visible = torch.zeros(count, count, dtype=torch.bool)
            visible[:, 0] = True
            rows = TreeRows(positions, visible)
        size = padded(count)
        if self._recorded and size <= LONGEST_RECORDED_HEAD:
            after, _ = self._recorded.run(size, tokens, place, rows, size, states)
            return After(after.state[:count].clone(), after.logits[:count])
        self._kv.begin()
        seen = None if rows is None else put(rows.visible, self.device, torch.bool)
        batch = ForwardBatch(tokens, put(positions, self.device), drafted=seen)
        return self._model.step(batch, states, self._weights, self._kv)


def _forwards_of(
    model: AssistantModel, weights: ResidentWeights, cache: CopiedKV
) -> Callable[[Inputs], After]:
    """Return the forwards of an assistant that may be recorded."""

    def compute(inputs: Inputs) -> After:
        batch, embedded, states, _ = inputs
        return model.step(batch, states, weights, cache, embedded)

    return compute
