"""The engine: a model that is loaded once and serves any number of requests, one after another."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from offload.errors import UsageError
from offload.files import check_writable
from offload.placement import Placement
from offload.runtime import Runtime, Session
from offload.units import parse_bandwidth, parse_bytes
from triforce_core.decoding.autoregressive import Decoder
from triforce_core.decoding.drafting import Drafting
from triforce_core.loading import Progress, choose_dtype, load, open_device
from triforce_core.model.checkpoint import Checkpoint, open_checkpoint, resolve
from triforce_core.model.llama import Model
from triforce_core.model.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from triforce_core.params import SamplingParams
from triforce_core.planner.plan import Plan
from triforce_core.settings import AUTO, MachineSettings, MethodSettings
from triforce_core.sizing.demand import PREFILL_CHUNK
from triforce_core.stats import Clock, drafting_stats, request_stats
from triforce_core.stream import Completion, Piece, Stream, pieces_of, until_stop
from triforce_core.text import TextStream


class Engine:
    """Generates from one model. Made by `from_pretrained`; closed by `close` or `with`."""

    def __init__(
        self,
        name: str,
        model: Model,
        runtime: Runtime,
        drafting: Drafting,
        tokenizer: Tokenizer | None,
        load_seconds: float,
        progress: Progress,
        resources: ExitStack,
        trace: Path | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = model.config
        self._name = name
        self._model = model
        self._runtime = runtime
        self._drafting = drafting
        self._load_seconds = load_seconds
        self._progress = progress
        self._resources = resources
        self._trace = trace
        self._interrupted = threading.Event()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._streaming = False
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        device_memory: str | int | None = None,
        link_bandwidth: str | float | None = None,
        dtype: str = "auto",
        method: str = "triforce",
        draft: str | Path = AUTO,
        draft_tokens: int | str = AUTO,
        inner_draft_tokens: int | str = AUTO,
        budget: int | None = None,
        chunk_size: int = 8,
        retrieval: str = "mass",
        accept: str = "optimal",
        max_context: int | None = None,
        block_tokens: int | None = None,
        placement: Placement | None = None,
        plan: Plan | None = None,
        pin: bool = True,
        cuda_graphs: bool = True,
        trace: str | Path | None = None,
        tokenizer: Tokenizer | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Loads a model.

        model: a directory with safetensors, a .gguf file or a hub id
        device: "cuda:0" or "cpu"; the first GPU if there is one
        device_memory: budget, e.g. "22GiB" or bytes; all that is free if None
        link_bandwidth: of the emulated link (CPU only), e.g. "25GB/s" or bytes per second
        dtype: "auto", "float32", "bfloat16" or "float16"
        method: "triforce", "speculative" (the drafter straight to the target) or "autoregressive"
        draft: "auto" (n-grams), "ngram", "none", or a small model with the same vocabulary
        draft_tokens, inner_draft_tokens: drafted for the target and for the retrieval model; "auto"
            chooses while running
        budget: tokens of the retrieval cache; 4096 if None, or less where those do not fit
        chunk_size: tokens that are retrieved together, a power of two
        retrieval: "mass" or "mean"
        accept: "optimal", or "coupled" for a seed's text that depends on nothing but the seed
        max_context: prompt and new tokens that will be needed at most; the model's positions if
            None. What a longer context would take is used to keep weights and KV on the device
        block_tokens: tokens of a KV block, a power of two; chosen from the sizes if None
        placement: what is resident and what streams; weights first, then KV blocks, if None
        plan: takes the place of method, draft, draft_tokens, inner_draft_tokens, budget,
            block_tokens and placement
        pin: whether host memory that streams is registered with the CUDA driver, for direct copies
        cuda_graphs: whether forwards that draft are recorded as CUDA graphs
        trace: a file for a timeline of each request, written when it ends, over the one before
        tokenizer: one that is loaded already; the stats count its loading too
        progress: called with ("load" or "prefill", layers done, layers in all)

        Raises UsageError, DoesNotFitError (before loading) or CheckpointError.
        """
        began = time.perf_counter()
        settings = MethodSettings(
            method, draft, draft_tokens, inner_draft_tokens, budget, chunk_size, retrieval, accept
        )
        if plan is not None:
            plan.check_runs()
            settings, block_tokens = plan.settings(settings), plan.block_tokens
            placement = plan.placement
        for name, value in (("max_context", max_context), ("block_tokens", block_tokens)):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be a positive whole number, got {value!r}")
        if block_tokens is not None and block_tokens & (block_tokens - 1):
            raise UsageError(f"block_tokens must be a power of two, got {block_tokens}")
        if trace is not None:
            check_writable(Path(trace))
        machine = machine_settings(
            device,
            device_memory,
            link_bandwidth,
            pin=pin,
            graphs=cuda_graphs,
            trace=trace is not None,
        )
        progress = progress or (lambda *_: None)
        with ExitStack() as files:
            checkpoint = open_checkpoint(resolve(model))
            files.callback(checkpoint.close)
            config = checkpoint.config
            chosen = choose_dtype(dtype, checkpoint.stored_dtype, machine.device)
            context = config.positions if max_context is None else max_context
            if context > config.positions:
                raise UsageError(
                    f"max_context {context} is more than the {config.positions} positions "
                    "the model has"
                )
            if tokenizer is None:
                tokenizer = load_tokenizer(checkpoint.path)
            else:
                began -= tokenizer.load_seconds
            drafter = None
            if settings.drafts and settings.draft_model is not None:
                drafter = open_checkpoint(resolve(settings.draft_model))
                files.callback(drafter.close)
                check_drafter(checkpoint, tokenizer, drafter)
            built, runtime, drafting, resources = load(
                checkpoint,
                machine,
                chosen,
                context,
                settings,
                drafter,
                block_tokens,
                placement,
                progress,
            )
        seconds = time.perf_counter() - began
        return cls(
            str(model),
            built,
            runtime,
            drafting,
            tokenizer,
            seconds,
            progress,
            resources,
            None if trace is None else Path(trace),
        )

    @property
    def plan(self) -> Plan:
        """What lives where, and how long drafts are."""
        runtime, drafting = self._runtime, self._drafting
        return Plan.of(drafting.settings, runtime.demand, runtime.placement, drafting.budget)

    @property
    def plan_line(self) -> str:
        """The plan on one line."""
        demand = self._runtime.demand
        return self.plan.line(demand.layers, demand.kv_blocks)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Completion:
        """Runs a request to its end. Raises UsageError, DoesNotFitError or LinkError."""
        stream = self.stream(prompt, params)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Runs a request as its text is asked for: iterate, then read `result`.

        Raises UsageError at once if the prompt cannot be taken.
        """
        self._check_free()
        self._interrupted.clear()
        params = params or SamplingParams()
        token_ids = self._token_ids(prompt)
        limit = self._runtime.demand.context_tokens
        check_context(
            len(token_ids),
            params.max_new_tokens,
            limit,
            "the model has" if limit == self.config.positions else "the engine was made for",
        )
        stream = Stream(self._run(token_ids, params))
        self._streams.add(stream)
        return stream

    def interrupt(self) -> None:
        """Ends the request under way within one pass; what it gave so far is its result."""
        self._interrupted.set()

    def close(self) -> None:
        """Ends the request under way and releases everything. May be called twice."""
        if self._closed:
            return
        for stream in tuple(self._streams):
            stream.close()
        self._closed = True
        del self._model  # holds device memory that is about to be given back
        self._resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_free(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")
        if self._streaming:
            raise UsageError("the engine serves one request at a time, and one is under way")

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("the model has no tokenizer; give the prompt as token ids")
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = list(prompt)
        for token in token_ids:
            if not isinstance(token, int) or not 0 <= token < self.config.vocab:
                raise UsageError(
                    f"token id {token!r} is not a number from 0 to {self.config.vocab - 1}"
                )
        if not token_ids:
            raise UsageError("the prompt is empty")
        return token_ids

    def _run(self, prompt: list[int], params: SamplingParams) -> Iterator[Piece | Completion]:
        """Yields text as each pass lands, then the Completion."""
        self._check_free()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stops = frozenset(self.config.eos_token_ids + params.stop_token_ids)
        self._streaming = True
        try:
            with (
                self._runtime.memory.typed_errors(),
                self._drafting.request(
                    self._model, self._runtime, params, seed, stops, len(prompt)
                ) as (session, decoder),
            ):
                yield from self._decode(prompt, params, seed, stops, session, decoder)
        finally:
            self._streaming = False

    def _decode(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        stops: frozenset[int],
        session: Session,
        decoder: Decoder,
    ) -> Iterator[Piece | Completion]:
        link = self._runtime.link
        clock = Clock(load=self._load_seconds)
        began, before = time.perf_counter(), link.counters()
        text = TextStream(self.tokenizer)
        tokens: list[int] = []
        reason = ""
        if self._trace:
            self._runtime.trace.clear()
        try:
            decoder.prefill(prompt, PREFILL_CHUNK, self._after_prefill_layer)
            link.synchronize()
        except _Interrupted:
            reason = "interrupted"
        while not reason:
            step = decoder.step(params.max_new_tokens - len(tokens))
            if not tokens:
                clock.prefill, clock.prefill_link = (
                    time.perf_counter() - began,
                    link.counters() - before,
                )
                began, before = time.perf_counter(), link.counters()
            taken, ended = until_stop(step.tokens, stops)
            tokens += taken
            if ended:
                reason = "stop"
            elif len(tokens) >= params.max_new_tokens:
                reason = "length"
            elif self._interrupted.is_set():
                reason = "interrupted"
            yield from pieces_of(text, taken, step)
        if tokens:
            clock.decode, clock.decode_link = (
                time.perf_counter() - began,
                link.counters() - before,
            )
        if piece := text.finish():
            yield Piece(piece, "plain")
        stats = {
            "method": self._drafting.settings.method,
            "model": self._name,
            "device": str(self._runtime.memory.device),
            "dtype": str(self._runtime.demand.kv.dtype).removeprefix("torch."),
            "seed": seed,
            "prompt_tokens": len(prompt),
            "new_tokens": len(tokens),
            "token_ids": tokens,
            "text": text.text,
            "finish_reason": reason,
            **request_stats(self._runtime, session, clock, len(tokens)),
            **drafting_stats(self._drafting, decoder),
        }
        stats["seconds"] |= {
            "draft": decoder.tally.draft_seconds,
            "verify": decoder.tally.verify_seconds,
        }
        yield Completion(tokens, text.text, reason, stats)
        if self._trace:  # last: a trace that cannot be written loses nothing else
            about = {name: stats[name] for name in _TRACED_STATS}
            self._runtime.trace.write(self._trace, about)

    def _after_prefill_layer(self, layer: int) -> None:
        self._progress("prefill", layer + 1, self.config.layers)
        if self._interrupted.is_set():
            raise _Interrupted


def machine_settings(
    device: str | torch.device | None,
    device_memory: str | int | None,
    link_bandwidth: str | float | None,
    **switches: bool,
) -> MachineSettings:
    """As a user says it: "cuda:0", "22GiB", "25GB/s". Raises UsageError."""
    return MachineSettings(
        open_device(device),
        None if device_memory is None else parse_bytes(device_memory),
        None if link_bandwidth is None else parse_bandwidth(link_bandwidth),
        **switches,
    )


def check_drafter(checkpoint: Checkpoint, tokenizer: Tokenizer | None, drafter: Checkpoint) -> None:
    """Raises UsageError if a drafter's tokens are not the model's."""
    check_same_vocabulary(
        str(drafter.path),
        load_tokenizer(drafter.path),
        drafter.config.vocab,
        tokenizer,
        checkpoint.config.vocab,
    )


_TRACED_STATS = ("method", "model", "device", "dtype", "prompt_tokens", "new_tokens", "link")


class _Interrupted(Exception):
    """Ends prefill between two layers."""


def check_context(prompt_tokens: int, new_tokens: int, limit: int, whose: str) -> None:
    """Raises UsageError if a prompt and its new tokens exceed `limit` positions."""
    if prompt_tokens + new_tokens > limit:
        raise UsageError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the {limit} "
            f"positions {whose}"
        )
