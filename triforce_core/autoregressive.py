"""Plain decoding, one token a pass: the oracle that every faster method is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.errors import CheckpointError
from offload.runtime import Session

from .laws import draw, law
from .model import Model
from .params import SamplingParams


class Autoregressive:
    """Feeds the last token through the full model and draws the next from its law."""

    max_pass_tokens = 1

    def __init__(
        self, model: Model, session: Session, params: SamplingParams, generator: torch.Generator
    ) -> None:
        self._model = model
        self._session = session
        self._params = params
        self._generator = generator
        self._last: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], chunk: int, each_layer: Callable[[int], None]) -> None:
        """Computes the prompt's KV and the logits after it, layer by layer."""
        with self._session.prefill() as cache:
            hidden = self._model.forward(
                torch.tensor(prompt),
                0,
                self._session.weights,
                cache,
                chunk=chunk,
                each_layer=each_layer,
            )
        self._logits = self._model.logits(hidden[-1:])

    @torch.inference_mode()
    def step(self, *, more: bool) -> list[int]:
        """The next token: after prefill for nothing, later for one pass.

        more: whether a step may follow, so that the copies of its pass begin before the head and
        the draw of this one are computed.
        Raises CheckpointError if the model computes something that is no number.
        """
        if self._last is not None:
            self._session.begin_pass()
            hidden = self._model.forward(
                self._last, self._session.kv.length, self._session.weights, self._session.cache
            )
            self._session.commit(1)
            if more:
                self._session.begin_pass()
            self._logits = self._model.logits(hidden)
        self._last = draw(law(self._logits, self._params), self._generator)
        tokens = self._last.tolist()
        if tokens[0] < 0:
            raise CheckpointError(
                "the model's logits are not finite: its weights are damaged, or they overflow "
                "in this dtype (try --dtype float32)"
            )
        return tokens
