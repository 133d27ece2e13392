"""A request: its parameters, its acceptance rule with random numbers, and its clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import torch

from triforce_core.decoding.acceptance import make_rule
from triforce_core.decoding.contexts.calls import RankStats
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.kv_parts import Interrupted
from triforce_core.decoding.decoder import Decoder, PassInput, Prefilled, Step
from triforce_core.decoding.drafting import Drafting
from triforce_core.decoding.levels import Tallies, Tally
from triforce_core.loading.start import Loaded
from triforce_core.model.tokenizing.tokenizer import token_ids_of
from triforce_core.params import SamplingParams, check_context, checked, params_of_each
from triforce_core.requests.guiding import Guide, guide_of
from triforce_core.requests.stats import (
    Clock,
    bits_per_number,
    drafting_stats,
    rank_stats,
    request_stats,
)
from triforce_core.requests.stream import Completion, Piece, TokenLogprob, pieces_of, until_stop
from triforce_core.requests.text import TextStream
from triforce_offload.errors import TriforceError, UsageError


@dataclass(frozen=True)
class ValidRequest:
    """The validated inputs of a request.

    tokens: tokens of the prompt
    text: converts new tokens to text
    guide: the grammar that the output follows, if any
    reuse: see `Context.prefill`
    """

    tokens: list[int]
    params: SamplingParams
    text: TextStream
    guide: Guide | None = None
    reuse: bool = True


def validated(
    loaded: Loaded, prompt: str | Sequence[int], params: SamplingParams | None, reuse: bool
) -> ValidRequest:
    """Validate a request and return its inputs. Raises UsageError if it is invalid."""
    tokenizer, config = loaded.tokenizer, loaded.whole
    params = checked(params, config.vocab)
    tokens = token_ids_of(prompt, tokenizer, config.vocab)
    limit = loaded.models.runtime.plan.requirements.context_tokens
    whose = "the model has" if limit == config.positions else "the engine was made for"
    check_context(len(tokens), params.max_new_tokens, limit, whose)
    text = TextStream(tokenizer, params.stop, one_by_one=params.wants_logprobs)
    return ValidRequest(tokens, params, text, guide_of(params, tokenizer, config), reuse)


def all_validated(
    loaded: Loaded, prompts: object, params: object, reuse: bool
) -> Sequence[SamplingParams | None]:
    """Validate several requests, and return the parameters of each.

    prompts, params: see `Engine.generate_all`

    Raises UsageError, which gives the index of an invalid one.
    """
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Collection):
        raise UsageError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
    each = params_of_each(params, len(prompts))
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        try:
            validated(loaded, prompt, own, reuse)
        except UsageError as error:
            raise UsageError(f"the request for prompts[{index}]: {error}") from error
    return each


class Request:
    """A request: it prefills its prompt and turns the results of passes into text. `Batch` runs it.

    seed: seed of its random numbers; drawn if the parameters have none
    reason: why it ended: "stop", "length", "interrupted" or "error"; empty while it runs
    progress: share of the prompt whose KV is in the context; other threads may read it
    """

    def __init__(
        self,
        valid: ValidRequest,
        context: Context,
        drafting: Drafting,
        interrupted: Event,
        name: str,
        load_seconds: float,
    ) -> None:
        """interrupted: ends the request within one layer of the prefill, or one pass
        name, load_seconds: name and loading time of the model, for the stats
        """
        models, params = context.models, valid.params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.reason = ""
        self.progress = 0.0
        self._valid = valid
        self._params = params
        self._text = valid.text
        self._context = context
        self._interrupted = interrupted
        self._name = name
        self._clock = Clock(models.runtime, load_seconds)
        self._stops = frozenset(models.target.config.eos_token_ids + params.stop_token_ids)
        self._rule = make_rule(models.method.accept, self.seed, models.target.device)
        self._drafting = drafting
        self._tallies = Tallies(Tally(), Tally())
        # Made once the prompt is prefilled, whose length decides which levels draft.
        self._decoder: Decoder | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        # Log-probabilities of tokens whose text is not complete yet.
        self._pending: list[TokenLogprob] = []
        self._prompt: Prefilled | None = None
        # Numbers of tokens of the prompt: reused, and reused or prefilled so far.
        self._reused = 0
        self._prefilled: int | None = None
        self._step: Step | None = None
        # Rows by which the chunks for the next pass are to be chosen; None once that is done.
        self._due: int | None = None

    @property
    def made(self) -> int:
        """Number of new tokens so far."""
        return len(self._tokens)

    @property
    def is_prefilled(self) -> bool:
        """Whether the prefill is complete."""
        return self._prompt is not None

    @property
    def prefilled(self) -> int:
        """Number of the prompt's tokens that earlier calls of `prefill` left in the context."""
        return self._prefilled or 0

    def left(self) -> int:
        """Return the number of the prompt's tokens that are to be prefilled."""
        tokens = self._valid.tokens
        return len(tokens) - (self._prefilled or self._shared())

    def prefill(self, progress: Callable[[int, int], None], rows: int | None = None) -> None:
        """Prefill the prompt into the context, which belongs to this request until it ends.

        progress: called after each layer with the layers done and the number of layers; of a part,
            with the number that corresponds to the share of the prompt
        rows: number of tokens to prefill now, if not all; call this again until `is_prefilled`. A
            prompt whose rotation depends on its length is prefilled at once
        Raises DoesNotFitError, LinkError, or Interrupted: call `interrupt_prefill` then.
        """
        context, tokens = self._context, self._valid.tokens
        layers = len(context.model.config.layers)
        if not context.model.rope.reads_alike(len(tokens)):
            rows = None
        if self._prefilled is None:
            self._reused = self._shared()
        begin = self._reused if self._prefilled is None else self._prefilled
        part = range(begin, len(tokens) if rows is None else begin + rows)

        def after(layer: int) -> None:
            done = begin + len(part) * (layer + 1) / layers
            self.progress = done / len(tokens)
            share = (done - self._reused) / (len(tokens) - self._reused)
            progress(round(share * layers), layers)
            if self._interrupted.is_set():
                raise Interrupted

        context.keeps_logits = self._params.wants_logprobs
        prompt = context.prefill_part(
            tokens, part, self._params.max_new_tokens, after, reused=self._reused
        )
        self._prefilled = part.stop
        if prompt is None:
            return
        context.text.guide = self._valid.guide
        context.models.runtime.link.synchronize()
        self._note_counters()
        self._prompt = prompt
        self._decoder = self._make_decoder()

    def _shared(self) -> int:
        return self._context.shared(self._valid.tokens) if self._valid.reuse else 0

    def interrupt_prefill(self) -> None:
        """End the request in the middle of its prefill."""
        self._clock.end_prefill()
        self.reason = "interrupted"
        self._note_counters()

    def first(self) -> Step:
        """Draw the first token from the prompt's logits. Raises CheckpointError."""
        return self._decoder.first(self._prompt)

    def next_pass(self) -> PassInput:
        """See `Decoder.next_pass`."""
        if self._step.scored is not None:
            # For a retry if the pass fails: the draft levels are reset then.
            self._due = 1
        return self._decoder.next_pass(self._params.max_new_tokens - len(self._tokens))

    def take(self, logits: torch.Tensor, seconds: float) -> Step:
        """See `Decoder.take`. Call `text_of` next."""
        return self._decoder.take(logits, seconds)

    def text_of(self, step: Step) -> list[Piece]:
        """Return the text of a step's tokens. Sets `reason` if they are the last ones."""
        self._step, self._due = step, step.scored
        if not self._tokens:
            self._clock.end_prefill()
        taken, ended = until_stop(step.tokens, self._stops)
        guide = self._valid.guide
        if guide and (count := guide.ended_by(taken)) is not None:
            taken, ended = taken[:count], True
        logprobs = self._logprobs_of(taken)
        pieces, used = pieces_of(self._text, taken, step, logprobs, self._pending)
        self._tokens += taken[:used]
        self._logprobs += logprobs[:used]
        if ended or self._text.stop is not None:
            self.reason = "stop"
        elif len(self._tokens) >= self._params.max_new_tokens:
            self.reason = "length"
        elif self._interrupted.is_set():
            self.reason = "interrupted"
        return self._counted(pieces)

    def _counted(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return pieces with the numbers of tokens and passes so far."""
        passes = (self._context.sequence.counters - self._before).passes
        return [replace(piece, tokens=len(self._tokens), passes=passes) for piece in pieces]

    def refresh(self) -> None:
        """Choose the chunks for the next pass if that is not done yet. Raises LinkError."""
        if self._due is not None:
            self._context.refresh(self._due)
            self._due = None

    def levels_changed(self) -> None:
        """Replace the decoder, because the old one refers to a dropped level."""
        if self.is_prefilled:
            self._decoder = self._make_decoder()

    def finish(self) -> list[Piece | Completion]:
        """End the request and free its context. Return the rest of its text and the Completion.

        Raises LinkError or RankError.
        """
        text, pending = self._text, self._pending
        if self._tokens:
            self._clock.end_decode()
        self._context.end()
        # Ask before returning any output, because a rank may be lost by now.
        ranks = self._rank_stats()
        last: list[Piece | Completion] = []
        if piece := text.finish():
            last += self._counted([Piece(piece, "plain", tuple(pending))])
        elif text.stop is not None and pending:
            # Drop the log-probabilities of the stop text, which is not part of the output.
            del self._logprobs[-len(pending) :]
        return [*last, self._completion(ranks)]

    def fail(self, error: TriforceError) -> list[Piece | Completion]:
        """End the request with an error. Return the rest of its text and a Completion with the
        output so far. Does not use the device or the other ranks.
        """
        self.reason = "error"
        self._clock.fail()
        rest = self._text.finish()
        last = self._completion({"error": str(error)})
        pieces = [Piece(rest, "plain", tuple(self._pending))] if rest else []
        return [*self._counted(pieces), last]

    @torch.inference_mode()
    def _logprobs_of(self, tokens: list[int]) -> list[TokenLogprob]:
        """Return the log-probabilities of a step's tokens; empty if they are not requested."""
        if not self._params.wants_logprobs:
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

    def _note_counters(self) -> None:
        """Record the counters at the start of the decode phase."""
        self._before = self._context.sequence.counters
        self._retrieval = self._context.levels.retrieval

    def _rank_stats(self) -> dict[str, Any]:
        models = self._context.models
        if models.ranks.count == 1:
            return {}
        own = rank_stats(models.runtime, self._context)
        return {"ranks": [own, *models.ranks.ask(self._context.tell.signed(RankStats()))]}

    def _completion(self, more: dict[str, Any]) -> Completion:
        """Return a Completion with the output so far. more: additional stats"""
        stats = self._own_stats() | more
        text = self._text
        return Completion(self._tokens, text.text, self.reason, stats, self._logprobs, text.stop)

    def _own_stats(self) -> dict[str, Any]:
        models, sequence = self._context.models, self._context.sequence
        runtime = models.runtime
        return {
            "method": models.method.method,
            "model": self._name,
            "device": str(runtime.memory.device),
            "threads": torch.get_num_threads(),
            "dtype": str(runtime.plan.kv.shape.dtype).removeprefix("torch."),
            "seed": self.seed,
            "new_tokens": len(self._tokens),
            "token_ids": self._tokens,
            "text": self._text.text,
            "prompt_tokens": len(self._valid.tokens),
            "reused_tokens": self._prompt.reused if self._prompt else 0,
            "finish_reason": self.reason,
            **request_stats(
                runtime,
                sequence.kv,
                sequence.counters - self._before,
                self._clock,
                self._tallies.target,
                len(self._tokens),
            ),
            **drafting_stats(models, self._tallies, self._retrieval),
            "bits_per_number": bits_per_number(models),
        }
