"""`triforce bench`: time the parts of a request with random weights of any shape.

Each figure is the median of repeated runs, next to its floor: the least time that the hardware
allows, at rates of the link, of copies on the device and of matrix products measured in the same
process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from triforce_core.bench.rows import Row
from triforce_core.bench.settings import BenchSettings
from triforce_core.decoding.acceptance import make_rule
from triforce_core.decoding.autoregressive import Autoregressive
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.decoder import PassInput, advance
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.drafters.draft_levels import make_drafter
from triforce_core.decoding.recorded import USES_BEFORE
from triforce_core.decoding.retrieval_level import RetrievalVerifier
from triforce_core.loading.load import load
from triforce_core.model.checkpoints.random_checkpoint import RandomCheckpoint
from triforce_core.model.config import ModelConfig
from triforce_core.params import SamplingParams
from triforce_core.plan.simulation.costs.launches import prefill_flops
from triforce_core.settings import NO_DRAFTER, EngineConfig, MethodSettings
from triforce_offload.kv.sequence import SequenceKV
from triforce_offload.units import format_bytes

_PARAMS = SamplingParams(max_new_tokens=1, temperature=0.6, top_p=0.9)
_LINK_BYTES = 512 << 20
# Prefill and decode runs stop repeating once they have taken this long.
_LONG_SECONDS = 20.0
# Copies and products timed together, so that launches and waits weigh little.
_AT_ONCE = 8


class Bench:
    """A model with random weights, loaded like any other, and the tests that time it."""

    def __init__(
        self,
        settings: BenchSettings,
        shape: ModelConfig,
        draft_shape: ModelConfig | None,
        config: EngineConfig,
        resources: ExitStack,
    ) -> None:
        """shape, draft_shape: the shapes of the model and the draft model; None for no draft model
        config: the engine's config, whose method is replaced by the benchmark's own
        Raises DoesNotFitError or UsageError.
        """
        self.settings = settings
        self.shape = shape
        method = MethodSettings(
            draft="random" if draft_shape else NO_DRAFTER,
            draft_tokens=max(settings.draft_tokens, settings.new_tokens),
            budget=settings.budget,
        )
        # The draft model uses the model's vocabulary, whatever its own shape says.
        drafter = draft_shape and RandomCheckpoint(replace(draft_shape, vocab=shape.vocab))
        # Each run over the random context keeps one token. There is room for twice the runs at both
        # pass lengths, warm-up included.
        room = 4 * (settings.repeats + 2) + settings.new_tokens
        self.models = load(
            RandomCheckpoint(shape),
            replace(config, method=method),
            settings.context + room,
            drafter,
            lambda *_: None,
        )
        resources.callback(self.models.close)
        self.runtime = self.models.runtime
        self.dtype = self.runtime.plan.kv.shape.dtype
        self._device = self.runtime.memory.device

    def rows(self) -> Iterator[Row]:
        """Run the tests one after another. Tests of levels that the model lacks give no row."""
        tests = self.settings.tests
        with torch.inference_mode(), self.runtime.memory.current():
            if "link" in tests:
                yield from self._link()
            if set(tests) - {"link"}:
                yield from self._host()
            if {"pass", "retrieval"} & set(tests):
                if "retrieval" in tests:
                    # Measure this now: a context leaves no memory for it.
                    _ = self.device_copy_bytes_per_second
                yield from self._over_random_context()
            if "drafter" in tests and self.models.small:
                yield self._drafter()
            if {"prefill", "decode"} & set(tests):
                yield from self._from_a_prompt()

    @cached_property
    def device_copy_bytes_per_second(self) -> float:
        """The rate of a large copy within the device, counting bytes read and bytes written."""
        size = (1 << 30) if self._device.type == "cuda" else (64 << 20)
        size = min(size, self.runtime.memory.available_bytes // 4)
        source, target = (
            torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        return 2 * size * _AT_ONCE / min(self._times(_repeated(lambda: target.copy_(source)), 5))

    @cached_property
    def matmul_flops_per_second(self) -> float:
        """The rate of one large square product in the model's dtype."""
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
        """Time the reservation of host memory for the streamed KV of a full context."""
        runtime, blocks = self.runtime, self.runtime.host_blocks
        kv = runtime.plan.kv
        streamed = kv.blocks - kv.resident
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
        settings = self.settings
        context = Context(self.models)
        try:
            fill_randomly(context.sequence, settings.context)
            context.run(PassInput(self._tokens(1)))
            context.keep([0])
            if "pass" in settings.tests:
                for tokens in (1, settings.draft_tokens + 1):
                    yield self._pass(context, tokens)
            if "retrieval" in settings.tests and context.levels.retrieval:
                yield self._retrieval(context)
        finally:
            context.close()

    def _pass(self, context: Context, tokens: int) -> Row:
        """Time passes, each from the end of the previous one. Its copies begin in between."""
        rows, sequence = PassInput(self._tokens(tokens)), context.sequence

        def verify() -> None:
            distributions(context.run(rows), _PARAMS)
            context.keep([0])
            self.runtime.passes.begin([sequence])

        before = sequence.counters
        recorded = context.recorded.fits(tokens)
        seconds = self._times(verify, before=USES_BEFORE + 1 if recorded else 1)
        counted = sequence.counters - before
        moved = counted.bytes_to_device / counted.passes
        bandwidth = self.runtime.link.bandwidth
        what = f"{tokens} token{'s' if tokens > 1 else ''} after {self.settings.context}"
        if not moved or bandwidth is None:
            return Row("pass", what, seconds, tokens, "tokens/s")
        return Row(
            "pass", what, seconds, moved / 1e9, "GB/s", moved / bandwidth, "bytes over the link"
        )

    def _retrieval(self, context: Context) -> Row:
        level, cache = RetrievalVerifier(context, _PARAMS), context.levels.retrieval
        context.end()
        cache.refresh(1)
        batch = self._tokens(1)

        def step() -> None:
            level.probs(batch)

        seconds = self._times(step, 4 * self.settings.repeats, before=USES_BEFORE + 1)
        plan, high_bits = self.runtime.plan, self.models.reads_high_bits
        shape, head = plan.kv.shape, plan.requirements.head_bytes
        read = head + sum(layer.draft_bytes(high_bits=high_bits) for layer in plan.layers)
        copies = sum(layer.copy_bytes > 0 for layer in plan.layers)
        high = len(plan.layers) - copies if high_bits else plan.layer_counts["split_layers"]
        kept = shape.token_bytes * shape.layers * cache.kv.end
        read += kept // shape.dtype.itemsize if self.models.rounds_kv else kept
        floor = read / self.device_copy_bytes_per_second
        what = f"one token over {cache.kv.end}"
        if high:
            what += f", {high} layers by their high bits"
        if self.models.rounds_kv:
            what += ", in 8 bits"
        if copies:
            what += f", {copies} layers in {self.models.method.bits_of_copies} bits"
        name = "weights and cache at the rate of a copy on the device"
        return Row("retrieval", what, seconds, 1, "tokens/s", floor, name)

    def _drafter(self) -> Row:
        drafter = make_drafter(self.models, lambda call: None)
        try:
            proposer = drafter.proposer(_PARAMS, make_rule("optimal", 0, self._device))
            text = Text(torch.arange(300).remainder(self.shape.vocab).tolist())
            count = 8

            def draft() -> None:
                proposer.propose(text, count)

            times = self._times(draft, 4 * self.settings.repeats, before=USES_BEFORE + 1)
        finally:
            drafter.close()
        seconds = tuple(time / count for time in times)
        return Row("drafter", f"one of {count} tokens", seconds, 1, "tokens/s")

    def _from_a_prompt(self) -> Iterator[Row]:
        settings = self.settings
        prompt = self._tokens(settings.context).tolist()
        prefills: list[float] = []
        decodes: list[float] = []
        # Plain decoding, without drafting levels.
        plain = replace(self.models, method=MethodSettings("autoregressive"), budget=0)
        context = Context(plain)
        try:
            for _ in range(settings.repeats):
                decoder = Autoregressive(context, _PARAMS, make_rule("optimal", 0, self._device))
                began = time.perf_counter()
                read = context.prefill(prompt, settings.new_tokens + 1, lambda _: None, reuse=False)
                self.runtime.link.synchronize()
                self._settle()
                prefills.append(time.perf_counter() - began)
                decoder.first(read)
                for remaining in range(settings.new_tokens, 0, -1):
                    began = time.perf_counter()
                    advance(decoder, context.run, remaining)
                    decodes.append(time.perf_counter() - began)
                    if sum(decodes) > _LONG_SECONDS:
                        break
                if sum(prefills) + sum(decodes) > _LONG_SECONDS:
                    break
        finally:
            context.close()
        if "prefill" in settings.tests:
            flops = prefill_flops(self.shape, settings.context)
            floor = flops / self.matmul_flops_per_second
            what = f"{settings.context} tokens"
            name = f"{flops:.2e} FLOP at the rate of one large matrix product"
            amount = settings.context
            yield Row("prefill", what, tuple(prefills), amount, "tokens/s", floor, name)
        if "decode" in settings.tests:
            what = f"one token a pass, after {settings.context}"
            yield Row("decode", what, tuple(decodes), 1, "tokens/s")

    def _tokens(self, count: int) -> torch.Tensor:
        ids = torch.arange(count, device=self._device) * 7919
        return ids.remainder(self.shape.vocab)

    def _times(
        self, run: Callable[[], Any], repeats: int | None = None, *, before: int = 1
    ) -> tuple[float, ...]:
        """Return the seconds of each of `repeats` runs, after `before` warm-up runs.

        Each run begins where the previous one ended, because copies continue between them.
        """
        ends = [time.perf_counter()]
        for _ in range(before + (repeats or self.settings.repeats)):
            run()
            self._settle()
            ends.append(time.perf_counter())
        return tuple(end - began for began, end in pairwise(ends))[before:]

    def _settle(self) -> None:
        """Wait for launched kernels, but not for copies that run ahead of them."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _repeated(run: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls `run` _AT_ONCE times."""

    def repeated() -> None:
        for _ in range(_AT_ONCE):
            run()

    return repeated


def fill_randomly(sequence: SequenceKV, tokens: int) -> None:
    """Fill a sequence's KV with `tokens` tokens of random keys and values, as a prefill would."""
    with sequence.prefill(tokens, streams=False) as cache:
        for layer in range(sequence.kv.shape.layers):
            if layer < 2:
                cache.gathered.normal_()
            sequence.kv.fill(layer, cache.gathered, tokens, last=True)
