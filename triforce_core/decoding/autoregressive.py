"""Plain decoding, one token a pass: the oracle that every faster method is held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from offload.runtime import Session
from triforce_core.decoding.acceptance import Rule
from triforce_core.decoding.laws import laws
from triforce_core.decoding.levels import Tally, check_token
from triforce_core.decoding.retrieval import RetrievalCache
from triforce_core.model.llama import Model
from triforce_core.params import SamplingParams


class Step(NamedTuple):
    """tokens: new ones, at least one. drafted: how many a draft had proposed; of `tokens`, all but
    the last were among them.
    """

    tokens: list[int]
    drafted: int


class Decoder(Protocol):
    """Decodes one request.

    tally, inner_tally: of the drafts that the target verified, and the retrieval model
    """

    tally: Tally
    inner_tally: Tally
    retrieval: RetrievalCache | None

    def prefill(self, prompt: Sequence[int], chunk: int, each_layer: Callable[[int], None]) -> None:
        """Computes the prompt's KV and the logits after it, layer by layer."""

    def step(self, remaining: int) -> Step:
        """The next tokens, at most `remaining`: after prefill for nothing, later for one pass.

        Raises CheckpointError if the model computes something that is no number.
        """


class Autoregressive:
    """Feeds the last token through the full model and draws the next from its law."""

    def __init__(self, model: Model, session: Session, params: SamplingParams, rule: Rule) -> None:
        self.tally = self.inner_tally = Tally()
        self.retrieval = None
        self._model = model
        self._session = session
        self._params = params
        self._rule = rule
        self._last: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], chunk: int, each_layer: Callable[[int], None]) -> None:
        self._logits = read_prompt(self._model, self._session, prompt, chunk, each_layer)

    @torch.inference_mode()
    def step(self, remaining: int) -> Step:
        began, position = time.perf_counter(), self._session.kv.length
        if self._last is not None:
            self._session.begin_pass()
            hidden = self._model.forward(
                self._last, position, self._session.weights, self._session.cache
            )
            self._session.commit(1)
            position += 1
            if remaining > 1:
                # The next pass's copies begin before the head and the draw of this one.
                self._session.begin_pass()
            self._logits = self._model.logits(hidden)
        self._last = self._rule.draw(laws(self._logits, self._params), position)
        tokens = self._last.tolist()
        check_token(tokens[0])
        self._session.trace.host("step", began, time.perf_counter() - began)
        return Step(tokens, 0)


def read_prompt(
    model: Model,
    session: Session,
    prompt: Sequence[int],
    chunk: int,
    each_layer: Callable[[int], None],
) -> torch.Tensor:
    """Computes and keeps a prompt's KV; the logits after its last token, [1, vocab]."""
    with session.prefill() as cache:
        hidden = model.forward(
            torch.tensor(prompt), 0, session.weights, cache, chunk=chunk, each_layer=each_layer
        )
    return model.logits(hidden[-1:])
