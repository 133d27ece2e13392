"""What bench_kernels.py times: each kernel on the shapes that a model gives it, and its rival."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from triforce_kernels.block_types import BLOCK_TYPES
from triforce_kernels.blocks import BlockWeight, block_matmul, decode
from triforce_kernels.dispatch import REFERENCE, backend
from triforce_kernels.gather import ChunkSource, gather_chunks
from triforce_kernels.int4 import int4_matmul, quantise
from triforce_kernels.layer import (
    reference_rms_norm,
    reference_rope_into,
    reference_swiglu,
    rms_norm,
    rope_into,
    swiglu,
)
from triforce_kernels.sampling import (
    accept,
    law,
    reference_accept,
    reference_law,
)
from triforce_kernels.scoring import ScoreBuffer, group_scores
from triforce_kernels.selection import choose_chunks
from triforce_kernels.streaming import Running, attend_blocks, attend_cache, attend_tail

from offload.machine.probe import Rates
from offload.memory.host import CudaDriver, HostMemory
from triforce_core.model.config import ModelConfig

Run = Callable[[], object]
CHUNK = 8
BUDGET = 4096
BLOCK_BYTES = 16 << 20
CHURN = 0.06
# A graph calls its kernel so often, over as many sets of data where those fit.
CALLS = 8


@dataclass(frozen=True)
class KernelRow:
    """seconds: medians of one call; rival: PyTorch's own way to the same, None if there is none"""

    kernel: str
    inputs: str
    nbytes: float
    flops: float
    seconds: float
    ceiling: str
    ceiling_seconds: float
    rival: str = ""
    rival_seconds: float | None = None


@dataclass(frozen=True)
class KernelCases:
    config: ModelConfig
    context: int
    tokens: int
    device: torch.device
    dtype: torch.dtype
    rates: Rates
    repeats: int

    def rows(self) -> Iterator[KernelRow]:
        for rows in (self._attention, self._cache, self._choice, self._small, self._sampling):
            yield from rows()
            self.settle()
        yield from self._int4()
        yield from self._blocks()

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def times(self, runs: list[Run]) -> float:
        """Seconds of one call, the median over `repeats` rounds of all the runs."""
        for run in runs:
            run()
        self.settle()
        calls = [runs[i % len(runs)] for i in range(max(CALLS, len(runs)))]
        if backend(self.device) == REFERENCE:
            # Some references wait for the device, which nothing that is recorded may do.
            return statistics.median(self._clocked(calls) for _ in range(self.repeats))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [run() for run in calls]
        seconds = []
        for _ in range(self.repeats + 1):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            seconds.append(began.elapsed_time(ended) / 1000 / len(calls))
        del kept
        return statistics.median(seconds[1:])

    def _clocked(self, calls: list[Run]) -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        self.settle()
        return (time.perf_counter() - began) / len(calls)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def row(self, kernel: str, inputs: str, nbytes: float, flops: float, run, **rival) -> KernelRow:
        bounds = {
            "memory": nbytes / self.rates.memory_bytes_per_second,
            "matrix": flops / self.rates.flops_per_second,
        }
        ceiling = max(bounds, key=bounds.__getitem__)
        seconds = self.times(run if isinstance(run, list) else [run])
        return KernelRow(kernel, inputs, nbytes, flops, seconds, ceiling, bounds[ceiling], **rival)

    def _attention(self) -> Iterator[KernelRow]:
        config, tokens = self.config, self.tokens
        kv_heads, head_dim = config.kv_heads, config.head_dim
        item = self.dtype.itemsize
        token_bytes = 2 * kv_heads * head_dim * item
        block = max(256, min(self.context, 1 << (BLOCK_BYTES // token_bytes).bit_length() - 1))
        count = self.context // block
        kv = torch.empty(2, count, kv_heads, block, head_dim, device=self.device, dtype=self.dtype)
        kv.normal_()
        rows = config.heads // kv_heads * tokens
        query = self.draw(kv_heads, rows, head_dim)
        own = self.draw(2, kv_heads, tokens, head_dim)
        chunks = count * block // CHUNK + -(-tokens // CHUNK)
        chunk_scores = torch.empty(kv_heads, rows, chunks, device=self.device)
        scores = ScoreBuffer(chunk_scores, 0, CHUNK, True)

        def whole(scores: ScoreBuffer | None, each: int = count) -> torch.Tensor:
            running = Running.of(query)
            for first in range(0, count, each):
                at = scores and scores.at(first * block // CHUNK)
                part = slice(first, first + each)
                attend_blocks(running, query, kv[0, part], kv[1, part], at)
            at = scores and scores.at(count * block // CHUNK)
            return attend_tail(running, query, *own, tokens, scores=at).out

        heads = query.view(config.heads, tokens, head_dim)[None]
        flat = kv.transpose(1, 2).reshape(2, kv_heads, count * block, head_dim)
        rival = partial(F.scaled_dot_product_attention, heads, *flat[:, None], enable_gqa=True)
        nbytes = count * block * token_bytes
        flops = 4.0 * config.heads * tokens * head_dim * count * block
        inputs = f"{config.heads}/{kv_heads} heads, {tokens} queries, {count} x {block} keys"
        against = {"rival": "SDPA", "rival_seconds": self.times([rival])}
        del flat
        yield self.row("attend_blocks", inputs, nbytes, flops, lambda: whole(None), **against)
        written = chunk_scores.numel() * 4
        yield self.row(
            "attend_blocks, scored",
            inputs,
            nbytes + written,
            flops,
            lambda: whole(scores),
            **against,
        )
        yield self.row(
            "attend_blocks, scored, a launch a block",
            inputs,
            nbytes + written,
            flops,
            lambda: whole(scores, 1),
            **against,
        )
        lse = self.draw(kv_heads, rows, dtype=torch.float32)
        keys = count * block + tokens
        groups = min(tokens, 8)
        wide = -(-keys // CHUNK)
        out = torch.empty(groups, kv_heads, wide, device=self.device, dtype=torch.bfloat16)
        run = partial(group_scores, chunk_scores, lse, keys, CHUNK, CHUNK, tokens, out)
        moved = written + out.numel() * 2
        yield self.row("group_scores", f"{kv_heads} x {rows} x {chunks}", moved, 0, run)

    def _cache(self) -> Iterator[KernelRow]:
        config = self.config
        kv_heads, head_dim = config.kv_heads, config.head_dim
        group = config.heads // kv_heads
        capacity = BUDGET + 64
        layers = self.draw(CALLS, 2, kv_heads, capacity, head_dim)
        end = torch.tensor([BUDGET], device=self.device)
        for tokens in (1, 8):
            query = self.draw(kv_heads, group * tokens, head_dim)
            seen = BUDGET + tokens
            nbytes = 2 * kv_heads * head_dim * seen * self.dtype.itemsize
            heads = query.view(config.heads, tokens, head_dim)[None]
            rivals = [
                partial(
                    F.scaled_dot_product_attention,
                    heads,
                    layer[0, None, :, :seen],
                    layer[1, None, :, :seen],
                    enable_gqa=True,
                )
                for layer in layers
            ]
            yield self.row(
                "attend_cache",
                f"{config.heads}/{kv_heads} heads, {tokens} queries, {seen} of {capacity} keys",
                nbytes,
                4.0 * config.heads * tokens * head_dim * seen,
                [partial(attend_cache, query, *layer, tokens, end) for layer in layers],
                rival="SDPA, no mask",
                rival_seconds=self.times(rivals),
            )
            whole = [layer.to(torch.int8) for layer in layers]
            yield self.row(
                "attend_cache, 8 bits",
                f"{config.heads}/{kv_heads} heads, {tokens} queries, {seen} of {capacity} keys",
                nbytes // self.dtype.itemsize,
                4.0 * config.heads * tokens * head_dim * seen,
                [partial(attend_cache, query, *layer, tokens, end) for layer in whole],
            )

    def _choice(self) -> Iterator[KernelRow]:
        config = self.config
        rows = (config.layers, config.kv_heads)
        chunks, slots = self.context // CHUNK, min(BUDGET, self.context // 2) // CHUNK
        scores = self.draw(*rows, chunks, dtype=torch.float32)
        chunk_of = torch.full((*rows, slots), -1, device=self.device)
        choose_chunks(scores, chunk_of, chunks, 4)
        yield self.row(
            "choose_chunks",
            f"{rows[0]} x {rows[1]} rows, {slots} of {chunks} chunks",
            scores.numel() * 4 + chunk_of.numel() * 16,
            0,
            lambda: choose_chunks(scores, chunk_of, chunks, 4),
            rival="torch.topk alone",
            rival_seconds=self.times([lambda: scores.topk(slots, -1)]),
        )
        moves = torch.where(torch.rand(chunk_of.shape, device=self.device) < CHURN, chunk_of, -1)
        head_dim = config.head_dim
        target = torch.zeros(*rows[:1], 2, rows[1], slots, CHUNK, head_dim, dtype=self.dtype)
        target = target.to(self.device)
        block = max(CHUNK, min(1024, self.context // 4))
        size = 2 * rows[1] * block * head_dim * self.dtype.itemsize
        count = int((moves >= 0).sum())
        nbytes = count * 2 * CHUNK * head_dim * self.dtype.itemsize
        inputs = f"{count} chunks of {CHUNK} x {head_dim}"
        blocks = -(-self.context // block)
        # A few blocks stand for all: each chunk is read from somewhere else in them.
        some = torch.empty(4, size, dtype=torch.uint8, device=self.device)
        yield self._gathering("gather_chunks, device blocks", inputs, moves, some, blocks, block,
                              target, 2 * nbytes, None)  # fmt: skip
        if self.device.type == "cuda":
            memory = HostMemory(CudaDriver(self.device))
            with memory.arena(4 * size) as arena:
                name = "gather_chunks, host blocks" + ("" if arena.pinned else " NOT PINNED")
                link = self.rates.link_bytes_per_second
                if arena.pinned:
                    yield self._gathering(name, inputs, moves, arena.bytes.view(4, size), blocks,
                                          block, target, nbytes, link)  # fmt: skip
                self.settle()

    def _gathering(
        self, name, inputs, moves, some, blocks, block, target, nbytes, link
    ) -> KernelRow:
        starts = torch.tensor([part.data_ptr() for part in some])
        addresses = starts[torch.arange(target.shape[0] * (blocks + 1)) % len(some)]
        addresses = addresses.view(target.shape[0], blocks + 1).to(self.device)
        source = ChunkSource(addresses, block, block)
        row = self.row(name, inputs, nbytes, 0, lambda: gather_chunks(moves, source, target))
        return replace(row, ceiling="link", ceiling_seconds=nbytes / link) if link else row

    def _small(self) -> Iterator[KernelRow]:
        config, tokens = self.config, self.tokens
        item = self.dtype.itemsize
        hidden, delta = self.draw(tokens, config.hidden), self.draw(tokens, config.hidden)
        weight = self.draw(config.hidden)
        yield self.row(
            "rms_norm with residual", f"{tokens} x {config.hidden}", 4 * hidden.numel() * item, 0,
            lambda: rms_norm(hidden, weight, 1e-5, delta),
            rival="plain operations",
            rival_seconds=self.times([lambda: reference_rms_norm(hidden, weight, 1e-5, delta)]),
        )  # fmt: skip
        kv_heads, head_dim = config.kv_heads, config.head_dim
        heads = self.draw(tokens, config.heads + 2 * kv_heads, head_dim)
        cos, sin = self.draw(2, tokens, head_dim)
        key, value = self.draw(2, kv_heads, BUDGET, head_dim)
        yield self.row(
            "rope_into", f"{tokens} x {heads.shape[1]} x {head_dim}", 2 * heads.numel() * item, 0,
            lambda: rope_into(heads, cos, sin, key, value, 7),
            rival="plain operations",
            rival_seconds=self.times(
                [lambda: reference_rope_into(heads, cos, sin, key, value, 7, None)]
            ),
        )  # fmt: skip
        gate_up = self.draw(tokens, 2 * config.mlp)
        yield self.row(
            "swiglu", f"{tokens} x {2 * config.mlp}", 1.5 * gate_up.numel() * item, 0,
            lambda: swiglu(gate_up),
            rival="plain operations",
            rival_seconds=self.times([lambda: reference_swiglu(gate_up)]),
        )  # fmt: skip

    def _sampling(self) -> Iterator[KernelRow]:
        vocab, tokens = self.config.vocab, self.tokens
        logits = self.draw(tokens, vocab, dtype=torch.float32)
        for top_k, top_p in ((0, 1.0), (0, 0.9), (50, 0.9)):
            ours = partial(law, logits, 0.6, top_k, top_p)
            theirs = partial(reference_law, logits, 0.6, top_k, top_p)
            yield self.row(
                "law", f"{tokens} x {vocab}, top-k {top_k}, top-p {top_p}", logits.numel() * 8, 0,
                ours, rival="plain operations", rival_seconds=self.times([theirs]),
            )  # fmt: skip
        laws = logits.softmax(-1)[None]
        coins = torch.rand(1, tokens, device=self.device, dtype=torch.float64)
        drafted = laws[0, :-1].argmax(-1)[None]
        arguments = (drafted, laws[:, :-1], laws, coins)
        yield self.row(
            "accept", f"{tokens - 1} of {vocab}", 4 * vocab * 4, 0, lambda: accept(*arguments),
            rival="plain operations",
            rival_seconds=self.times([lambda: reference_accept(*arguments)]),
        )  # fmt: skip

    def _int4(self) -> Iterator[KernelRow]:
        out, width = self.config.mlp, self.config.hidden
        packed = [quantise(self.draw(out, width)) for _ in range(CALLS)]
        dense = [self.draw(out, width) for _ in range(2)]
        theirs = {d: self._shipped(out, width, d) for d in (self.dtype, torch.bfloat16)}
        for rows in (1, 8, 17, 64):
            x = self.draw(rows, width)
            yield self.row(
                "int4_matmul", f"{rows} x {width} by {out}, group 64", packed[0].nbytes,
                2.0 * rows * out * width, [partial(int4_matmul, x, w) for w in packed],
                rival="dense product",
                rival_seconds=self.times([partial(F.linear, x, w) for w in dense]),
            )  # fmt: skip
            for dtype, product in theirs.items():
                if product:
                    yield self.row(
                        f"torch's int4 product, {str(dtype).removeprefix('torch.')}",
                        f"{rows} x {width} by {out}, group 64", packed[0].nbytes,
                        2.0 * rows * out * width, partial(product, x.to(dtype)),
                    )  # fmt: skip

    def _blocks(self) -> Iterator[KernelRow]:
        out, width = self.config.mlp, self.config.hidden
        dense = [self.draw(out, width) for _ in range(2)]
        for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0"):
            kind = BLOCK_TYPES[name]
            if width % kind.elements:
                # No file holds such rows.
                continue
            # Zeros: what numbers they are takes no time.
            data = [
                torch.zeros(out, kind.row_bytes(width), dtype=torch.uint8, device=self.device)
                for _ in range(CALLS)
            ]
            weights, nbytes = [BlockWeight(d, kind, width) for d in data], data[0].numel()
            for rows in (1, 4, 16, 64):
                x = self.draw(rows, width)
                yield self.row(
                    f"block_matmul, {name}", f"{rows} x {width} by {out}", nbytes,
                    2.0 * rows * out * width, [partial(block_matmul, x, w) for w in weights],
                    rival="dense product",
                    rival_seconds=self.times([partial(F.linear, x, w) for w in dense]),
                )  # fmt: skip
            yield self.row(
                f"decode_blocks, {name}", f"{out} x {width}",
                nbytes + out * width * self.dtype.itemsize, 0,
                [partial(decode, d, kind, self.dtype) for d in data],
            )  # fmt: skip

    def _shipped(
        self, out: int, width: int, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What torch ships for 4-bit weights, where it takes that dtype."""
        scales = torch.ones(width // 64, out, 2, device=self.device, dtype=dtype)
        try:
            if self.device.type == "cuda":
                numbers = torch.randint(0, 255, (out, width // 2), device=self.device)
                weight = torch._convert_weight_to_int4pack(numbers.to(torch.uint8), 8)
                product = torch._weight_int4pack_mm
            else:
                numbers = torch.randint(0, 15, (out, width), dtype=torch.int32)
                weight = torch._convert_weight_to_int4pack_for_cpu(numbers, 1)
                product = torch._weight_int4pack_mm_for_cpu
            product(self.draw(1, width, dtype=dtype), weight, 64, scales)
        except RuntimeError as error:
            print(f"torch's own, {dtype}: {str(error).splitlines()[0]}", file=sys.stderr)
            return None
        return lambda x: product(x, weight, 64, scales)
