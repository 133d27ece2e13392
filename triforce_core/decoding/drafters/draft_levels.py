"""The levels below the target for one context: the drafter and the retrieval level."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from triforce_core.decoding.contexts import calls
from triforce_core.decoding.contexts.models import Models, SmallModel
from triforce_core.decoding.drafters.assistant import AssistantDrafter
from triforce_core.decoding.drafters.block import BlockDrafter
from triforce_core.decoding.drafters.head import HeadDrafter
from triforce_core.decoding.drafters.ngram import NGramDrafter
from triforce_core.decoding.drafters.of_states import DrafterOfStates, Given
from triforce_core.decoding.drafters.resident import ResidentModel
from triforce_core.decoding.drafters.retrieval import RetrievalCache
from triforce_core.decoding.drafters.small_model import SmallModelDrafter, WindowCache
from triforce_core.decoding.levels import Drafter, Nothing
from triforce_core.model.heads.assistant import AssistantModel
from triforce_core.model.heads.dflash import DFlashModel
from triforce_core.model.heads.joins import NOTHING, Tapped
from triforce_core.model.heads.taps import Taps
from triforce_core.plan.levels import (
    LONGEST_RECORDED,
    copied_shapes,
    fitting_budget,
    head_states_bytes,
)
from triforce_offload.kv.caches.copied import CopiedKV
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.direct import reader
from triforce_offload.kv.gather import ChunkReader
from triforce_offload.kv.scores import ChunkScores
from triforce_offload.kv.sequence import SequenceKV
from triforce_offload.kv.sizes import GATHER_BUFFERS, reader_bytes
from triforce_offload.memory.device import put
from triforce_offload.weights.store import ResidentWeights


class DraftLevels:
    """The levels that draft for one context, with their KV, scores and recorded forwards.

    drafter: the lowest level
    retrieval: the retrieval cache; None if there is no retrieval level
    scores: scores of the chunks that the retrieval cache chooses from, or None
    model: the target's weights, or copies of them, over the retrieval cache, or None
    idle: whether there is a retrieval level that does not draft, because the text is too short
    """

    def __init__(self, models: Models, sequence: SequenceKV, tell: calls.Teller) -> None:
        """Raises DoesNotFitError."""
        self.scores: ChunkScores | None = None
        self.retrieval: RetrievalCache | None = None
        self.model: ResidentModel | None = None
        self.idle = False
        self._models = models
        self._sequence = sequence
        self._tell = tell
        self._retrieval_resources = ExitStack()
        with ExitStack() as stack:
            self.drafter = make_drafter(models, tell)
            stack.callback(self.close)
            if models.budget:
                self._make_retrieval()
            stack.pop_all()

    def begin(self) -> None:
        """Prepare for the prefill of a request. Waits for the device."""
        if self.retrieval:
            self.retrieval.begin()

    def idle_for(self, tokens: int) -> bool:
        """Whether there is a retrieval level that should not draft for a text of this length."""
        return self.retrieval is not None and not self._models.retrieval_pays(tokens)

    def set_idle(self, idle: bool) -> None:
        """Let the retrieval level draft, or not. Passes of a text for which it does not draft
        collect no scores, which makes them faster on a CPU.
        """
        if idle != self.idle:
            self.idle = idle
            self._sequence.collect(None if idle else self.scores)

    def refresh(self, scored: int) -> None:
        """See `Context.refresh`."""
        if self.retrieval and not self.idle:
            began = time.perf_counter()
            self.retrieval.refresh(scored)
            trace = self._models.runtime.trace
            trace.host("refresh", began, time.perf_counter() - began)

    def roll_back(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of the text."""
        self.drafter.roll_back(tokens)
        if self.retrieval:
            self.retrieval.roll_back(tokens)

    def draft(self, tokens: torch.Tensor, parents: tuple[int, ...] | None = None) -> torch.Tensor:
        """Run the retrieval level over tokens [n]. Return float32 logits after each, [n, vocab],
        which are valid until the next call.

        parents: for each token, the drafted row that it follows, or -1 if it follows the text's
            last token with KV. Drafted rows are numbered in the order in which they were kept,
            those of `tokens` after them. None if each token follows the one before it, and the
            first one the last drafted row
        """
        self._tell(calls.Draft(tokens, parents))
        rows = self.retrieval.follow(tokens.shape[0], parents)
        return self.model.logits(tokens, self.retrieval.length, rows)

    def run_head(self, call: calls.RunHead) -> None:
        """Run this rank's part of the head. See `DrafterOfStates.run`."""
        self.drafter.run(call.tokens, call.start, call.parents)

    @property
    def taps(self) -> Tapped:
        """What the drafter takes of forwards of the target."""
        return self.drafter.taps if isinstance(self.drafter, DrafterOfStates) else NOTHING

    def taps_of_prompt(self, start: int, rows: int) -> Taps | None:
        """Return taps for a prefill of `rows` tokens of the text, from `start` on."""
        if not self.taps:
            return None
        last = range(max(0, rows - self.drafter.window), rows)
        first = range(0, 0 if start else min(self.drafter.first, last.start))
        return self._models.target.taps(self.taps, first, last)

    def note(self, start: int, taps: Taps) -> None:
        """Take what a forward of the target showed of rows of the text's tokens, of which the first
        is that of `start`.
        """
        for rows, states in taps.parts():
            if rows:
                self.drafter.note(start + rows.start, states)

    def keep_drafted(self, rows: Sequence[int]) -> None:
        """Keep a path of the last rows of `draft`, until a pass has computed them."""
        self._tell(calls.KeepDrafted(list(rows)))
        if self.model.tapped is not None:
            kept = self.model.tapped[put(list(rows), self.model.tapped.device)]
            self.drafter.note(self.retrieval.length, kept)
        self.retrieval.keep(rows)

    def give_up(self) -> bool:
        """Drop the retrieval level and the draft model for good; n-grams are still looked up.
        Return whether there were any. Do not call this in the middle of a pass.
        """
        models = self._models
        if not models.held_levels:
            return False
        self._retrieval_resources.close()
        self.scores = self.retrieval = self.model = None
        self.idle = False
        if models.small is not None:
            self.drafter.close()
            self.drafter = Nothing(models.target.device)
        models.give_up_levels()
        models.runtime.memory.trim()
        return True

    def close(self) -> None:
        """Release all memory."""
        self._retrieval_resources.close()
        self.drafter.close()

    def _make_retrieval(self) -> None:
        """Create the retrieval cache of the sequence and the forwards over it. From then on, passes
        collect scores.
        """
        sequence = self._sequence
        models, resources = self._models, self._retrieval_resources
        runtime, method, demand = models.runtime, models.method, models.runtime.plan.requirements
        scores = ChunkScores(
            demand.kv,
            method.chunk_size,
            demand.context_tokens,
            runtime.memory,
        )
        resources.callback(scores.close)
        sequence.collect(scores)
        resources.callback(sequence.collect, None)
        cache = retrieval_cache(models, sequence, scores)
        resources.callback(cache.close)
        model = ResidentModel(
            models.target.for_drafts(),
            ResidentWeights(runtime.weights, models.draft_copies, high=models.reads_high_bits),
            cache.kv,
            models.recorder,
            runtime.trace,
            "retrieval model",
            taps=self.taps,
            drafted=demand.max_draft_tokens + LONGEST_RECORDED,
        )
        resources.callback(model.close)
        self.scores, self.retrieval, self.model = scores, cache, model


def retrieval_cache(models: Models, sequence: SequenceKV, scores: ChunkScores) -> RetrievalCache:
    """Return a retrieval cache over a sequence's KV. Raises DoesNotFitError."""
    runtime, method, kv = models.runtime, models.method, sequence.kv
    needs = runtime.plan.requirements
    budget = fitting_budget(models.budget, method.chunk_size, needs.context_tokens)
    collected = ChunkReader(
        kv,
        runtime.link,
        runtime.memory,
        runtime.host,
        method.chunk_size,
        reader_bytes(kv.shape, budget) // GATHER_BUFFERS,
    )
    return RetrievalCache(
        kv,
        reader(kv, runtime.link, runtime.host, collected),
        runtime.memory,
        scores,
        budget,
        method.chunk_size,
        needs.max_draft_tokens,
        recent=sequence.recent,
        rounded=models.rounds_kv,
    )


def make_drafter(models: Models, tell: Callable[[calls.ContextCall], None]) -> Drafter:
    """Return the lowest level. tell: sends a call to the other ranks. Raises DoesNotFitError."""
    runtime, small = models.runtime, models.small
    if not models.method.has_drafter or not models.method.drafts:
        return Nothing(runtime.memory.device)
    if small is None:
        return NGramDrafter(runtime.memory.device)
    if small.joins is not None:
        return _of_states(models, small, tell)
    cache = WindowCache(small.shape, small.model.rope, small.capacity, runtime.memory)
    level = ResidentModel(
        small.model,
        ResidentWeights(small.store),
        cache.kv,
        models.recorder,
        runtime.trace,
        "drafter",
    )
    return SmallModelDrafter(level, cache, models.target.config.vocab)


def _of_states(
    models: Models, small: SmallModel, tell: Callable[[calls.ContextCall], None]
) -> DrafterOfStates:
    """Return the drafter of a head. Raises DoesNotFitError."""
    runtime, model = models.runtime, small.model
    memory, longest = runtime.memory, runtime.plan.requirements.max_draft_tokens
    itemsize = small.shape.dtype.itemsize
    nbytes = head_states_bytes(model.config, small.capacity, longest, itemsize)
    states = memory.reserve(nbytes, "drafter cache")
    release = partial(memory.free, states)
    with ExitStack() as stack:
        stack.callback(release)
        if isinstance(model, AssistantModel):
            shapes = copied_shapes(model.config, small.shape.dtype, longest)
            kv = CopiedKV(*shapes, memory, "drafter cache")
        else:
            kv = DenseKV(small.shape, small.capacity, memory, "drafter cache")
        stack.pop_all()
    # Ranks have parts of a head that they divide; other heads are on the first rank alone.
    tell = tell if small.joins.divided else calls.silent
    # Plans have memory for recordings of a head beside those of other forwards alone.
    recorder = models.recorder if models.budget or models.records_passes else None
    weights = ResidentWeights(small.store)
    given = Given(model, weights, kv, runtime.trace, tell, release, recorder)
    if isinstance(model, AssistantModel):
        return AssistantDrafter(given, longest)
    return (BlockDrafter if isinstance(model, DFlashModel) else HeadDrafter)(given)
