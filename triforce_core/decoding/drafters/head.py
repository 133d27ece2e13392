"""The drafter that runs a head of the model over the hidden states of the level above."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from triforce_core.decoding.contexts import calls
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import limited
from triforce_core.decoding.drafters.drafted_rows import DraftedRows, TreeRows
from triforce_core.decoding.drafters.of_states import DrafterOfStates
from triforce_core.decoding.recorded import Inputs, RecordedForwards, fits, padded
from triforce_core.decoding.trees.growing import Tree
from triforce_core.model.heads.head import After, Head
from triforce_core.model.heads.joins import LONGEST_RECORDED_HEAD
from triforce_core.plan.levels import SINKS, WINDOW
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.graphs import Recorder
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.fixed import FixedDense
from triforce_offload.link.trace import Tracer
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


class HeadDrafter(DrafterOfStates):
    """A head on a text. It runs pairs of a token and the state of the token before.

    To draft several tokens, the head is applied to its own output. It attends to the first and the
    recent pairs of the text; pairs with a state of its own are forgotten after each draft.

    If ranks divide the head, each has a part of it, and a drafter that knows the same states. The
    first rank decides which pairs run, and tells the others.
    """

    first = SINKS

    def __init__(
        self,
        head: Head,
        weights: ResidentWeights,
        kv: DenseKV,
        trace: Tracer,
        tell: Callable[[calls.ContextCall], None],
        release: Callable[[], None],
        recorder: Recorder | None = None,
    ) -> None:
        """kv: room for pairs: the first ones, the recent ones and a draft
        tell: sends a call to the other ranks
        release: returns the room for states to the budget
        recorder: None to run everything eagerly
        """
        self._head = head
        self._weights = weights
        self._kv = kv
        self._trace = trace
        self._tell = tell
        self._release = release
        # Positions and tokens of the pairs that the KV has, with states of the level above.
        self._places: list[int] = []
        self._ran: list[int] = []
        # States of the first tokens, and of the recent ones from position `_begin` on.
        self._firsts = self._recent = head.no_states()
        self._begin = 0
        self._start: tuple[int, int, int] | None = None
        # The drafted rows that were run, and the state after the text's last pair and after each of
        # them, with the position of the token after the text.
        self._drafted = DraftedRows()
        self._states = head.no_states()
        self._end = 0
        # Index of each row of a tree among the drafted rows.
        self._ran_rows: dict[int, int] = {}
        # Rows of the largest tree, with padding.
        self._most_rows = self.most + LONGEST_RECORDED_HEAD
        self._recorded: RecordedForwards[After] | None = None
        if recorder is not None and head.recordable:
            cache = FixedDense(kv, head.device)
            self._recorded = RecordedForwards(
                *(head, cache, _forwards_of(head, weights, cache), recorder, "head"),
                has_states=True,
            )

    @property
    def device(self) -> torch.device:
        return self._head.device

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Head.tapped`."""
        return self._head.tapped

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

    def close(self) -> None:
        """Drafter.close."""
        self._recorded = None
        self._kv.close()
        self._release()

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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """ModelDrafter.forward: run the pairs that `catch_up` prepared, or a drafted token [1]."""
        start, self._start = self._start, None
        return self._run_on_all(calls.RunHead(tokens, start, None))

    def forward_tree(self, tree: Tree, rows: Sequence[int]) -> torch.Tensor:
        """ModelDrafter.forward_tree: the given rows alone."""
        ran = {0: -1} | self._ran_rows
        parents = tuple(ran[tree.parents[row - 1]] for row in rows)
        held = len(self._drafted)
        self._ran_rows |= {row: held + place for place, row in enumerate(rows)}
        tokens = put([tree.tokens[row - 1] for row in rows], self.device)
        return self._run_on_all(calls.RunHead(tokens, None, parents))

    def _run_on_all(self, call: calls.RunHead) -> torch.Tensor:
        """Run a call on every rank that has a part of the head."""
        self._tell(call)
        return self.run(call.tokens, call.start, call.parents)

    def run(
        self,
        tokens: torch.Tensor,
        start: tuple[int, ...] | None,
        parents: tuple[int, ...] | None,
    ) -> torch.Tensor:
        """Do what `forward` and `forward_tree` do on this rank. Ranks but the first return no
        logits, [rows, 0].

        start: number of pairs in the KV before these, of pairs of the text's first tokens, and the
            position of the first recent one; None for drafted tokens
        parents: for each drafted token the drafted row that it follows, or -1 for the text; None
            for a chain after the last row
        """
        pairs = self._of_text(tokens, start) if start else self._of_draft(tokens, parents)
        count = tokens.shape[0]
        with self._trace.compute("head", tokens=count):
            after = self._after(pairs, last=start is not None)
            self._kv.keep(range(count))
            if start:
                self._states = after.state
            else:
                self._drafted.keep(range(count))
                self._states = torch.cat((self._states, after.state))
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
        self._ran_rows = {}
        self._end = recent.stop
        return _Pairs(tokens, put(places, self.device), torch.cat(known))

    def _of_draft(self, tokens: torch.Tensor, parents: tuple[int, ...] | None) -> _Pairs:
        """Return pairs of drafted tokens, with the states after the rows that they follow."""
        held, count = len(self._drafted), len(tokens)
        rows = self._drafted.follow(count, parents, self._end)
        places = list(range(self._end + held, self._end + held + count))
        positions = put(places if rows is None else rows.positions, self.device)
        states = self._states[-1:]
        if parents is not None:
            states = self._states[put([parent + 1 for parent in parents], self.device)]
        return _Pairs(tokens, positions, states, rows)

    def have_drawn(self, tokens: torch.Tensor) -> None:
        """See SmallModelDrafter. Pairs of drafted tokens run again with other states."""


def _forwards_of(
    head: Head, weights: ResidentWeights, cache: FixedDense
) -> Callable[[Inputs], After]:
    """Return the forwards of a head that may be recorded."""

    def compute(inputs: Inputs) -> After:
        batch, embedded, states, _ = inputs
        return head.after(head.run(batch, states, weights, cache, embedded))

    return compute
