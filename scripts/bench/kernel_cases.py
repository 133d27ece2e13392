"""The cases of `bench kernels`: each kernel on the shapes that a model gives it, and its rival."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from frame import timed
from triforce_core.model.config import ModelConfig
from triforce_kernels import layer
from triforce_kernels.attention.scoring import ScoreBuffer, group_scores
from triforce_kernels.attention.streaming import Running, attend_blocks, attend_cache, attend_tail
from triforce_kernels.dispatch import TRITON, backend
from triforce_kernels.kv.gather import ChunkSource, gather_chunks
from triforce_kernels.kv.selection import choose_chunks
from triforce_kernels.sampling import sampling
from triforce_kernels.weights.block_types import ALL_TYPES
from triforce_kernels.weights.blocks import BlockWeight, block_matmul, decode
from triforce_kernels.weights.integers import integer_matmul, quantise
from triforce_offload.machine.probe import Rates
from triforce_offload.memory.host import CudaDriver, HostMemory

Run = Callable[[], object]
# PyTorch's own operation for the same result, with its name.
Rival = tuple[str, Sequence[Run]]
PLAIN, DENSE, SDPA = "plain operations", "dense product", "SDPA"
CHUNK = 8
BUDGET = 4096
BLOCK_BYTES = 16 << 20
CHURN = 0.06
# The calls of a kernel in one graph, over as many sets of data as fit.
CALLS = 8
_TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q3_K", "IQ4_XS", "IQ3_S", "INT4_128")


@dataclass(frozen=True)
class KernelRow:
    """One figure. seconds: the median of one call. rival: PyTorch's own operation, or empty"""

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
        cases = (self._attention, self._cache, self._choice, self._gather, self._small)
        for rows in (*cases, self._sampling, self._integers, self._blocks):
            yield from rows()
            self.settle()

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def times(self, runs: Sequence[Run]) -> float:
        """Return the seconds of one call, the median over `repeats` rounds of all the runs."""
        for run in runs:
            run()
        self.settle()
        calls = [runs[i % len(runs)] for i in range(max(CALLS, len(runs)))]
        if backend(self.device) != TRITON:
            # Some references wait for the device, which a recorded graph may not do.
            rounds = [timed(partial(self._call, calls)) for _ in range(self.repeats)]
            return statistics.median(rounds) / len(calls)
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

    def _call(self, calls: Sequence[Run]) -> None:
        for call in calls:
            call()
        self.settle()

    def row(
        self,
        kernel: str,
        inputs: str,
        nbytes: float,
        flops: float,
        runs: Sequence[Run] | float,
        rival: Rival | None = None,
    ) -> KernelRow:
        """Time a kernel and its rival. runs: calls on different data, or seconds of a call"""
        bounds = {
            "memory": nbytes / self.rates.memory_bytes_per_second,
            "matrix": flops / self.rates.flops_per_second,
        }
        ceiling = max(bounds, key=bounds.__getitem__)
        name, theirs = rival or ("", ())
        seconds = runs if isinstance(runs, float) else self.times(runs)
        return KernelRow(
            kernel, inputs, nbytes, flops, seconds, ceiling, bounds[ceiling],
            name, self.times(theirs) if theirs else None,
        )  # fmt: skip

    def products(
        self,
        kernel: str,
        weights: Sequence[object],
        nbytes: int,
        product: Callable[[torch.Tensor, object], object],
        dense: Sequence[torch.Tensor],
        rows_of: Sequence[int],
        note: str = "",
    ) -> Iterator[KernelRow]:
        """Time products with an MLP weight and dense ones, at different numbers of rows."""
        out, width = dense[0].shape
        for rows in rows_of:
            x = self.draw(rows, width, dtype=dense[0].dtype)
            yield self.row(
                kernel, f"{rows} x {width} by {out}{note}", nbytes, 2.0 * rows * out * width,
                [partial(product, x, weight) for weight in weights],
                (DENSE, [partial(F.linear, x, each) for each in dense]),
            )  # fmt: skip

    def _attention(self) -> Iterator[KernelRow]:
        mixer, tokens = self.config.attention, self.tokens
        kv_heads, head_dim = mixer.kv_heads, mixer.head_dim
        token_bytes = 2 * kv_heads * head_dim * self.dtype.itemsize
        block = max(256, min(self.context, 1 << (BLOCK_BYTES // token_bytes).bit_length() - 1))
        count = self.context // block
        kv = torch.empty(2, count, kv_heads, block, head_dim, device=self.device, dtype=self.dtype)
        kv.normal_()
        rows = mixer.heads // kv_heads * tokens
        query, own = self.draw(kv_heads, rows, head_dim), self.draw(2, kv_heads, tokens, head_dim)
        chunks = count * block // CHUNK + -(-tokens // CHUNK)
        chunk_scores = torch.empty(kv_heads, rows, chunks, device=self.device)
        scores = ScoreBuffer(chunk_scores, 0, CHUNK)

        def whole(scores: ScoreBuffer | None, each: int = count) -> torch.Tensor:
            running = Running.of(query)
            for first in range(0, count, each):
                at = scores and scores.at(first * block // CHUNK)
                part = slice(first, first + each)
                attend_blocks(running, query, kv[0, part], kv[1, part], at)
            at = scores and scores.at(count * block // CHUNK)
            return attend_tail(running, query, *own, tokens, scores=at).out

        heads = query.view(mixer.heads, tokens, head_dim)[None]
        flat = kv.transpose(1, 2).reshape(2, kv_heads, count * block, head_dim)
        rival = partial(F.scaled_dot_product_attention, heads, *flat[:, None], enable_gqa=True)
        # Its KV is a copy of ours and must be freed before ours is timed.
        sdpa_seconds = self.times([rival])
        del flat, rival
        nbytes, written = count * block * token_bytes, chunk_scores.numel() * 4
        flops = 4.0 * mixer.heads * tokens * head_dim * count * block
        inputs = f"{mixer.heads}/{kv_heads} heads, {tokens} queries, {count} x {block} keys"
        kernel, scored = "attend_blocks", nbytes + written
        for name, moved, run in (
            (kernel, nbytes, lambda: whole(None)),
            (f"{kernel}, scored", scored, lambda: whole(scores)),
            (f"{kernel}, scored, a launch a block", scored, lambda: whole(scores, 1)),
        ):
            row = self.row(name, inputs, moved, flops, [run])
            yield replace(row, rival=SDPA, rival_seconds=sdpa_seconds)
        lse = self.draw(kv_heads, rows, dtype=torch.float32)
        keys = count * block + tokens
        out = torch.empty(
            min(tokens, 8), kv_heads, -(-keys // CHUNK), device=self.device, dtype=torch.bfloat16
        )
        run = partial(group_scores, chunk_scores, lse, keys, CHUNK, CHUNK, tokens, out)
        moved = written + out.numel() * 2
        yield self.row("group_scores", f"{kv_heads} x {rows} x {chunks}", moved, 0, [run])

    def _cache(self) -> Iterator[KernelRow]:
        mixer = self.config.attention
        kv_heads, head_dim = mixer.kv_heads, mixer.head_dim
        capacity = BUDGET + 64
        layers = self.draw(CALLS, 2, kv_heads, capacity, head_dim)
        whole = [layer.to(torch.int8) for layer in layers]
        end = torch.tensor([BUDGET], device=self.device)
        for tokens in (1, 8):
            query = self.draw(kv_heads, mixer.heads // kv_heads * tokens, head_dim)
            seen = BUDGET + tokens
            numbers = 2 * kv_heads * head_dim * seen
            flops = 4.0 * mixer.heads * tokens * head_dim * seen
            heads = query.view(mixer.heads, tokens, head_dim)[None]
            sdpa = partial(F.scaled_dot_product_attention, heads, enable_gqa=True)
            rivals = [
                partial(sdpa, key=layer[0, None, :, :seen], value=layer[1, None, :, :seen])
                for layer in layers
            ]
            inputs = f"{mixer.heads}/{kv_heads} heads, {tokens} queries, {seen} of {capacity} keys"
            runs = [partial(attend_cache, query, *layer, tokens, end) for layer in layers]
            yield self.row(
                "attend_cache", inputs, numbers * self.dtype.itemsize, flops, runs,
                (f"{SDPA}, no mask", rivals),
            )  # fmt: skip
            runs = [partial(attend_cache, query, *layer, tokens, end) for layer in whole]
            yield self.row("attend_cache, 8 bits", inputs, numbers, flops, runs)

    def _choice(self) -> Iterator[KernelRow]:
        rows = (len(self.config.kv_layers), self.config.attention.kv_heads)
        chunks, slots = self.context // CHUNK, min(BUDGET, self.context // 2) // CHUNK
        scores = self.draw(*rows, chunks, dtype=torch.float32)
        chunk_of = torch.full((*rows, slots), -1, device=self.device)
        run = partial(choose_chunks, scores, chunk_of, chunks, 4)
        run()
        yield self.row(
            "choose_chunks", f"{rows[0]} x {rows[1]} rows, {slots} of {chunks} chunks",
            scores.numel() * 4 + chunk_of.numel() * 16, 0, [run],
            ("torch.topk alone", [lambda: scores.topk(slots, -1)]),
        )  # fmt: skip

    def _gather(self) -> Iterator[KernelRow]:
        layers, mixer = len(self.config.kv_layers), self.config.attention
        kv_heads, head_dim = mixer.kv_heads, mixer.head_dim
        slots = min(BUDGET, self.context // 2) // CHUNK
        moves = self.moves(self.context // CHUNK, slots)
        target = torch.zeros(
            layers, 2, kv_heads, slots, CHUNK, head_dim, dtype=self.dtype, device=self.device
        )
        block = max(CHUNK, min(1024, self.context // 4))
        size = 2 * kv_heads * block * head_dim * self.dtype.itemsize
        count = int((moves >= 0).sum())
        nbytes = count * 2 * CHUNK * head_dim * self.dtype.itemsize
        blocks = -(-self.context // block)

        def gathering(some: torch.Tensor) -> Run:
            # A few blocks stand for all: each chunk is read from a different place in them.
            starts = torch.tensor([part.data_ptr() for part in some.view(4, size)])
            addresses = starts[torch.arange(layers * (blocks + 1)) % 4].view(layers, blocks + 1)
            source = ChunkSource(addresses.to(self.device), block, block)
            return lambda: gather_chunks(moves, source, target)

        some = torch.empty(4 * size, dtype=torch.uint8, device=self.device)
        inputs = f"{count} chunks of {CHUNK} x {head_dim}"
        yield from self.gathered("gather_chunks", inputs, nbytes, nbytes, some, gathering)

    def moves(self, chunks: int, slots: int) -> torch.Tensor:
        """Return the chunks that a refresh loads; -1 marks slots that stay unchanged."""
        size = len(self.config.kv_layers), self.config.attention.kv_heads, slots
        moves = torch.randint(0, chunks, size)
        return moves.where(torch.rand(moves.shape) < CHURN, -1).to(self.device)

    def gathered(
        self,
        name: str,
        inputs: str,
        nbytes: int,
        written: int,
        blocks: torch.Tensor,
        gathering: Callable[[torch.Tensor], Run],
    ) -> Iterator[KernelRow]:
        """Time chunks of device blocks and, on a GPU, of the same blocks in pinned memory."""
        run = gathering(blocks)
        yield self.row(f"{name}, device blocks", inputs, nbytes + written, 0, [run])
        if self.device.type != "cuda":
            return
        with HostMemory(CudaDriver(self.device)).arena(blocks.numel()) as arena:
            if arena.pinned:
                arena.bytes.copy_(blocks)
                run = gathering(arena.bytes)
                row = self.row(f"{name}, host blocks", inputs, nbytes, 0, [run])
                seconds = nbytes / self.rates.link_bytes_per_second
                yield replace(row, ceiling="link", ceiling_seconds=seconds)
            self.settle()

    def _small(self) -> Iterator[KernelRow]:
        config, tokens = self.config, self.tokens
        mixer, item = config.attention, self.dtype.itemsize
        kv_heads, head_dim = mixer.kv_heads, mixer.head_dim
        hidden, delta = self.draw(tokens, config.hidden), self.draw(tokens, config.hidden)
        weight = self.draw(config.hidden)
        heads = self.draw(tokens, config.attention.heads + 2 * kv_heads, head_dim)
        cos, sin = self.draw(2, tokens, head_dim)
        key, value = self.draw(2, kv_heads, BUDGET, head_dim)
        gate_up = self.draw(tokens, 2 * config.layers[0].mlp.width)
        rope = (heads, cos, sin, key, value, 7)
        norm = (hidden, weight, 1e-5, delta)
        for name, inputs, moved, ours, theirs in (
            (
                "rms_norm with residual", f"{tokens} x {config.hidden}", 4 * hidden.numel(),
                partial(layer.rms_norm, *norm), partial(layer.reference_rms_norm, *norm, False),
            ),
            (
                "rope_into", f"{tokens} x {heads.shape[1]} x {head_dim}", 2 * heads.numel(),
                partial(layer.rope_into, *rope), partial(layer.reference_rope_into, *rope, None),
            ),
            (
                "swiglu", f"{tokens} x {2 * config.layers[0].mlp.width}", 1.5 * gate_up.numel(),
                partial(layer.swiglu, gate_up), partial(layer.reference_swiglu, gate_up),
            ),
        ):  # fmt: skip
            yield self.row(name, inputs, moved * item, 0, [ours], (PLAIN, [theirs]))

    def _sampling(self) -> Iterator[KernelRow]:
        vocab, tokens = self.config.vocab, self.tokens
        logits = self.draw(tokens, vocab, dtype=torch.float32)
        for top_k, top_p in ((0, 1.0), (0, 0.9), (50, 0.9)):
            arguments = (logits, 0.6, top_k, top_p)
            yield self.row(
                "distribution", f"{tokens} x {vocab}, top-k {top_k}, top-p {top_p}",
                logits.numel() * 8, 0, [partial(sampling.distribution, *arguments)],
                (PLAIN, [partial(sampling.reference_distribution, *arguments)]),
            )  # fmt: skip
        laws = logits.softmax(-1)[None]
        coins = torch.rand(1, tokens, device=self.device, dtype=torch.float64)
        drafted = laws[0, :-1].argmax(-1)[None]
        arguments = (drafted, laws[:, :-1], laws, coins)
        yield self.row(
            "accept", f"{tokens - 1} of {vocab}", 4 * vocab * 4, 0,
            [partial(sampling.accept, *arguments)],
            (PLAIN, [partial(sampling.reference_accept, *arguments)]),
        )  # fmt: skip

    def _integers(self) -> Iterator[KernelRow]:
        out, width = self.config.layers[0].mlp.width, self.config.hidden
        rows_of, dense = (1, 8, 17, 64), [self.draw(out, width) for _ in range(2)]
        for bits, group in ((3, ", group 64, 3 bits"), (4, ", group 64")):
            packed = [quantise(self.draw(out, width), bits=bits) for _ in range(CALLS)]
            given = packed, (nbytes := packed[0].nbytes), integer_matmul, dense, rows_of, group
            yield from self.products("integer_matmul", *given)
        for dtype in dict.fromkeys((self.dtype, torch.bfloat16)):
            if product := self._shipped(out, width, dtype):
                for rows in rows_of:
                    x = self.draw(rows, width, dtype=dtype)
                    yield self.row(
                        f"torch's int4 product, {str(dtype).removeprefix('torch.')}",
                        f"{rows} x {width} by {out}{group}", nbytes,
                        2.0 * rows * out * width, [partial(product, x)],
                    )  # fmt: skip

    def _shipped(
        self, out: int, width: int, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return torch's own product with 4-bit weights, None if it lacks the dtype."""
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

    def _blocks(self) -> Iterator[KernelRow]:
        out, width = self.config.layers[0].mlp.width, self.config.hidden
        dense = [self.draw(out, width) for _ in range(2)]
        for name in _TYPES:
            kind = ALL_TYPES[name]
            if width % kind.elements:
                continue
            # Zeros, because values do not affect the time.
            data = [
                torch.zeros(out, kind.row_bytes(width), dtype=torch.uint8, device=self.device)
                for _ in range(CALLS)
            ]
            weights, nbytes = [BlockWeight(d, kind, width) for d in data], data[0].numel()
            yield from self.products(
                f"block_matmul, {name}", weights, nbytes, block_matmul, dense, (1, 4, 16, 64)
            )
            yield self.row(
                f"decode_blocks, {name}", f"{out} x {width}",
                nbytes + out * width * self.dtype.itemsize, 0,
                [partial(decode, d, kind, self.dtype) for d in data],
            )  # fmt: skip
