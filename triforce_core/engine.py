"""The engine: a model that is loaded once and serves any number of requests, one after another."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.errors import UsageError
from offload.files import Output
from offload.link.trace import write_spans
from offload.memory.device import device_name
from offload.runtime import Runtime
from triforce_core.decoding.context import Context
from triforce_core.decoding.drafting import Drafting
from triforce_core.decoding.models import Models
from triforce_core.decoding.snapshot import Snapshot
from triforce_core.devices import open_device
from triforce_core.guiding import Guide, guide_of
from triforce_core.loading import Progress, load
from triforce_core.model.config import ModelConfig
from triforce_core.model.llama import Model
from triforce_core.model.tokenizer import Tokenizer, token_ids_of
from triforce_core.opening import OpenModel
from triforce_core.parallel.start import start_ranks
from triforce_core.params import SamplingParams, check_context, checked
from triforce_core.planner.plan import Plan
from triforce_core.request import Request
from triforce_core.saved import LoadedContext, digest, read, write
from triforce_core.settings import DENSE, PLANES, EngineConfig
from triforce_core.stream import Completion, Piece, Stream
from triforce_core.text import TextStream


class Engine:
    """Generates from one model. Made by `from_pretrained`; closed by `close` or `with`.

    What was computed for a text is kept: a prompt that begins as the text at hand does reads only
    what is new in it.

    model, runtime: the full model, and where its weights and KV live
    models: these and what drafts; drafting: how
    config: of the model
    """

    def __init__(
        self,
        name: str,
        models: Models,
        tokenizer: Tokenizer | None,
        load_seconds: float,
        progress: Progress,
        trace: Path | None = None,
        config: ModelConfig | None = None,
        fingerprint: str = "",
    ) -> None:
        """progress: called with "prefill", layers done and layers in all. config: of the whole
        model, where `models` has a rank's share of it. fingerprint: tells it from others.
        """
        self.tokenizer = tokenizer
        self.models = models
        self.drafting = Drafting(models)
        self.config = config or models.target.config
        self.progress = progress
        self._name = name
        self._digest = digest(fingerprint)
        self._load_seconds = load_seconds
        self._trace = trace
        self._context: Context | None = None
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
        began = time.perf_counter()
        config = config or EngineConfig()
        if plan is not None:
            if not isinstance(plan, (Plan, str, Path)):
                raise UsageError(f"a plan is a Plan or a path, and this is {type(plan).__name__}")
            plan = plan if isinstance(plan, Plan) else Plan.read(plan)
            config = plan.config(config)
        config = config.changed(**fields)
        if plan is not None:
            plan.check_gpus(config.machine.gpus)
        if config.trace is not None:
            Output(config.trace, "trace").check()
        progress = progress or (lambda *_: None)
        with ExitStack() as files:
            if isinstance(model, OpenModel):
                began -= model.seconds
                model = replace(model, tokenizer=tokenizer or model.tokenizer)
            else:
                model = files.enter_context(OpenModel.at(model, tokenizer))
            positions = model.checkpoint.config.positions
            context = config.max_context or positions
            if context > positions:
                raise UsageError(
                    f"max_context {context} is more than the {positions} positions the model has"
                )
            drafter = None
            if config.method.drafts and config.method.draft_model is not None:
                drafter = files.enter_context(OpenModel.at(config.method.draft_model))
                model.check_drafter(drafter)
            if plan is not None:
                device = device_name(open_device(config.machine.device))
                plan.check(model.name, model.checkpoint.config, device)
            whole, fingerprint = model.checkpoint.config, model.checkpoint.fingerprint
            ranks = start_ranks(model.checkpoint, config, context)
            try:
                drafts = drafter and drafter.checkpoint
                models = load(model.checkpoint, config, context, drafts, progress, ranks)
            except BaseException:
                ranks.abandon()
                raise
            models.resources.callback(ranks.close)
        more = (time.perf_counter() - began, progress, config.trace, whole, fingerprint)
        return cls(model.name, models, model.tokenizer, *more)

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
        return plan.named(self._name, self.config, device_name(runtime.memory.device))

    @property
    def plan_line(self) -> str:
        """What runs, on one line."""
        demand, models = self.runtime.demand, self.models
        line = self.plan.line(demand.layers, demand.kv_blocks)
        if models.method.method == "triforce" and not models.budget:
            why = models.why_no_retrieval
            line += f"; no retrieval model, since {why}"
        return line

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
        params = checked(params, self.config.vocab)
        token_ids = self.token_ids(prompt)
        limit = self.runtime.demand.context_tokens
        check_context(
            len(token_ids),
            params.max_new_tokens,
            limit,
            "the model has" if limit == self.config.positions else "the engine was made for",
        )
        interrupted = threading.Event()
        guide = guide_of(params, self.tokenizer, self.config)
        stream = Stream(self._run(token_ids, params, guide, reuse, interrupted), interrupted)
        self._streams.add(stream)
        return stream

    def interrupt(self) -> None:
        """Ends the request under way within one pass; what it gave so far is its result."""
        for stream in tuple(self._streams):
            stream.interrupt()

    def forget(self) -> None:
        """Gives back what was computed for the text at hand. Raises UsageError during a request."""
        self._check_free()
        self._forget()

    def save_context(self, path: str | Path, about: Mapping[str, str] | None = None) -> int:
        """Writes what was computed for the text at hand to a file, whole or not at all: its tokens,
        their KV, what its chunks were worth. Returns how many tokens.

        about: texts that are kept with it. Raises UsageError if there is none, or OutputError.
        """
        with self.runtime.memory.typed_errors(), self.runtime.memory.current():
            return write(path, self.snapshot(), self.runtime.demand.kv, self._digest, about or {})

    def load_context(self, path: str | Path) -> LoadedContext:
        """Takes over a context that `save_context` wrote, in place of the one at hand: a prompt
        that begins with its tokens reads only what is new.

        Raises UsageError if it is another model's, or damaged, DoesNotFitError or LinkError.
        """
        self._check_free()
        demand = self.runtime.demand
        saved = read(path, demand.kv, self._digest, self.config.vocab, demand.context_tokens)
        self.restore(saved)
        return LoadedContext(len(saved.tokens), saved.about)

    @property
    def context_tokens(self) -> list[int]:
        """Those of the text at hand whose KV is kept."""
        context = self._context
        return context.text.tokens[: context.passes.length] if context else []

    def snapshot(self) -> Snapshot:
        """What was computed for the text at hand, to be read before the next request.

        Raises UsageError if there is none.
        """
        self._check_free()
        if self._context is None:
            raise UsageError("there is no context to save: nothing was read yet")
        return self._context.snapshot()

    def restore(self, saved: Snapshot) -> None:
        """Takes over what a snapshot has, in place of the context at hand.

        Raises UsageError, DoesNotFitError or LinkError.
        """
        self._check_free()
        try:
            with self.runtime.memory.typed_errors(), self.runtime.memory.current():
                self._opened_context().restore(saved)
        except BaseException:
            self._forget()
            raise

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
            stack.callback(self._forget)
            for stream in tuple(self._streams):
                stack.callback(stream.close)
            self._closed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()

    def _check_free(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")
        if self._streaming:
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
        self._streaming, sound = True, False
        try:
            with self.runtime.memory.typed_errors():
                if self._trace:
                    self.models.ranks.tell("clear")
                    self.runtime.trace.clear()
                text = TextStream(self.tokenizer, params.stop, one_by_one=params.tells_logprobs)
                for piece in self._request(params, guide).run(
                    tokens, text, self._report_layer, interrupted, reuse=reuse
                ):
                    sound = isinstance(piece, Completion)
                    yield piece
                    if self._trace and isinstance(piece, Completion):
                        about = {name: piece.stats[name] for name in _TRACED_STATS}
                        self._write_trace(about)
        except GeneratorExit:
            raise
        except BaseException:
            self.models.ranks.recover()
            raise
        finally:
            self._streaming = False
            if not sound:
                self._forget()

    def _write_trace(self, about: dict[str, Any]) -> None:
        asked = time.perf_counter()
        answers = self.models.ranks.ask("spans")
        here = (asked + time.perf_counter()) / 2
        # Machines have clocks of their own; ranks of one machine have one.
        apart = self.models.ranks.here < self.models.ranks.count
        spans = [
            [span.later(here - now if apart else 0.0) for span in spans] for now, spans in answers
        ]
        write_spans([self.runtime.trace.spans(), *spans], self._trace, about)

    def _opened_context(self) -> Context:
        if self._context is None:
            with self.runtime.memory.current():
                self._context = Context(self.models)
        return self._context

    def _request(self, params: SamplingParams, guide: Guide | None) -> Request:
        context, about = self._opened_context(), (self._name, self._load_seconds)
        return Request(context, self.models, self.drafting, params, *about, guide)

    def _report_layer(self, layer: int) -> None:
        self.progress("prefill", layer + 1, self.config.layers)


_TRACED_STATS = ("method", "model", "device", "dtype", "prompt_tokens", "new_tokens", "link")
