"""Decoding by drafts: a proposer, one pass of the full model over what it proposed, acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch

from offload.kv.sizes import SCORED_TOKENS
from offload.runtime import Session
from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.autoregressive import Step, read_prompt
from triforce_core.decoding.draft_length import DraftLength
from triforce_core.decoding.laws import laws
from triforce_core.decoding.levels import (
    Middle,
    Proposer,
    Round,
    Tally,
    Text,
    check_token,
    speculate,
)
from triforce_core.decoding.resident import ResidentModel
from triforce_core.decoding.retrieval import RetrievalCache
from triforce_core.model.llama import Model
from triforce_core.params import SamplingParams


class Target:
    """The full model as a verifier: a pass over weights and KV wherever they live."""

    def __init__(
        self, model: Model, session: Session, params: SamplingParams, device: torch.device
    ) -> None:
        self.device = device
        self._model = model
        self._session = session
        self._params = params

    def laws(self, tokens: torch.Tensor) -> torch.Tensor:
        session = self._session
        session.begin_pass()
        hidden = self._model.forward(tokens, session.kv.length, session.weights, session.cache)
        return laws(self._model.logits(hidden), self._params)

    def keep(self, tokens: int) -> None:
        self._session.commit(tokens)


class RetrievalModel:
    """The target's own weights over the retrieval cache, as a verifier."""

    def __init__(self, model: ResidentModel, cache: RetrievalCache, device: torch.device) -> None:
        """model: gives the laws of tokens over the cache."""
        self.device = device
        self._model = model
        self._cache = cache

    def laws(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.run(tokens, self._cache.length)

    def keep(self, tokens: int) -> None:
        self._cache.keep(tokens)


class Hierarchy:
    """Proposes, verifies in one pass, accepts, commits, rolls back.

    A pass never drafts more than may still be said, so a length limit cuts nothing; what follows an
    end of text is dropped, which leaves the law of what comes before it as it is.
    """

    def __init__(
        self,
        model: Model,
        session: Session,
        params: SamplingParams,
        rule: Rule,
        proposer: Proposer,
        length: DraftLength,
        stops: Collection[int],
        retrieval: RetrievalCache | None,
        device: torch.device,
    ) -> None:
        """retrieval: what the proposer attends to, kept up to date with every pass."""
        self.tally = Tally()
        self.inner_tally = proposer.tally if isinstance(proposer, Middle) else Tally()
        self.retrieval = retrieval
        self._model = model
        self._session = session
        self._params = params
        self._rule = rule
        self._proposer = proposer
        self._length = length
        self._stops = stops
        self._target = Target(model, session, params, device)
        self._text: Text | None = None
        self._logits: torch.Tensor | None = None

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], chunk: int, each_layer: Callable[[int], None]) -> None:
        self._logits = read_prompt(self._model, self._session, prompt, chunk, each_layer)
        self._text = Text(list(prompt))

    @torch.inference_mode()
    def step(self, remaining: int) -> Step:
        if self._logits is not None:
            tokens = self._rule.draw(
                laws(self._logits, self._params), self._text.committed
            ).tolist()
            self._logits = None
            check_token(tokens[0])
            step, scored = Step(tokens, 0), SCORED_TOKENS
        else:
            count = self._length.choose(remaining - 1)
            if self.retrieval:
                self.retrieval.expect(count + 1)
            began = time.perf_counter()
            turn = speculate(self._proposer, self._target, self._rule, self._text, count)
            self._tell(began, turn)
            self.tally.count(turn)
            self._length.observe(turn)
            step, scored = Step(turn.tokens, turn.drafted), len(turn.tokens)
        self._text.commit(step.tokens)
        if len(step.tokens) < remaining and self._stops.isdisjoint(step.tokens):
            if self.retrieval:
                # Before the next pass's copies, or it would wait behind them.
                began = time.perf_counter()
                self.retrieval.refresh(scored)
                self._session.trace.host("refresh", began, time.perf_counter() - began)
            self._session.begin_pass()
        return step

    def _tell(self, began: float, turn: Round) -> None:
        """Tells the trace of a round."""
        tell, drafted = self._session.trace.host, began + turn.draft_seconds
        tell("draft", began, turn.draft_seconds, tokens=turn.drafted)
        tell("verify", drafted, turn.verify_seconds, tokens=turn.drafted, accepted=turn.accepted)
