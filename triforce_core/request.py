"""A request: parameters, a rule with its coins and a clock, over a context."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from triforce_core.decoding.acceptance import make_rule
from triforce_core.decoding.autoregressive import Decoder, Step
from triforce_core.decoding.context import Context, Interrupted, Prompt
from triforce_core.decoding.drafting import Drafting
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
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def run(
        self,
        prompt: list[int],
        text: TextStream,
        each_layer: Callable[[int], None],
        interrupted: threading.Event,
        *,
        reuse: bool,
    ) -> Iterator[Piece | Completion]:
        """Yields text as each pass lands, then the Completion.

        each_layer: called while the prompt is read, with each layer's index. interrupted: ends the
        request within a layer of that, or a pass. reuse: see `Context.read`
        """
        self._context.tells_logits = self._params.tells_logprobs
        read, reason = self._read(prompt, each_layer, interrupted, reuse)
        passes = self._context.passes
        before, retrieval = passes.counters, self._context.retrieval
        untold: list[TokenLogprob] = []
        while not reason:
            step = self._step(read)
            if not self._tokens:
                self._clock.end_prefill()
            taken, ended = until_stop(step.tokens, self._stops)
            if self._guide and (count := self._guide.ended_by(taken)) is not None:
                taken, ended = taken[:count], True
            logprobs = self._logprobs_of(taken)
            used = yield from pieces_of(text, taken, step, logprobs, untold)
            self._tokens += taken[:used]
            self._logprobs += logprobs[:used]
            if ended or text.stopped:
                reason = "stop"
            elif len(self._tokens) >= self._params.max_new_tokens:
                reason = "length"
            if not reason and interrupted.is_set():
                reason = "interrupted"
            if not reason:
                self._drop_what_never_pays()
        if self._tokens:
            self._clock.end_decode()
        with self._on_device():
            self._context.end()
        if piece := text.finish():
            yield Piece(piece, "plain", tuple(untold))
        elif text.stopped and untold:
            # Those of the stop, whose text is not given.
            del self._logprobs[-len(untold) :]
        about = {
            "prompt_tokens": len(prompt),
            "reused_tokens": read.reused if read else 0,
            "finish_reason": reason,
        }
        stats = {
            **self._stats(text, about),
            **request_stats(
                self._models.runtime,
                passes,
                passes.counters - before,
                self._clock,
                self._tallies.target,
                len(self._tokens),
            ),
            **drafting_stats(self._models, self._tallies, retrieval),
            "bits_per_number": bits_per_number(self._models),
        }
        ranks = self._models.ranks
        if ranks.count > 1:
            own = rank_stats(self._models.runtime, self._context)
            stats["ranks"] = [own, *ranks.ask("rank_stats")]
        yield Completion(self._tokens, text.text, reason, stats, self._logprobs)

    def _read(
        self,
        prompt: list[int],
        each_layer: Callable[[int], None],
        interrupted: threading.Event,
        reuse: bool,
    ) -> tuple[Prompt | None, str]:
        """The prompt, read, and why the request ends already, if it does."""

        def after(layer: int) -> None:
            each_layer(layer)
            if interrupted.is_set():
                raise Interrupted

        try:
            read = self._with_less(lambda: self._read_whole(prompt, after, reuse), 0, lambda: None)
            self._decoder.start(read)
        except Interrupted:
            self._clock.end_prefill()
            return None, "interrupted"
        return read, ""

    def _read_whole(self, prompt: list[int], after: Callable[[int], None], reuse: bool) -> Prompt:
        context = self._context
        read = context.read(prompt, self._params.max_new_tokens, after, reuse=reuse)
        context.text.guide = self._guide
        self._models.runtime.link.synchronize()
        return read

    def _step(self, read: Prompt) -> Step:
        """The next tokens."""

        def dropped() -> None:
            if not self._tokens:
                # The first is drawn from the prompt's logits.
                self._decoder.start(read)

        left = self._params.max_new_tokens - len(self._tokens)
        return self._with_less(lambda: self._decoder.step(left), None, dropped)

    def _with_less(
        self, run: Callable[[], _Given], kept: int | None, dropped: Callable[[], None]
    ) -> _Given:
        """See `shrinking`. kept: None for all tokens whose KV is there."""

        def remade() -> None:
            # The old decoder holds on to what was dropped.
            self._decoder = self._make_decoder()
            dropped()

        with self._on_device():
            if self._models.ranks.count > 1:
                # The others are in the middle of what this one would leave.
                return run()
            kept = self._context.passes.length if kept is None else kept
            return shrinking(self._context, self._drafting, run, kept, remade)

    @torch.inference_mode()
    def _logprobs_of(self, tokens: list[int]) -> list[TokenLogprob]:
        """Of a step's tokens, by the logits that they were drawn from; none if nobody asked."""
        if not self._params.tells_logprobs:
            return []
        logs = self._context.logits[: len(tokens)].float().log_softmax(-1)
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

    def _drop_what_never_pays(self) -> None:
        with self._on_device():
            if self._drafting.drop_lost(self._context):
                # The old decoder holds on to what was dropped.
                self._decoder = self._make_decoder()
                self._context.lend()

    def _stats(self, text: TextStream, about: dict[str, Any]) -> dict[str, Any]:
        runtime = self._models.runtime
        return {
            "method": self._models.method.method,
            "model": self._name,
            "device": str(runtime.memory.device),
            "threads": torch.get_num_threads(),
            "dtype": str(runtime.demand.kv.dtype).removeprefix("torch."),
            "seed": self.seed,
            "new_tokens": len(self._tokens),
            "token_ids": self._tokens,
            "text": text.text,
            **about,
        }

    def _on_device(self) -> AbstractContextManager:
        return self._models.runtime.memory.current()
