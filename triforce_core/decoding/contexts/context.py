"""A context: a sequence's tokens, their KV and its draft levels. It outlives requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import torch

from triforce_core.decoding.contexts import calls
from triforce_core.decoding.contexts.checksum import Checksum
from triforce_core.decoding.contexts.kv_parts import Interrupted
from triforce_core.decoding.contexts.models import Models
from triforce_core.decoding.contexts.recorded_passes import RecordedPasses
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.decoder import PassInput, Prefilled
from triforce_core.decoding.drafters.draft_levels import DraftLevels
from triforce_core.plan.sizes import PREFILL_CHUNK
from triforce_offload.errors import RankError
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.recent.marks import PromptPart
from triforce_offload.kv.sequence import PassCounters
from triforce_offload.kv.sizes import SCORED_TOKENS
from triforce_offload.link.link import LinkCounters
from triforce_offload.memory.device import put


class Context:
    """A sequence: its tokens, their KV, and the levels that draft for it.

    `prefill` replaces the text by a prompt and reuses the longest prefix that both share. Passes
    (`run_pass`) follow, and decoders commit the new tokens to `text`. The KV of all tokens but the
    last is kept. If several ranks share the model, each has such a context, and the first rank
    sends every call to the others before it executes the call itself.

    sequence: the KV
    levels: the levels that draft
    recorded: the passes over this context alone that are recorded
    link_when_prefilled, passes_when_prefilled: counters at the end of the last prefill
    keeps_logits: whether to keep the logits of each pass
    logits: logits of the last pass, [rows, vocab] float32, if `keeps_logits`
    tapped: what the drafter takes of the last pass, see `Taps.states`, until some rows are kept;
        None if it takes nothing
    number: identifies this context on all ranks
    tell: sends calls to the other ranks
    """

    def __init__(self, models: Models, number: int | None = None) -> None:
        """number: number of the context, chosen by the first rank; None on the first rank itself

        Raises DoesNotFitError or RankError.
        """
        self.number = next(models.numbers) if number is None else number
        models.ranks.tell(calls.Open(self.number))
        self.model = models.target
        self.trace = models.runtime.trace
        self.text = Text([])
        self.logits: torch.Tensor | None = None
        self.tapped: torch.Tensor | None = None
        self.keeps_logits = False
        self.tell = calls.Teller(models.ranks, self.number, lambda: self.checksum)
        self.models = models
        self._checksum = Checksum()
        self._rotated_alike = True
        self.link_when_prefilled, self.passes_when_prefilled = LinkCounters(), PassCounters()
        with ExitStack() as stack:
            # If this rank cannot allocate the context, the others close theirs.
            stack.callback(self._tell_closed)
            self.sequence = models.runtime.sequence()
            stack.callback(self.sequence.close)
            self.levels = DraftLevels(models, self.sequence, self.tell)
            stack.callback(self.levels.close)
            self.recorded = RecordedPasses(models, self.sequence)
            stack.callback(self.recorded.close)
            self._resources = stack.pop_all()

    @property
    def length(self) -> int:
        """Number of tokens whose KV is kept."""
        return self.sequence.length

    @property
    def _tokens_before(self) -> int:
        """Number of tokens before a row that the model looks up with it."""
        ngrams = self.model.config.ngrams
        return ngrams.before if ngrams else 0

    @property
    def checksum(self) -> int:
        """Checksum of the tokens whose KV is kept."""
        return self._checksum.of(self.text.tokens, self.length)

    def shared(self, tokens: Sequence[int]) -> int:
        """Count the tokens of a prompt whose KV can be reused. Its last token is always prefilled,
        because the next one is drawn from its logits.
        """
        if not (self._rotated_alike and self.model.rope.reads_alike(len(tokens))):
            return 0
        most = min(self.length, len(tokens) - 1)
        known = self.text.tokens
        shared = next((i for i in range(most) if known[i] != tokens[i]), most)
        return self.sequence.reachable(shared)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Sequence[int],
        new_tokens: int,
        each_layer: Callable[[int], None],
        *,
        reuse: bool = True,
    ) -> Prefilled:
        """Make `tokens` the text: reuse the KV of the prefix that it shares with the current text,
        and compute the rest layer by layer.

        new_tokens: the most tokens that will follow
        each_layer: called after each layer with its index; may raise Interrupted, which leaves the
            reused prefix
        reuse: whether to reuse a prefix at all
        Raises DoesNotFitError or LinkError; the context is unusable then.
        """
        kept = self.shared(tokens) if reuse else 0
        part = range(kept, len(tokens))
        return self.prefill_part(tokens, part, new_tokens, each_layer, reused=kept)

    @torch.inference_mode()
    def prefill_part(
        self,
        tokens: Sequence[int],
        part: range,
        new_tokens: int,
        each_layer: Callable[[int], None],
        *,
        reused: int,
    ) -> Prefilled | None:
        """Prefill a part of a prompt, so that passes over other contexts can run between parts.
        Return None if another part follows: no pass over this context may run before that.

        part: indices of its tokens; earlier calls computed those between `reused` and these
        reused: number of tokens that are reused
        new_tokens, each_layer: see `prefill`; interrupted, it leaves the tokens before the part
        Raises as `prefill` does.
        """
        idle, after = self.levels.idle_for(len(tokens)), len(tokens) - part.stop
        call = calls.Prefill(
            list(tokens[: part.stop]), part.start, new_tokens, idle, part.start - reused, after
        )
        self.tell(call)
        return self.prefill_from(call, self.tell.after_each_layer(each_layer))

    def prefill_from(
        self, call: calls.Prefill, each_layer: Callable[[int], None]
    ) -> Prefilled | None:
        """Prefill a part on this rank; `prefill_part` also tells the others."""
        tokens, kept, part = call.tokens, call.kept, PromptPart(call.before, call.after)
        self.reset(kept, len(tokens) + call.after, call.new_tokens)
        batch = ForwardBatch.text(torch.tensor(tokens[kept:]), kept, self.model.device)
        batch = batch.after(tokens, kept, self._tokens_before)
        try:
            # A few tokens run as an ordinary pass, which does not need the workspace that KV may
            # have reclaimed.
            short = kept and batch.rows <= self.sequence.kv.max_pass_tokens
            prefill = self._pass if short else partial(self._prefill, part)
            last = prefill(batch, each_layer)
        except Interrupted:
            self.roll_back(kept)
            raise
        self.text = Text(list(tokens))
        if part.after:
            return None
        self.sequence.leave_mark()
        self.link_when_prefilled = self.models.runtime.link.counters()
        self.passes_when_prefilled = self.sequence.counters
        logits = self.model.logits(last)
        self.note(logits)
        self.levels.set_idle(call.idle)
        scored = batch.rows if short else min(batch.rows, SCORED_TOKENS)
        return Prefilled(logits, kept - part.before, scored)

    def reset(self, kept: int, tokens: int, new_tokens: int) -> None:
        """Roll back to the first `kept` tokens, and prepare for a text of `tokens` tokens and at
        most `new_tokens` after it. Raises LinkError.
        """
        self.roll_back(kept)
        self._rotated_alike = self.model.rope.reads_alike(tokens)
        self.sequence.kv.expect(tokens + new_tokens)
        self.levels.begin()

    def roll_back(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of the text. Raises LinkError."""
        # Scores of chunks are forgotten too, so they must be collected again first.
        self.levels.set_idle(False)
        self.sequence.roll_back(tokens)
        self.levels.roll_back(tokens)
        self.text = Text(self.text.tokens[:tokens])
        self._checksum = Checksum()

    def retry_from(self, kept: int) -> None:
        """Recover from a failed pass or prefill: keep the KV of the first `kept` tokens and reset
        the draft levels. The text, which may be one token ahead, stays. Raises LinkError.
        """
        self.sequence.roll_back(kept)
        self.levels.roll_back(0)
        # The counts may be incomplete.
        self.text.seen = None

    @torch.inference_mode()
    def refresh(self, scored: int) -> None:
        """Choose the chunks of the retrieval cache by the scores of `scored` rows: the first of the
        last pass, or the last tokens of a prompt.

        Call this before the copies of the next pass begin: chunks would wait behind them. Raises
        LinkError.
        """
        if not self.levels.idle:
            self.tell(calls.Refresh(scored))
            self.levels.refresh(scored)

    def join(self, rows: PassInput) -> ForwardBatch:
        """Join a pass that is about to run. Return this context's part of the forward batch."""
        self.logits = self.tapped = None
        start, device = self.length, self.model.device
        if rows.parents is None:
            batch = ForwardBatch.text(rows.tokens, start, device)
        else:
            batch = ForwardBatch.tree(rows.tokens, start, rows.parents, device)
        return batch.after(self.text.tokens, start, self._tokens_before)

    def run(self, rows: PassInput) -> torch.Tensor:
        """Run a pass over this context alone. See `run_pass`."""
        return run_pass([self], [rows])[0]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep a path of the rows of the last pass, and forget the others."""
        self.tell(calls.Keep(list(rows)))
        if self.tapped is not None:
            kept = self.tapped[put(list(rows), self.tapped.device)]
            self.levels.drafter.note(self.length, kept)
            self.tapped = None
        self.sequence.keep(rows)

    def note(self, logits: torch.Tensor) -> None:
        """Keep the logits of a forward if `keeps_logits` is set."""
        self.logits = logits if self.keeps_logits else None

    def end(self) -> None:
        """Drop the pass that was begun ahead, because no pass follows for now."""
        self.tell(calls.End())
        self.models.runtime.passes.end()

    def check_ranks(self) -> None:
        """Raise RankError if a rank was lost. Call this once the host has the ranks' results,
        before they are used.
        """
        self.models.ranks.check()

    def close(self) -> None:
        """Release all memory."""
        self._resources.close()

    def _tell_closed(self) -> None:
        # Lost ranks need no notice.
        with suppress(RankError):
            self.models.ranks.tell(calls.Close(context=self.number))

    def _pass(self, batch: ForwardBatch, each_layer: Callable[[int], None]) -> torch.Tensor:
        """Prefill with an ordinary pass. Return the last row's hidden state, [1, hidden]."""
        passes, sequences = self.models.runtime.passes, [self.sequence]
        passes.begin(sequences)
        taps = self.levels.taps_of_prompt(self.length, batch.rows)
        hidden = self.model.forward(
            batch, passes.weights, passes.cache(sequences), each_layer=each_layer, taps=taps
        )
        if taps is not None:
            self.levels.note(self.length, taps)
        self.sequence.keep(range(batch.rows))
        return hidden[-1:]

    def _prefill(
        self, part: PromptPart, batch: ForwardBatch, each_layer: Callable[[int], None]
    ) -> torch.Tensor:
        """Prefill in chunks. Return a copy of the last row's hidden state, [1, hidden], because the
        memory of all rows is reclaimed next.
        """
        weights, start = self.models.runtime.passes.prefill_weights, self.length
        taps = self.levels.taps_of_prompt(start, batch.rows)
        with self.sequence.prefill(batch.rows, part) as cache:
            hidden = self.model.forward(
                batch, weights, cache, chunk=PREFILL_CHUNK, each_layer=each_layer, taps=taps
            )
            if taps is not None:
                self.levels.note(start, taps)
            return hidden[-1:].clone()


def begin_pass(contexts: Sequence[Context]) -> None:
    """Start the copies of the next pass over some contexts, after their retrieval caches are
    refreshed. Raises LinkError or RankError.
    """
    models = contexts[0].models
    models.ranks.tell(calls.Begin([context.number for context in contexts]))
    models.runtime.passes.begin([context.sequence for context in contexts])


def _tell_pass(
    contexts: Sequence[Context], inputs: Sequence[PassInput], batch: ForwardBatch
) -> None:
    """Send a pass to the other ranks. batch: all rows"""
    ranks = contexts[0].models.ranks
    if ranks.count == 1 or ranks.index:
        return
    parts = [
        own.tell.signed(calls.PassRows(len(rows.tokens), rows.parents, rows.is_kept, rows.more))
        for own, rows in zip(contexts, inputs, strict=True)
    ]
    tokens = inputs[0].tokens if len(inputs) == 1 else batch.tokens
    ranks.tell(calls.RunPass(tokens, parts))


@torch.inference_mode()
def run_pass(contexts: Sequence[Context], inputs: Sequence[PassInput]) -> list[torch.Tensor]:
    """Run one pass of the full model over the rows that each context asks for.

    Returns the float32 logits of each context's rows, [rows, vocab]. Raises LinkError or RankError.
    """
    model, passes = contexts[0].model, contexts[0].models.runtime.passes
    sequences = [context.sequence for context in contexts]
    batches = [context.join(rows) for context, rows in zip(contexts, inputs, strict=True)]
    batch, taken = ForwardBatch.side_by_side(batches), contexts[0].levels.taps
    _tell_pass(contexts, inputs, batch)
    passes.begin(sequences)
    if len(contexts) == 1 and contexts[0].recorded.fits(batch.rows):
        hidden, states = contexts[0].recorded.run(batch, taken)
    else:
        taps = model.taps(taken, range(batch.rows))
        hidden = model.forward(batch, passes.weights, passes.cache(sequences), taps=taps)
        states = taps and taps.states
    for sequence, rows in zip(sequences, inputs, strict=True):
        if rows.is_kept:
            sequence.keep([0])
    if all(rows.is_kept and rows.more for rows in inputs):
        # The copies of the next pass run while the head and the draws compute.
        passes.begin(sequences)
    counts = [own.rows for own in batches]
    logits = list(model.logits(hidden).split(counts))
    tapped = [None] * len(counts) if states is None else states.split(counts)
    for context, rows, own, some in zip(contexts, inputs, logits, tapped, strict=True):
        context.note(own)
        context.tapped = None if rows.is_kept else some
    return logits
