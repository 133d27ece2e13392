"""The engine: a model that is loaded once and serves requests, one at a time or several at once."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.memory_fallback import MemoryFallback
from triforce_core.decoding.contexts.snapshot import Snapshot
from triforce_core.decoding.drafting import Drafting
from triforce_core.loading.load import Progress
from triforce_core.loading.open_model import OpenModel
from triforce_core.loading.start import Loaded, settled, start
from triforce_core.model.tokenizing.tokenizer import Tokenizer, token_ids_of
from triforce_core.model.transformer import Model
from triforce_core.params import SamplingParams, without_fields
from triforce_core.plan.plan import Plan
from triforce_core.requests.batch import Batch, Member, Receiver
from triforce_core.requests.one_thread import one_thread_at_a_time
from triforce_core.requests.pool import Contexts
from triforce_core.requests.request import Request, ValidRequest, all_validated, validated
from triforce_core.requests.run_all import all_of
from triforce_core.requests.stream import Completion, Piece, Stream
from triforce_core.requests.timeline import traced
from triforce_core.saved import LoadedContext, reading, write
from triforce_core.settings import EngineConfig
from triforce_offload.errors import UsageError
from triforce_offload.link.link import Link
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.runtime import Runtime


@one_thread_at_a_time("_add", "_add_alone", "forget", "save_context", "copy_context", "restore")
class Engine:
    """An engine for one model. Create it with `from_pretrained`; close it with `close` or `with`.

    A context outlives its request: a prompt reuses the longest prefix that it shares with one, and
    prefills only the rest.

    model, runtime: the full model, and the runtime that has its weights and KV
    models, drafting: all models, and the draft lengths that are learned over all requests
    config: config of the model
    """

    def __init__(self, loaded: Loaded, progress: Progress) -> None:
        """progress: called with "prefill", the layers done and the number of layers"""
        self.tokenizer = loaded.tokenizer
        self.models = loaded.models
        self.drafting = Drafting(loaded.models)
        self.config = loaded.whole
        self.progress = progress
        self._loaded = loaded
        self._contexts = Contexts(self.new_context, self.sequences)
        fallback = MemoryFallback(loaded.models, self.drafting)
        prefills = lambda done, total: self.progress("prefill", done, total)  # noqa: E731
        self._batch = Batch(self.runtime, fallback, prefills, self._freed)
        self.busy = self._batch.busy
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | OpenModel,
        config: EngineConfig | None = None,
        *,
        plan: Plan | str | Path | None = None,
        tokenizer: Tokenizer | None = None,
        progress: Progress | None = None,
        **fields: Any,
    ) -> Engine:
        """Load a model.

        model: a directory with safetensors, a .gguf file, a hub id, or an open model
        plan: a Plan or the path of one; it sets the method, the placement and the block size
        fields: fields of the config and of its parts by name; they override config and plan
        tokenizer: a tokenizer to use instead of the model's own
        progress: called with "load", "copies" or "prefill", layers done, and number of layers

        Raises UsageError, DoesNotFitError (before weights are read, but for memory that others
        take meanwhile), CheckpointError, LinkError, or RankError if another rank fails.
        """
        progress = progress or (lambda *_: None)
        return cls(start(model, settled(config, plan, fields), tokenizer, progress), progress)

    @property
    def model(self) -> Model:
        return self.models.target

    @property
    def runtime(self) -> Runtime:
        return self.models.runtime

    @property
    def memory_plan(self) -> MemoryPlan:
        """Where weights and KV are, and the bytes that they take there."""
        return self.runtime.plan

    @property
    def memory(self) -> DeviceMemory:
        """The device's memory: its budget, its peak and its allocations."""
        return self.runtime.memory

    @property
    def link(self) -> Link:
        """The link between host and device, with its bandwidth and its counters."""
        return self.runtime.link

    @property
    def sequences(self) -> int:
        """Number of requests that can run at once."""
        return self.memory_plan.requirements.sequences

    @property
    def max_context(self) -> int:
        """The most tokens of a sequence, prompt and output together."""
        return self.memory_plan.requirements.context_tokens

    def check_ranks(self) -> None:
        """Raise RankError if another rank was lost, which makes the engine unusable."""
        self.models.ranks.check()

    @property
    def plan(self) -> Plan:
        """The placement, the method and the lengths of drafts."""
        return self._loaded.plan

    @property
    def plan_line(self) -> str:
        """The plan on one line."""
        return self._loaded.plan_line

    @without_fields
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        reuse: bool = True,
    ) -> Completion:
        """Run a request to its end.

        reuse: whether to reuse the KV of a prefix shared with an earlier context. The output
            distribution is the same, but the text for a seed may differ, because drafts may

        Raises UsageError, DoesNotFitError, LinkError or RankError.
        """
        stream = self.stream(prompt, params, reuse=reuse)
        for _ in stream:
            pass
        return stream.result

    @without_fields
    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        reuse: bool = True,
    ) -> Completion:
        """Run a request over messages in the model's chat template.

        messages: messages with a "role" and a "content", or the text of a first user message

        Raises UsageError, also if there is no chat template, DoesNotFitError or LinkError.
        """
        return self.generate(self.chat_tokens(messages), params, reuse=reuse)

    def token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt. Raises UsageError."""
        return token_ids_of(prompt, self.tokenizer, self.config.vocab)

    def chat_tokens(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of messages in the chat template, ready for the model's answer."""
        if self.tokenizer is None:
            raise UsageError("the model has no tokenizer, and so no chat template")
        return self.tokenizer.chat(messages)

    @without_fields
    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        reuse: bool = True,
    ) -> Stream:
        """Return a stream that runs a request while you iterate over its text; then read `result`.

        Raises UsageError immediately if the request is invalid.
        """
        self._check_free()
        interrupted, valid = Event(), validated(self._loaded, prompt, params, reuse)
        stream = Stream(self._pieces(valid, interrupted), interrupted)
        self._streams.add(stream)
        return stream

    @without_fields
    def generate_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        reuse: bool = True,
    ) -> list[Completion]:
        """Run requests to their ends, as many at once as the engine has sequences.

        params: parameters of all requests, or a list with those of each. reuse: see `generate`

        Raises UsageError before any request starts, DoesNotFitError or LinkError.
        """
        each = all_validated(self._loaded, prompts, params, reuse)
        return all_of(self, prompts, each, reuse=reuse)

    @property
    def has_room(self) -> bool:
        """Whether another request can be added to those that are running."""
        return self._contexts.have_room

    @without_fields
    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        receive: Receiver,
        *,
        reuse: bool = True,
        owner: str = "",
    ) -> Member:
        """Add a request to those that are running; `step` runs them.

        receive: called by `step` with each Piece, then with the Completion or the error
        owner: owner of the request, which reuses only contexts of the same owner

        Raises UsageError if the request is invalid or there is no room, or DoesNotFitError.
        """
        if self._closed:
            raise UsageError("the engine is closed")
        valid = validated(self._loaded, prompt, params, reuse)
        return self._add(valid, receive, Event(), owner)

    def step(self, *, in_parts: bool = False) -> bool:
        """Prefill new prompts or a part, and run a pass, see `Batch.step`. Return whether any
        request still runs.
        """
        self._batch.step(in_parts=in_parts)
        return bool(self._batch.members)

    def interrupt(self) -> None:
        """End all requests within one pass. Their results are their output so far."""
        for request in (*self._streams, *self._batch.members):
            request.interrupt()

    def drop(self, member: Member) -> None:
        """Abandon a request immediately. Its receiver gets nothing more."""
        self._batch.drop(member)

    def forget(self) -> None:
        """Close all contexts. Raises UsageError during a request."""
        self._check_free()
        self._contexts.close()

    def save_context(self, path: str | Path, about: Mapping[str, str] | None = None) -> int:
        """Write the latest context to a file, whole or not at all. Return the number of tokens.

        about: texts to save with it. Raises UsageError if there is no context, DoesNotFitError if
            the host lacks memory for the copies, or OutputError.
        """
        with self.runtime.memory.typed_errors(), self.runtime.memory.current():
            saved, digest = self.snapshot(), self._loaded.digest
            return write(path, saved, self.models.whole_kv, digest, about or {})

    def load_context(self, path: str | Path) -> LoadedContext:
        """Load a context that `save_context` wrote. A prompt that begins with its tokens prefills
        only the rest. A damaged file changes nothing.

        Raises UsageError if it is another model's or damaged, DoesNotFitError or LinkError.
        """
        self._check_free()
        shapes = self.models.whole_kv, self.models.whole_recent
        own = (*shapes, self._loaded.digest, self.config.vocab, self.max_context)
        file = reading(path, *own, thorough=self._contexts.hold_tokens)
        with self.runtime.memory.typed_errors(), file as saved:
            self.restore(saved)
            return LoadedContext(len(saved.tokens), saved.about)

    @property
    def context_tokens(self) -> list[int]:
        """Tokens of the latest context whose KV is kept."""
        return self._contexts.latest_tokens

    @property
    def context_owner(self) -> str:
        """Owner of the latest context. See `add_request`."""
        return self._contexts.latest_owner

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the latest context, valid until the next request.

        Raises UsageError without a context, or DoesNotFitError if the host lacks memory.
        """
        self._check_free()
        return self._contexts.snapshot()

    def copy_context(self) -> Snapshot:
        """Return a snapshot of the latest context that is a copy in host memory.

        Raises UsageError without a context, DoesNotFitError if the host lacks memory, or LinkError.
        """
        self._check_free()
        with self.runtime.memory.typed_errors(), self.runtime.memory.current():
            return self._contexts.copied()

    def restore(self, saved: Snapshot, owner: str = "") -> None:
        """Create a context from an owner's snapshot. It becomes the latest context.

        Raises UsageError, DoesNotFitError, LinkError or RankError.
        """
        self._check_free()
        with self.runtime.memory.typed_errors(), self.runtime.memory.current():
            self._contexts.restore(saved, owner)

    def close(self) -> None:
        """End all requests and release everything; a second call does nothing. Raises UsageError
        during a pass: call `interrupt` first.
        """
        if self._closed:
            return
        for stream in tuple(self._streams):
            if stream.running:
                raise UsageError("the engine is in the middle of a pass: interrupt it first")
        with self.busy, ExitStack() as stack:
            stack.enter_context(self.runtime.memory.current())
            # Runs in reverse: streams, then other requests, contexts, and all loaded resources.
            stack.callback(self.models.close)
            stack.callback(self._contexts.close)
            stack.callback(self._batch.close)
            for stream in tuple(self._streams):
                stack.callback(stream.close)
            self._closed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(
        self, valid: ValidRequest, receive: Receiver, interrupted: Event, owner: str
    ) -> Member:
        """Add a valid request. Raises UsageError without room, DoesNotFitError or RankError."""
        if not self.has_room:
            raise UsageError("the engine has as many requests under way as it has sequences")
        memory = self.runtime.memory
        try:
            with memory.typed_errors(), memory.current(), ExitStack() as undo:
                if trace := self._loaded.trace:
                    afresh = not self._batch.members
                    receive = traced(receive, self.models, trace, afresh=afresh)
                context, known = self._contexts.take(valid.tokens, owner)
                undo.callback(self._contexts.give_back, context, sound=False)
                valid = replace(valid, reuse=valid.reuse and known)
                request = Request(valid, context, self.drafting, interrupted, *self._loaded.about)
                undo.pop_all()
        except BaseException:
            self.models.ranks.recover()
            raise
        member = Member(request, context, receive, interrupted)
        self._batch.add(member)
        return member

    def _pieces(self, valid: ValidRequest, interrupted: Event) -> Generator[Piece | Completion]:
        """Run a request on demand. See `Batch.pieces`."""
        return (yield from self._batch.pieces(lambda to: self._add_alone(valid, to, interrupted)))

    def _add_alone(self, valid: ValidRequest, receive: Receiver, interrupted: Event) -> Member:
        self._check_free()
        return self._add(valid, receive, interrupted, "")

    def _freed(self, context: Context, sound: bool) -> None:
        if not sound:
            self.models.ranks.recover()
        self._contexts.give_back(context, sound)

    def _check_free(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")
        if self._batch.members:
            raise UsageError("the engine serves one request at a time, and one is under way")

    def new_context(self) -> Context:
        """Create a context that the caller closes. Raises DoesNotFitError."""
        with self.runtime.memory.typed_errors(), self.runtime.memory.current():
            return Context(self.models)
