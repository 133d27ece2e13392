"""What an engine drafts with, and the decoder that it makes of it for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from offload.graphs import Recorder
from offload.kv.direct import reader
from offload.kv.gather import ChunkReader
from offload.kv.scores import ChunkScores
from offload.kv.shape import KVShape
from offload.kv.sizes import GATHER_BUFFERS, reader_bytes
from offload.runtime import Runtime, Session
from offload.weights import ResidentWeights, WeightStore
from triforce_core.decoding.acceptance import Rule, make_rule
from triforce_core.decoding.autoregressive import Autoregressive, Decoder
from triforce_core.decoding.draft_length import Auto, DraftLength, Fixed
from triforce_core.decoding.hierarchy import Hierarchy, RetrievalModel
from triforce_core.decoding.laws import laws
from triforce_core.decoding.levels import Middle, Nothing, Proposer
from triforce_core.decoding.ngram import NGramDrafter
from triforce_core.decoding.resident import ResidentModel
from triforce_core.decoding.retrieval import POLICIES, RetrievalCache
from triforce_core.decoding.small_model import SmallModelDrafter, WindowCache, drafter_head
from triforce_core.model.llama import Model
from triforce_core.params import SamplingParams
from triforce_core.settings import AUTO, AUTO_DRAFT_TOKENS, MethodSettings
from triforce_core.sizing.drafting import fitting_budget

AUTO_INNER_TOKENS = 16
_RETRIEVAL_ACCEPTANCE, _RETRIEVAL_FIRST = 0.95, 24
_DRAFTER_ACCEPTANCE, _DRAFTER_FIRST = 0.6, 4
"""What `auto` assumes of a level before it has seen any of its drafts, and its first draft."""


@dataclass(frozen=True)
class SmallModel:
    """A drafter's weights, all on the device."""

    model: Model
    store: WeightStore
    shape: KVShape
    capacity: int


class Drafting:
    """The levels below the target. Lengths chosen by `auto` are learned over all requests."""

    def __init__(
        self,
        settings: MethodSettings,
        budget: int,
        small: SmallModel | None,
        recorder: Recorder | None = None,
    ) -> None:
        """budget: tokens of the retrieval cache, 0 if there is no such level.

        recorder: records the forwards of what drafts as graphs, if given
        """
        self.settings = settings
        self.budget = budget
        self._recorder = recorder
        self._small = small
        nothing_below = str(settings.draft) == "none"
        if budget:
            self._outer = _length(
                settings.draft_tokens,
                AUTO_DRAFT_TOKENS,
                _RETRIEVAL_ACCEPTANCE,
                _RETRIEVAL_FIRST,
                by_confidence=True,
            )
            self._inner: DraftLength = Fixed(0)
            if not nothing_below:
                self._inner = _length(
                    settings.inner_draft_tokens,
                    AUTO_INNER_TOKENS,
                    _DRAFTER_ACCEPTANCE,
                    _DRAFTER_FIRST,
                )
        elif nothing_below:
            self._outer = Fixed(0)
        else:
            self._outer = _length(
                settings.draft_tokens, AUTO_DRAFT_TOKENS, _DRAFTER_ACCEPTANCE, _DRAFTER_FIRST
            )

    @property
    def levels(self) -> list[str]:
        """From the cheapest to the one that has the last word."""
        names = ["target"]
        if self.budget:
            names.insert(0, "retrieval")
        if self.settings.drafts and str(self.settings.draft) != "none":
            names.insert(0, "model" if self._small else "ngram")
        return names

    @contextmanager
    def request(
        self,
        model: Model,
        runtime: Runtime,
        params: SamplingParams,
        seed: int,
        stops: Sequence[int],
        prompt_tokens: int,
    ) -> Iterator[tuple[Session, Decoder]]:
        """Memory and decoder of one request. Raises DoesNotFitError."""
        memory, shape = runtime.memory, runtime.demand.kv
        rule = make_rule(self.settings.accept, seed, memory.device)
        context = prompt_tokens + params.max_new_tokens
        with ExitStack() as stack:
            scores = None
            if self.budget:
                score = POLICIES[self.settings.retrieval]
                scores = ChunkScores(shape, self.settings.chunk_size, context, score, memory)
                stack.callback(scores.close)
            session = stack.enter_context(
                runtime.session(prompt_tokens, params.max_new_tokens, scores)
            )
            if not self.settings.drafts:
                yield session, Autoregressive(model, session, params, rule)
                return
            proposer = self.drafter(model, runtime, params, rule, stack)
            cache = None
            if scores:
                verifier, cache = self.retrieval_model(
                    model, runtime, session, scores, params, context, stack
                )
                nothing = Nothing(model.config.vocab, memory.device)
                proposer = Middle(
                    proposer, verifier, rule, self._inner, self._outer, nothing, stops
                )
            decoder = Hierarchy(
                model,
                session,
                params,
                rule,
                proposer,
                self._outer,
                frozenset(stops),
                cache,
                memory.device,
            )
            yield session, decoder

    def drafter(
        self, model: Model, runtime: Runtime, params: SamplingParams, rule: Rule, stack: ExitStack
    ) -> Proposer:
        """The lowest level. What it holds goes with the stack. Raises DoesNotFitError."""
        vocab, device = model.config.vocab, runtime.memory.device
        if str(self.settings.draft) == "none":
            return Nothing(vocab, device)
        if self._small is None:
            return NGramDrafter(vocab, device)
        small = self._small
        cache = WindowCache(small.shape, small.model.rope, small.capacity, runtime.memory)
        stack.callback(cache.close)
        resident = ResidentModel(
            small.model,
            ResidentWeights(small.store),
            cache.kv,
            drafter_head(small.model, vocab, params),
            self._recorder,
            runtime.trace,
            "drafter",
        )
        stack.callback(resident.close)
        return SmallModelDrafter(resident, cache, vocab, rule, device)

    def retrieval_model(
        self,
        model: Model,
        runtime: Runtime,
        session: Session,
        scores: ChunkScores,
        params: SamplingParams,
        context: int,
        stack: ExitStack,
    ) -> tuple[RetrievalModel, RetrievalCache]:
        """The middle level, which needs a budget. What it holds goes with the stack.

        scores: what passes of the session collect; context: tokens of the longest text.
        Raises DoesNotFitError.
        """
        memory, settings = runtime.memory, self.settings
        budget = fitting_budget(self.budget, settings.chunk_size, context)
        size = reader_bytes(session.kv.shape, budget) // GATHER_BUFFERS
        buffers = runtime.host_buffers(size, GATHER_BUFFERS)
        collected = ChunkReader(session.kv, runtime.link, memory, settings.chunk_size, buffers)
        chosen = reader(session.kv, runtime.link, runtime.host, collected)
        stack.callback(chosen.close)
        cache = RetrievalCache(
            session.kv,
            chosen,
            memory,
            scores,
            settings.retrieval,
            budget,
            settings.chunk_size,
            settings.max_draft_tokens,
        )
        stack.callback(cache.close)
        resident = ResidentModel(
            model,
            ResidentWeights(runtime.weights),
            cache.kv,
            lambda hidden: laws(model.logits(hidden), params),
            self._recorder,
            runtime.trace,
            "retrieval model",
        )
        stack.callback(resident.close)
        return RetrievalModel(resident, cache, memory.device), cache


def _length(
    tokens: int | str, most: int, acceptance: float, first: int, *, by_confidence: bool = False
) -> DraftLength:
    if tokens != AUTO:
        return Fixed(int(tokens))
    return Auto(most, acceptance, first, by_confidence=by_confidence)
