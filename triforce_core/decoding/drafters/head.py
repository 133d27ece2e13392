"""The drafter that runs a head of the model over the hidden states of the level above."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import limited
from triforce_core.decoding.drafters.drafted_rows import DraftedRows, TreeRows
from triforce_core.decoding.drafters.of_states import Given, TokenDrafter
from triforce_core.decoding.recorded import Inputs, RecordedForwards, fits, padded
from triforce_core.model.heads.head import After, Head
from triforce_core.model.heads.joins import LONGEST_RECORDED_HEAD
from triforce_core.plan.levels import SINKS, WINDOW
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.fixed import FixedDense
from triforce_offload.memory.device import put
from triforce_offload.weights.store import ResidentWeights


class _Pairs(NamedTuple):
    """Pairs of a token and the state of the token before.

    tokens, positions: [pairs]
    states: [pairs, hidden]
    rows: how they follow one another, if they are in a tree
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor
    rows: TreeRows | None = None


class HeadDrafter(TokenDrafter[DenseKV]):
    """A head on a text. It runs pairs of a token and the state of the token before.

    To draft several tokens, the head is applied to its own output. It attends to the first and the
    recent pairs of the text; pairs with a state of its own are forgotten after each draft.
    """

    first = SINKS

    def __init__(self, given: Given[DenseKV]) -> None:
        """The KV has room for pairs: the first ones, the recent ones and a draft."""
        super().__init__(given)
        self._head: Head = given.model
        head, kv = self._head, self._kv
        # Positions and tokens of the pairs that the KV has, with states of the level above.
        self._places: list[int] = []
        self._ran: list[int] = []
        # States of the first tokens, and of the recent ones from position `_begin` on.
        self._firsts = self._recent = head.no_states()
        self._begin = 0
        # How the drafted rows that were run follow one another, behind the token at `_end`.
        self._drafted = DraftedRows()
        self._end = 0
        # Rows of the largest tree, with padding.
        self._most_rows = self.most + LONGEST_RECORDED_HEAD
        if given.recorder is not None and head.recordable:
            cache = FixedDense(kv, head.device)
            compute = _forwards_of(head, self._weights, cache)
            self._recorded: RecordedForwards[After] | None = RecordedForwards(
                *(head, cache, compute, given.recorder, "head"), has_states=True
            )

    @property
    def most(self) -> int:
        """Number of tokens of the longest draft."""
        return (self._kv.capacity - SINKS) // 2

    @property
    def window(self) -> int:
        """See DrafterOfStates."""
        return self._kv.capacity

    def note(self, start: int, tapped: torch.Tensor) -> None:
        """DrafterOfStates.note."""
        self.roll_back(start + 1)
        states = self._head.states(tapped)
        if start <= len(self._firsts) and start < SINKS:
            self._firsts = torch.cat((self._firsts[:start], states))[:SINKS].clone()
        known = start - self._begin
        if not 0 <= known <= len(self._recent):
            known, self._begin = 0, start
        dropped = max(0, min(known, known + len(states) - self.window))
        self._recent = torch.cat((self._recent[dropped:known], states))
        self._begin += dropped

    def roll_back(self, tokens: int) -> None:
        """Drafter.roll_back."""
        while self._places and self._places[-1] >= tokens:
            self._places.pop()
            self._ran.pop()
        self._firsts = self._firsts[:tokens]
        self._recent = self._recent[: max(0, tokens - self._begin)]

    def catch_up(self, text: Text, count: int) -> torch.Tensor | None:
        """Make room for a draft of `count` tokens. Return the tokens of the text whose pairs must
        run first; None if the state before the last token is not known.
        """
        last, tokens = len(text.tokens) - 1, text.tokens
        if not self._begin < last <= self._begin + len(self._recent):
            return None
        held = 0
        for place, token in zip(self._places, self._ran, strict=True):
            if place > last or tokens[place] != token:
                break
            held += 1
        # The last pair gives the logits, so it always runs.
        held = min(held, max(0, len(self._places) - 1)) if last in self._places[:held] else held
        del self._places[held:], self._ran[held:]
        firsts, recent = range(0), range(self._places[-1] + 1 if self._places else 1, last + 1)
        room = self._kv.capacity - count
        if recent.start <= self._begin or held + len(recent) > room:
            # Begin anew, with the first pairs and the recent ones.
            self._places, self._ran = [], []
            recent = range(max(1, self._begin + 1, last + 1 - min(WINDOW, room - SINKS)), last + 1)
            firsts = range(1, min(len(self._firsts) + 1, recent.start))
        self._start = len(self._places), len(firsts), recent.start
        new = [*firsts, *recent]
        self._places += new
        self._ran += [tokens[place] for place in new]
        return put([tokens[place] for place in new], self.device)

    def run(
        self,
        tokens: torch.Tensor,
        start: tuple[int, ...] | None,
        parents: tuple[int, ...] | None,
    ) -> torch.Tensor:
        """TokenDrafter.run.

        start: number of pairs in the KV before these, of pairs of the text's first tokens, and the
            position of the first recent one
        """
        pairs = self._of_text(tokens, start) if start else self._of_draft(tokens, parents)
        count = tokens.shape[0]
        with self._trace.compute("head", tokens=count):
            after = self._after(pairs, last=start is not None)
            self._kv.keep(range(count))
            if not start:
                self._drafted.keep(range(count))
            self._have_run(after, of_text=start is not None)
            # A grammar may leave only tokens that the head does not know.
            return limited(after.logits)

    def _after(self, pairs: _Pairs, *, last: bool) -> After:
        """Run pairs behind the end of the KV. Return what follows them, or if `last`, what follows
        the last one. Logits are valid until the next call.
        """
        tokens, positions, states, rows = pairs
        count = len(tokens)
        asked, size = slice(count - 1 if last else 0, count), padded(count)
        room = size <= LONGEST_RECORDED_HEAD and fits(self._kv, size, rows, self._most_rows)
        if self._recorded and room:
            after, _ = self._recorded.run(size, tokens, positions, rows, self._most_rows, states)
            return After(after.state[asked].clone(), after.logits[asked])
        visible = None if rows is None else put(rows.visible, self.device, torch.bool)
        batch = ForwardBatch(tokens, positions, drafted=visible)
        return self._head.after(self._head.run(batch, states, self._weights, self._kv)[asked])

    def _of_text(self, tokens: torch.Tensor, start: tuple[int, ...]) -> _Pairs:
        """Return pairs of the text."""
        self._kv.end, firsts, begin = start
        recent = range(begin, begin + len(tokens) - firsts)
        before = begin - 1 - self._begin
        known = self._firsts[:firsts], self._recent[before : before + len(recent)]
        places = [*self._head.first_positions(firsts, begin), *recent]
        self._drafted.forget()
        self._end = recent.stop
        return _Pairs(tokens, put(places, self.device), torch.cat(known))

    def _of_draft(self, tokens: torch.Tensor, parents: tuple[int, ...] | None) -> _Pairs:
        """Return pairs of drafted tokens, with the states after the rows that they follow."""
        held, count = len(self._drafted), len(tokens)
        rows = self._drafted.follow(count, parents, self._end)
        places = list(range(self._end + held, self._end + held + count))
        positions = put(places if rows is None else rows.positions, self.device)
        return _Pairs(tokens, positions, self._before(parents), rows)


def _forwards_of(
    head: Head, weights: ResidentWeights, cache: FixedDense
) -> Callable[[Inputs], After]:
    """Return the forwards of a head that may be recorded."""

    def compute(inputs: Inputs) -> After:
        batch, embedded, states, _ = inputs
        return head.after(head.run(batch, states, weights, cache, embedded))

    return compute
