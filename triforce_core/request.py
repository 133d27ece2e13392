"""A request: parameters, a rule with its coins and a clock, over a context."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from offload.errors import TriforceError
from offload.memory.device import OUT_OF_MEMORY
from triforce_core.decoding.acceptance import make_rule
from triforce_core.decoding.context import Context
from triforce_core.decoding.decoder import Ask, Decoder, Prompt, Step, advance
from triforce_core.decoding.drafting import Drafting
from triforce_core.decoding.kv_parts import Interrupted
from triforce_core.decoding.levels import Tallies, Tally
from triforce_core.decoding.models import Models
from triforce_core.decoding.shrinking import shrinking
from triforce_core.guiding import Guide
from triforce_core.params import SamplingParams
from triforce_core.stats import Clock, bits_per_number, drafting_stats, rank_stats, request_stats
from triforce_core.stream import Completion, Piece, TokenLogprob, pieces_of, until_stop
from triforce_core.text import TextStream

_Given = TypeVar("_Given")


class Request:
    """Reads a prompt into a context and decodes what follows.

    seed: of its coins; drawn if the parameters have none
    reason: why it ends: "stop", "length" or "interrupted"; empty as long as it goes on
    """

    def __init__(
        self,
        context: Context,
        models: Models,
        drafting: Drafting,
        params: SamplingParams,
        name: str,
        load_seconds: float,
        guide: Guide | None = None,
    ) -> None:
        """name, load_seconds: of the model, for the stats. guide: what the text keeps to"""
        self._guide = guide
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self._context = context
        self._models = models
        self._params = params
        self._name = name
        self._clock = Clock(models.runtime.link, load_seconds)
        self._stops = frozenset(models.target.config.eos_token_ids + params.stop_token_ids)
        self._rule = make_rule(models.method.accept, self.seed, models.target.device)
        self._drafting = drafting
        self._tallies = Tallies(Tally(), Tally())
        self._decoder = self._make_decoder()
        self.reason = ""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._untold: list[TokenLogprob] = []
        self._read: Prompt | None = None
        self._step: Step | None = None
        # How many rows the next pass's chunks are chosen by, until its copies have begun.
        self._due: int | None = None

    @property
    def made(self) -> int:
        """Tokens that were made so far."""
        return len(self._tokens)

    def run(self) -> Iterator[Piece | Completion]:
        """Once the prompt is read: yields text as each pass lands, then the Completion. What fails
        is raised behind the completion of what there is.
        """
        while not self.reason:
            pieces: list[Piece] = []
            try:
                with self._models.runtime.memory.typed_errors():
                    if self._step is not None:
                        self.drop_what_never_pays()
                    pieces = self.step()
                    if not self.reason:
                        self.begin()
            except TriforceError as error:
                yield from pieces
                yield from self._failed(error)
                raise
            yield from pieces
        try:
            with self._models.runtime.memory.typed_errors():
                last = list(self.finish())
        except TriforceError as error:
            yield from self._failed(error)
            raise
        yield from last

    def read(
        self,
        prompt: list[int],
        text: TextStream,
        each_layer: Callable[[int], None],
        interrupted: threading.Event,
        *,
        reuse: bool,
    ) -> None:
        """Reads the prompt into the context, which is this request's until it ends.

        each_layer: called meanwhile with each layer's index. interrupted: ends the request within a
        layer of that, or a pass. reuse: see `Context.read`
        Raises DoesNotFitError or LinkError.
        """

        def after(layer: int) -> None:
            each_layer(layer)
            if interrupted.is_set():
                raise Interrupted

        context = self._context
        self._prompt, self._text, self._interrupted = prompt, text, interrupted
        context.tells_logits = self._params.tells_logprobs

        def whole() -> Prompt:
            read = context.read(prompt, self._params.max_new_tokens, after, reuse=reuse)
            context.text.guide = self._guide
            self._models.runtime.link.synchronize()
            return read

        try:
            self._read = self._with_less(whole, 0, lambda: None)
            self._decoder.start(self._read)
        except Interrupted:
            self._clock.end_prefill()
            self.reason = "interrupted"
        self._before = context.passes.counters
        self._retrieval = context.retrieval

    def step(self) -> list[Piece]:
        """The text of the next tokens: of the first, or of those that a pass for this request alone
        gives.

        Raises LinkError, CheckpointError or OutOfDeviceMemoryError.
        """
        left = self._params.max_new_tokens - len(self._tokens)

        def tokens() -> Step:
            self._begin()
            if self._step is not None and self._step.scored is not None:
                # If the pass fails: whatever drafts begins anew then.
                self._due = 1
            return advance(self._decoder, self._context.run, left)

        def dropped() -> None:
            if not self._tokens:
                # The first is drawn from the prompt's logits.
                self._decoder.start(self._read)

        return self._taken(self._with_less(tokens, None, dropped))

    def ask(self) -> Ask | None:
        """See `Decoder.ask`."""
        with self._on_device():
            return self._decoder.ask(self._params.max_new_tokens - len(self._tokens))

    def take(self, logits: torch.Tensor | None, seconds: float) -> list[Piece]:
        """The text of the tokens that a pass gave; `reason` says whether they are the last.

        logits, seconds: see `Decoder.take`. Raises CheckpointError.
        """
        with self._on_device():
            step = self._decoder.take(logits, seconds)
        return self._taken(step)

    def _taken(self, step: Step) -> list[Piece]:
        self._step, self._due = step, step.scored
        if not self._tokens:
            self._clock.end_prefill()
        taken, ended = until_stop(step.tokens, self._stops)
        if self._guide and (count := self._guide.ended_by(taken)) is not None:
            taken, ended = taken[:count], True
        logprobs = self._logprobs_of(taken)
        pieces, used = pieces_of(self._text, taken, step, logprobs, self._untold)
        self._tokens += taken[:used]
        self._logprobs += logprobs[:used]
        if ended or self._text.stopped:
            self.reason = "stop"
        elif len(self._tokens) >= self._params.max_new_tokens:
            self.reason = "length"
        elif self._interrupted.is_set():
            self.reason = "interrupted"
        return pieces

    def finish(self) -> Iterator[Piece | Completion]:
        """What is left of the text, and the Completion. The context is free."""
        text, untold = self._text, self._untold
        if self._tokens:
            self._clock.end_decode()
        with self._on_device():
            self._context.end()
        # Before anything is told: a rank may be lost by now.
        stats = self._rank_stats()
        if piece := text.finish():
            yield Piece(piece, "plain", tuple(untold))
        elif text.stopped and untold:
            # Those of the stop, whose text is not given.
            del self._logprobs[-len(untold) :]
        stats = self._own_stats() | stats
        yield Completion(self._tokens, text.text, self.reason, stats, self._logprobs)

    def _failed(self, error: TriforceError) -> list[Piece | Completion]:
        """The same for a request that fails: nothing is asked of the device any more, nor of other
        ranks.
        """
        self.reason = "error"
        self._clock.fail()
        rest = self._text.finish()
        last = Completion(
            self._tokens,
            self._text.text,
            self.reason,
            self._own_stats() | {"error": str(error)},
            self._logprobs,
        )
        return [Piece(rest, "plain", tuple(self._untold)), last] if rest else [last]

    def refresh(self) -> None:
        """Makes what drafts ready for a pass that has not begun. Raises LinkError."""
        if self._due is not None:
            with self._on_device():
                self._context.refresh(self._due)
            self._due = None

    def begin(self) -> None:
        """The same, and starts the copies of a pass for this request alone."""
        try:
            with self._on_device():
                self._begin()
        except OUT_OF_MEMORY:
            # What was accepted holds: the next step tries again, and says so if it cannot.
            self._context.end()

    def _begin(self) -> None:
        if self._due is not None:
            self._context.begin(self._due)
            self._due = None

    def _with_less(
        self, run: Callable[[], _Given], kept: int | None, dropped: Callable[[], None]
    ) -> _Given:
        """See `shrinking`. kept: None for all tokens whose KV is there."""

        def remade() -> None:
            # The old decoder holds on to what was dropped.
            self._decoder = self._make_decoder()
            dropped()

        with self._on_device():
            if self._models.ranks.count > 1 or self._models.runtime.demand.sequences > 1:
                # Others use what would be dropped, or are in the middle of what would be left.
                return run()
            kept = self._context.passes.length if kept is None else kept
            return shrinking(self._context, self._drafting, run, kept, remade)

    @torch.inference_mode()
    def _logprobs_of(self, tokens: list[int]) -> list[TokenLogprob]:
        """Of a step's tokens, by the logits that they were drawn from; none if nobody asked."""
        if not self._params.tells_logprobs:
            return []
        rows = self._step.rows
        logits = self._context.logits if rows is None else self._context.logits[list(rows)]
        logs = logits[: len(tokens)].float().log_softmax(-1)
        best = logs.topk(min(self._params.logprobs, logs.shape[1]))
        own = logs.cpu().gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            TokenLogprob(token, value, tuple(zip(*row, strict=True)))
            for token, value, row in zip(tokens, own, likeliest, strict=True)
        ]

    def _make_decoder(self) -> Decoder:
        return self._drafting.decoder(
            self._context, self._params, self._rule, self._stops, self._tallies
        )

    def drop_what_never_pays(self) -> None:
        """See `Drafting.drop_lost`."""
        with self._on_device():
            if self._drafting.drop_lost(self._context):
                # The old decoder holds on to what was dropped.
                self._decoder = self._make_decoder()
                self._context.lend()

    def _rank_stats(self) -> dict[str, Any]:
        models = self._models
        if models.ranks.count == 1:
            return {}
        own = rank_stats(models.runtime, self._context)
        return {"ranks": [own, *models.ranks.ask("rank_stats")]}

    def _own_stats(self) -> dict[str, Any]:
        models, runtime, passes = self._models, self._models.runtime, self._context.passes
        return {
            "method": models.method.method,
            "model": self._name,
            "device": str(runtime.memory.device),
            "threads": torch.get_num_threads(),
            "dtype": str(runtime.demand.kv.dtype).removeprefix("torch."),
            "seed": self.seed,
            "new_tokens": len(self._tokens),
            "token_ids": self._tokens,
            "text": self._text.text,
            "prompt_tokens": len(self._prompt),
            "reused_tokens": self._read.reused if self._read else 0,
            "finish_reason": self.reason,
            **request_stats(
                runtime,
                passes,
                passes.counters - self._before,
                self._clock,
                self._tallies.target,
                len(self._tokens),
            ),
            **drafting_stats(models, self._tallies, self._retrieval),
            "bits_per_number": bits_per_number(models),
        }

    def _on_device(self) -> AbstractContextManager:
        return self._models.runtime.memory.current()
