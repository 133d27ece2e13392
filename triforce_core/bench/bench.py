"""`triforce bench`: how long the parts of a request take, for any shape, with random weights.

Each figure is a median of repeated runs, beside the least that the hardware allows (its floor) at
rates measured in the same process: of the link, of copies on the device, of matrix products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from offload.kv.scores import ChunkScores
from offload.runtime import Runtime, Session
from offload.units import format_bytes
from triforce_core.decoding.acceptance import make_rule
from triforce_core.decoding.autoregressive import Autoregressive
from triforce_core.decoding.hierarchy import Target
from triforce_core.decoding.levels import Text
from triforce_core.decoding.resident import USES_BEFORE
from triforce_core.decoding.retrieval import POLICIES
from triforce_core.loading import choose_dtype, load
from triforce_core.model.config import ModelConfig
from triforce_core.model.random_checkpoint import RandomCheckpoint
from triforce_core.params import SamplingParams
from triforce_core.planner.costs import prefill_flops
from triforce_core.settings import MachineSettings, MethodSettings
from triforce_core.sizing.demand import PREFILL_CHUNK

TESTS = ("link", "pass", "retrieval", "drafter", "prefill", "decode")
_PARAMS = SamplingParams(max_new_tokens=1, temperature=0.6, top_p=0.9)
_LINK_BYTES = 512 << 20
_LONG_SECONDS = 20.0
"""Prompts and tokens after them that take longer are not repeated as often as asked."""


@dataclass(frozen=True)
class BenchSettings:
    """context: tokens in the KV cache before what is timed. draft_tokens: verified by a pass.

    new_tokens: decoded one by one after the prompt that `prefill` and `decode` read
    """

    shape: str
    context: int
    draft_shape: str = "llama-68m"
    tests: tuple[str, ...] = TESTS
    repeats: int = 5
    draft_tokens: int = 24
    budget: int | None = None
    new_tokens: int = 16


@dataclass(frozen=True)
class Row:
    """One figure. amount / seconds is its rate; floor_seconds: the least its hardware allows."""

    test: str
    what: str
    seconds: tuple[float, ...]
    amount: float
    unit: str
    floor_seconds: float | None = None
    floor: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "test": self.test,
            "what": self.what,
            "median_seconds": self.median,
            "rate": self.amount / self.median,
            "rate_unit": self.unit,
            "floor": self.floor or None,
            "floor_seconds": self.floor_seconds,
            "ratio_to_floor": self.floor_seconds and self.median / self.floor_seconds,
            "seconds": list(self.seconds),
        }


class Bench:
    """A model of random weights, loaded as any other, and the tests over it."""

    def __init__(
        self,
        settings: BenchSettings,
        config: ModelConfig,
        draft_config: ModelConfig | None,
        machine: MachineSettings,
        dtype: str,
        resources: ExitStack,
    ) -> None:
        """draft_config: of the drafter, None for none. Raises DoesNotFitError or UsageError."""
        self.settings = settings
        self.config = config
        self.dtype = choose_dtype(dtype, "float16", machine.device)
        self._device = machine.device
        method = MethodSettings(
            draft="random" if draft_config else "none",
            draft_tokens=max(settings.draft_tokens, settings.new_tokens),
            budget=settings.budget,
        )
        # The drafter speaks the model's tokens, whatever its own shape says.
        drafter = draft_config and RandomCheckpoint(replace(draft_config, vocab=config.vocab))
        # A run over the random context keeps a token; twice, for warming up and for both lengths.
        self._room = 4 * (settings.repeats + 2) + settings.new_tokens
        self._model, self.runtime, self._drafting, opened = load(
            RandomCheckpoint(config),
            machine,
            self.dtype,
            settings.context + self._room,
            method,
            drafter,
            None,
            None,
            lambda *_: None,
        )
        resources.enter_context(opened)

    def rows(self) -> Iterator[Row]:
        """Runs the tests, one after another. Tests that this model has no level for give no row."""
        tests = self.settings.tests
        with torch.inference_mode():
            if "link" in tests:
                yield from self._link()
            if set(tests) - {"link"}:
                yield from self._host()
            if {"pass", "retrieval", "drafter"} & set(tests):
                if "retrieval" in tests:
                    _ = self.device_copy_bytes_per_second  # now: a context leaves no room for it
                yield from self._over_random_context()
            if {"prefill", "decode"} & set(tests):
                yield from self._from_a_prompt()

    @cached_property
    def device_copy_bytes_per_second(self) -> float:
        """Of a large copy within the device, bytes read and bytes written together."""
        size = (1 << 30) if self._device.type == "cuda" else (64 << 20)
        size = min(size, self.runtime.memory.available_bytes // 4)
        source, target = (
            torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        return 2 * size * _AT_ONCE / min(self._times(_repeated(lambda: target.copy_(source)), 5))

    @cached_property
    def matmul_flops_per_second(self) -> float:
        """Of one large square product in the model's dtype."""
        n = 8192 if self._device.type == "cuda" else 1024
        a, b = (torch.randn(n, n, device=self._device, dtype=self.dtype) for _ in range(2))
        return 2 * n**3 * _AT_ONCE / min(self._times(_repeated(lambda: a @ b), 5))

    def _link(self) -> Iterator[Row]:
        runtime = self.runtime
        link, size = runtime.link, runtime.link.copy_bytes
        count = max(2, min(_LINK_BYTES, runtime.memory.available_bytes // 2) // size)
        slots = torch.empty(2 * size, dtype=torch.uint8, device=self._device).split(size)
        with runtime.host.arena(2 * size, pin=True) as arena:
            hosts = arena.bytes.split(size)

            def carry(inwards: bool) -> None:
                released = [link.record(), link.record()]
                for i in range(count):
                    slot, host = slots[i % 2], hosts[i % 2]
                    pair = (slot, host) if inwards else (host, slot)
                    copy = link.to_device if inwards else link.to_host
                    released[i % 2] = copy(*pair, (released[i % 2],))
                link.wait_on_host(released[(count - 1) % 2])

            for inwards, name in ((True, "host to device"), (False, "device to host")):
                seconds = self._times(lambda inwards=inwards: carry(inwards))
                what = f"{name}, copies of {format_bytes(size)}"
                yield Row("link", what, seconds, count * size / 1e9, "GB/s")

    def _host(self) -> Iterator[Row]:
        """Host memory of a whole context, which requests then take from."""
        runtime, blocks = self.runtime, self.runtime.host_blocks
        demand = runtime.demand
        streamed = demand.kv_blocks - min(runtime.placement.resident_kv_blocks, demand.kv_blocks)
        if not streamed:
            return
        began = time.perf_counter()
        blocks.reserve(streamed)
        taken = [blocks.take() for _ in range(streamed)]
        seconds = (time.perf_counter() - began,)
        for block in taken:
            blocks.give_back(block)
        what = f"{format_bytes(blocks.nbytes)} for KV made ready"
        yield Row("host", what, seconds, blocks.nbytes / 1e9, "GB/s")

    def _over_random_context(self) -> Iterator[Row]:
        settings, runtime = self.settings, self.runtime
        tests, context = settings.tests, settings.context
        whole = context + self._room
        with ExitStack() as stack:
            scores = None
            if self._drafting.budget:
                score = POLICIES[self._drafting.settings.retrieval]
                scores = ChunkScores(
                    runtime.demand.kv,
                    self._drafting.settings.chunk_size,
                    whole,
                    score,
                    runtime.memory,
                )
                stack.callback(scores.close)
            session = stack.enter_context(runtime.session(context, self._room, scores))
            fill_randomly(session, runtime, context)
            target = Target(self._model, session, _PARAMS, self._device)
            target.laws(self._tokens(1))
            target.keep(1)
            if "pass" in tests:
                for tokens in (1, settings.draft_tokens + 1):
                    yield self._pass(session, target, tokens)
            if "retrieval" in tests and scores:
                yield self._retrieval(session, scores, stack)
            if "drafter" in tests and self._drafting.settings.draft_model:
                yield self._drafter(stack)

    def _pass(self, session: Session, target: Target, tokens: int) -> Row:
        """From the end of one pass to the end of the next, whose copies begin in between."""
        feed = self._tokens(tokens)

        def verify() -> None:
            target.laws(feed)
            target.keep(1)
            session.begin_pass()

        before, passes = session.pass_bytes, session.passes
        seconds = self._times(verify)
        moved = (session.pass_bytes - before) / (session.passes - passes)
        bandwidth = self.runtime.link.bandwidth
        what = f"{tokens} token{'s' if tokens > 1 else ''} after {self.settings.context}"
        if not moved or bandwidth is None:
            return Row("pass", what, seconds, tokens, "tokens/s")
        return Row(
            "pass", what, seconds, moved / 1e9, "GB/s", moved / bandwidth, "bytes over the link"
        )

    def _retrieval(self, session: Session, scores: ChunkScores, stack: ExitStack) -> Row:
        context = session.kv.length + self._room
        level, cache = self._drafting.retrieval_model(
            self._model, self.runtime, session, scores, _PARAMS, context, stack
        )
        cache.refresh(1)
        feed = self._tokens(1)

        def step() -> None:
            level.laws(feed)

        seconds = self._times(step, 4 * self.settings.repeats, before=USES_BEFORE + 1)
        demand = self.runtime.demand
        read = demand.layers * demand.layer_bytes + demand.head_bytes
        read += demand.kv.token_bytes * demand.layers * cache.kv.end
        floor = read / self.device_copy_bytes_per_second
        what = f"one token over {cache.kv.end}"
        name = "weights and cache at the rate of a copy on the device"
        return Row("retrieval", what, seconds, 1, "tokens/s", floor, name)

    def _drafter(self, stack: ExitStack) -> Row:
        rule = make_rule("optimal", 0, self._device)
        drafter = self._drafting.drafter(self._model, self.runtime, _PARAMS, rule, stack)
        text = Text(torch.arange(300).remainder(self.config.vocab).tolist())
        count = 8

        def draft() -> None:
            drafter.propose(text, count)

        times = self._times(draft, 4 * self.settings.repeats, before=USES_BEFORE + 1)
        seconds = tuple(time / count for time in times)
        return Row("drafter", f"one of {count} tokens", seconds, 1, "tokens/s")

    def _from_a_prompt(self) -> Iterator[Row]:
        settings, runtime = self.settings, self.runtime
        context = settings.context
        prompt = self._tokens(context).tolist()
        prefills: list[float] = []
        decodes: list[float] = []
        for _ in range(settings.repeats):
            with runtime.session(context, settings.new_tokens + 1) as session:
                rule = make_rule("optimal", 0, self._device)
                decoder = Autoregressive(self._model, session, _PARAMS, rule)
                began = time.perf_counter()
                decoder.prefill(prompt, PREFILL_CHUNK, lambda _: None)
                runtime.link.synchronize()
                self._settle()
                prefills.append(time.perf_counter() - began)
                decoder.step(settings.new_tokens + 1)
                for remaining in range(settings.new_tokens, 0, -1):
                    began = time.perf_counter()
                    decoder.step(remaining)
                    decodes.append(time.perf_counter() - began)
                    if sum(decodes) > _LONG_SECONDS:
                        break
            if sum(prefills) + sum(decodes) > _LONG_SECONDS:
                break
        if "prefill" in settings.tests:
            flops = prefill_flops(self.config, context)
            floor = flops / self.matmul_flops_per_second
            what = f"{context} tokens"
            name = f"{flops:.2e} FLOP at the rate of one large matrix product"
            yield Row("prefill", what, tuple(prefills), context, "tokens/s", floor, name)
        if "decode" in settings.tests:
            what = f"one token a pass, after {context}"
            yield Row("decode", what, tuple(decodes), 1, "tokens/s")

    def _tokens(self, count: int) -> torch.Tensor:
        ids = torch.arange(count, device=self._device) * 7919
        return ids.remainder(self.config.vocab)

    def _times(
        self, run: Callable[[], Any], repeats: int | None = None, *, before: int = 1
    ) -> tuple[float, ...]:
        """Seconds of each of `repeats` runs, after some that warm up."""
        seconds = []
        for _ in range(before + (repeats or self.settings.repeats)):
            began = time.perf_counter()
            run()
            self._settle()
            seconds.append(time.perf_counter() - began)
        return tuple(seconds[before:])

    def _settle(self) -> None:
        """Waits for what was launched, not for copies that run ahead of it."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _repeated(run: Callable[[], Any]) -> Callable[[], None]:
    """Several times, so that launching and waiting weigh little."""

    def repeated() -> None:
        for _ in range(_AT_ONCE):
            run()

    return repeated


_AT_ONCE = 8


def fill_randomly(session: Session, runtime: Runtime, tokens: int) -> None:
    """Fills a session with `tokens` tokens of random keys and values, where a prompt would go."""
    shape = runtime.demand.kv
    size = (2, shape.kv_heads, tokens, shape.head_dim)
    kv = torch.empty(size, dtype=shape.dtype, device=runtime.memory.device)
    for layer in range(shape.layers):
        if layer < 2:
            kv.normal_()
        session.kv.fill(layer, kv)
    session.kv.commit_fill(tokens)
    runtime.link.synchronize()
