"""The engine: a model that is loaded once and serves any number of requests, one after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.errors import UsageError
from offload.memory.device import device_name
from offload.runtime import Runtime
from triforce_core.batch import Batch, Member, Receiver, all_of
from triforce_core.decoding.context import Context
from triforce_core.decoding.drafting import Drafting
from triforce_core.decoding.snapshot import Snapshot
from triforce_core.guiding import Guide, guide_of
from triforce_core.loading import Progress
from triforce_core.model.llama import Model
from triforce_core.model.tokenizer import Tokenizer, token_ids_of
from triforce_core.opening import OpenModel
from triforce_core.params import SamplingParams, check_context, checked
from triforce_core.planner.plan import Plan
from triforce_core.pool import Contexts
from triforce_core.request import Request
from triforce_core.saved import LoadedContext, reading, write
from triforce_core.settings import DENSE, PLANES, EngineConfig
from triforce_core.starting import Loaded, settled, start
from triforce_core.stream import Completion, Piece, Stream
from triforce_core.text import TextStream
from triforce_core.timeline import clear_timeline, traced, write_timeline


class Engine:
    """Generates from one model. Made by `from_pretrained`; closed by `close` or `with`.

    What was computed for a text is kept: a prompt that begins as the text at hand does reads only
    what is new in it.

    model, runtime: the full model, and where its weights and KV live
    models: these and what drafts; drafting: how
    config: of the model
    """

    def __init__(self, loaded: Loaded, progress: Progress) -> None:
        """progress: called with "prefill", layers done and layers in all."""
        self.tokenizer = loaded.tokenizer
        self.models = loaded.models
        self.drafting = Drafting(loaded.models)
        self.config = loaded.whole
        self.progress = progress
        self._loaded = loaded
        self._contexts = Contexts(self._new_context, self.runtime.demand.sequences)
        self._batch = Batch(self.runtime, self._report_layer, self._freed)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._streaming = self._closed = False

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
        """Loads a model.

        model: a directory with safetensors, a .gguf file, a hub id, or one that is open already
        plan: sets method, placement and block size; a Plan, or the path of one that was written
        fields: of EngineConfig, MachineSettings and MethodSettings, by their names; they change
            what the config and the plan say
        tokenizer: one that is loaded already
        progress: called with ("load" or "prefill", layers done, layers in all)

        Raises UsageError, DoesNotFitError (before loading), CheckpointError, or RankError if
        another of several ranks meets an error.
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
    def plan(self) -> Plan:
        """What lives where, and how long drafts are."""
        runtime = self.runtime
        plan = Plan.of(self.models.method, runtime.demand, runtime.placement, self.models.budget)
        kv = PLANES if self.models.runtime.demand.kv.in_planes else DENSE
        plan = replace(plan, weights=self.models.weights, kv=kv, gpus=self.models.ranks.count)
        return plan.named(self._loaded.name, self.config, device_name(runtime.memory.device))

    @property
    def plan_line(self) -> str:
        """What runs, on one line."""
        demand, models = self.runtime.demand, self.models
        line = self.plan.line(demand.layers, demand.kv_blocks)
        if models.method.method == "triforce" and not models.budget:
            line += f"; no retrieval model, since {models.why_no_retrieval}"
        return line + (f"; {demand.sequences} texts at once" if demand.sequences > 1 else "")

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        reuse: bool = True,
    ) -> Completion:
        """Runs a request to its end.

        reuse: whether what was computed for an earlier text is kept as far as the prompt says the
            same. The text's law stays what it is; which text a seed gives may depend on what was
            asked before, since drafts do

        Raises UsageError, DoesNotFitError, LinkError or RankError.
        """
        stream = self.stream(prompt, params, reuse=reuse)
        for _ in stream:
            pass
        return stream.result

    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        reuse: bool = True,
    ) -> Completion:
        """Runs a request over messages put into the model's chat template.

        messages: each with a "role" and its "content", or what the user says first

        Raises UsageError, if there is no template too, DoesNotFitError or LinkError.
        """
        return self.generate(self.chat_tokens(messages), params, reuse=reuse)

    def token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Those of a prompt, as a request takes it. Raises UsageError."""
        return token_ids_of(prompt, self.tokenizer, self.config.vocab)

    def chat_tokens(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of messages in the model's chat template, ready for its answer."""
        if self.tokenizer is None:
            raise UsageError("the model has no tokenizer, and so no chat template")
        return self.tokenizer.chat(messages)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        reuse: bool = True,
    ) -> Stream:
        """Runs a request as its text is asked for: iterate, then read `result`.

        Raises UsageError at once if the prompt cannot be taken.
        """
        self._check_free()
        params, token_ids, guide = self._checked(prompt, params)
        interrupted = threading.Event()
        stream = Stream(self._run(token_ids, params, guide, reuse, interrupted), interrupted)
        self._streams.add(stream)
        return stream

    def generate_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        reuse: bool = True,
    ) -> list[Completion]:
        """Runs requests to their ends, as many at once as the engine has sequences; each pass is
        over all that are under way.

        params: for all, or of each. reuse: as `generate` has it

        Raises UsageError before any begins, DoesNotFitError or LinkError.
        """
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts, and parameters of {len(each)}")
        for prompt, own in zip(prompts, each, strict=True):
            self._checked(prompt, own)
        return all_of(self, prompts, each, reuse=reuse)

    @property
    def has_room(self) -> bool:
        """Whether another request may be added to those under way."""
        return not self._streaming and self._contexts.have_room

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        receive: Receiver,
        *,
        reuse: bool = True,
        owner: str = "",
    ) -> Member:
        """Takes a request in beside those under way; `step` runs them.

        receive: called from there with each Piece, then with the Completion or the error
        owner: whose request it is: it reuses what was computed for the same owner alone

        Raises UsageError if the prompt cannot be taken or there is no room, or DoesNotFitError.
        """
        if self._closed or self._streaming:
            self._check_free()
        if not self.has_room:
            raise UsageError("the engine has as many requests under way as it has sequences")
        params, token_ids, guide = self._checked(prompt, params)
        context, known = self._contexts.take(token_ids, owner)
        request, text = self._request(context, params, guide)
        if trace := self._loaded.trace:
            receive = traced(receive, self.models, trace, afresh=not self._batch.members)
        member = Member(request, context, token_ids, text, receive, reuse and known)
        self._batch.add(member)
        return member

    def step(self) -> bool:
        """Reads prompts that were added, then runs one pass for all requests under way. Says
        whether any still are.
        """
        self._batch.step()
        return bool(self._batch.members)

    def interrupt(self) -> None:
        """Ends what is under way within one pass; what it gave so far is its result."""
        for request in (*self._streams, *self._batch.members):
            request.interrupt()

    def forget(self) -> None:
        """Gives back what was computed for texts. Raises UsageError during a request."""
        self._check_free()
        self._contexts.close()

    def save_context(self, path: str | Path, about: Mapping[str, str] | None = None) -> int:
        """Writes what was computed for the text at hand to a file, whole or not at all: its tokens,
        their KV, what its chunks were worth. Returns how many tokens.

        about: texts that are kept with it. Raises UsageError if there is none, or OutputError.
        """
        shape, digest = self.models.whole_kv, self._loaded.digest
        with self.runtime.memory.typed_errors(), self.runtime.memory.current():
            return write(path, self.snapshot(), shape, digest, about or {})

    def load_context(self, path: str | Path) -> LoadedContext:
        """Takes over a context that `save_context` wrote, in place of the one at hand: a prompt
        that begins with its tokens reads only what is new.

        Raises UsageError if it is another model's, or damaged, DoesNotFitError or LinkError.
        """
        self._check_free()
        most, digest = self.runtime.demand.context_tokens, self._loaded.digest
        own = (self.models.whole_kv, digest, self.config.vocab, most)
        with self.runtime.memory.typed_errors(), reading(path, *own) as saved:
            self.restore(saved)
            return LoadedContext(len(saved.tokens), saved.about)

    @property
    def context_tokens(self) -> list[int]:
        """Those of the text at hand whose KV is kept."""
        context = self._contexts.latest
        return context.text.tokens[: context.passes.length] if context else []

    @property
    def context_owner(self) -> str:
        """Whose these are, see `add_request`."""
        return self._contexts.latest_owner

    def snapshot(self) -> Snapshot:
        """What was computed for the text at hand, to be read before the next request.

        Raises UsageError if there is none.
        """
        self._check_free()
        if self._contexts.latest is None:
            raise UsageError("there is no context to save: nothing was read yet")
        return self._contexts.latest.snapshot()

    def restore(self, saved: Snapshot, owner: str = "") -> None:
        """Takes over what a snapshot of an owner has, in place of the context at hand.

        Raises UsageError, DoesNotFitError, LinkError or RankError.
        """
        self._check_free()
        (context, _), sound = self._contexts.take(saved.tokens, owner), False
        try:
            with self.runtime.memory.typed_errors(), self.runtime.memory.current():
                context.restore(saved)
            sound = True
        finally:
            self._contexts.give_back(context, sound=sound)

    def close(self) -> None:
        """Ends the request under way and releases everything. May be called twice.

        Raises UsageError from within a pass: `interrupt` comes first.
        """
        if self._closed:
            return
        with ExitStack() as stack:
            stack.enter_context(self.runtime.memory.current())
            for stream in tuple(self._streams):
                if stream.running:
                    raise UsageError("the engine is in the middle of a pass: interrupt it first")
            # In reverse: streams, then the context, then everything that loading took.
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

    def _checked(
        self, prompt: str | Sequence[int], params: SamplingParams | None
    ) -> tuple[SamplingParams, list[int], Guide | None]:
        """What a request needs. Raises UsageError if it cannot be taken."""
        params = checked(params, self.config.vocab)
        token_ids = self.token_ids(prompt)
        limit = self.runtime.demand.context_tokens
        whose = "the model has" if limit == self.config.positions else "the engine was made for"
        check_context(len(token_ids), params.max_new_tokens, limit, whose)
        return params, token_ids, guide_of(params, self.tokenizer, self.config)

    def _freed(self, context: Context, sound: bool) -> None:
        if not sound:
            self.models.ranks.recover()
        self._contexts.give_back(context, sound)

    def _check_free(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")
        if self._streaming or self._batch.members:
            raise UsageError("the engine serves one request at a time, and one is under way")

    def _run(
        self,
        tokens: list[int],
        params: SamplingParams,
        guide: Guide | None,
        reuse: bool,
        interrupted: threading.Event,
    ) -> Generator[Piece | Completion]:
        """Yields text as each pass lands, then the Completion."""
        self._check_free()
        self._streaming, sound, context = True, False, None
        try:
            with self.runtime.memory.typed_errors():
                if self._loaded.trace:
                    clear_timeline(self.models)
                context, known = self._contexts.take(tokens)
                request, text = self._request(context, params, guide)
                mine = reuse and known
                request.read(tokens, text, self._report_layer, interrupted, reuse=mine)
                for piece in request.run():
                    sound = isinstance(piece, Completion) and piece.finish_reason != "error"
                    yield piece
                    if self._loaded.trace and sound:
                        write_timeline(self.models, self._loaded.trace, piece.stats)
        except GeneratorExit:
            raise
        except BaseException:
            self.models.ranks.recover()
            raise
        finally:
            self._streaming = False
            if context is not None:
                self._contexts.give_back(context, sound=sound)

    def _new_context(self) -> Context:
        with self.runtime.memory.typed_errors(), self.runtime.memory.current():
            return Context(self.models)

    def _request(
        self, context: Context, params: SamplingParams, guide: Guide | None
    ) -> tuple[Request, TextStream]:
        request = Request(context, self.models, self.drafting, params, *self._loaded.about, guide)
        text = TextStream(self.tokenizer, params.stop, one_by_one=params.tells_logprobs)
        return request, text

    def _report_layer(self, layer: int) -> None:
        self.progress("prefill", layer + 1, self.config.layers)
