"""Compiling what launchers would launch, for a GPU that is not there.

    compiling.py CAPABILITY few|all

Triton's compiler needs no GPU. Interpreted kernels show what is computed; compiled ones, that they
can be, within the shared memory and registers of a device. A process of its own, since a kernel is
either interpreted or compiled in a process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product as product_of
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from triforce_kernels import dispatch
from triforce_kernels.attention.scoring import ScoreBuffer, group_scores
from triforce_kernels.attention.streaming import Running, attend_blocks, attend_cache, attend_tail
from triforce_kernels.dispatch import KERNELS
from triforce_kernels.experts.grouped import in_tiles, product, weighted_sums
from triforce_kernels.experts.routing import Choice, choose
from triforce_kernels.kv.gather import ChunkSource, gather_chunks
from triforce_kernels.kv.gather_split import SplitChunkSource, gather_split_chunks
from triforce_kernels.kv.rounding import round_chunks
from triforce_kernels.kv.selection import choose_chunks
from triforce_kernels.kv.split_kv import SplitKV, decode_blocks, encode_block
from triforce_kernels.layer import geglu, layer_norm, rms_norm, rope_into, swiglu
from triforce_kernels.limits import EXPERT_TILE, FEW_ROWS, WHOLE_ROWS
from triforce_kernels.recurrent.conv import Convolution, convolve
from triforce_kernels.recurrent.delta import DeltaRows, LeftRows, delta_chunks, delta_rule
from triforce_kernels.recurrent.gates import (
    Skip,
    delta_gates,
    gated_norm,
    norm_of_gated,
    step_gates,
)
from triforce_kernels.same_bits import same_bits
from triforce_kernels.sampling.sampling import accept, distribution, pick
from triforce_kernels.streams.streams import add_to_streams, mean_of_gated, silu_of_mean
from triforce_kernels.weights import blocks
from triforce_kernels.weights.block_types import ALL_TYPES, BLOCK_TYPES, HIGH_QUANTS
from triforce_kernels.weights.blocks import FUSED, BlockWeight, block_matmul, decode
from triforce_kernels.weights.high_bits import HighBitsWeight, high_bits_matmul
from triforce_kernels.weights.integers import integer_matmul, quantise
from triforce_kernels.weights.linear import linear
from triforce_kernels.weights.split_bf16 import decode as decode_split
from triforce_kernels.weights.split_bf16 import decode_rows, encode, split_matmul
from triforce_kernels.weights.tiles import Tiles
from triforce_offload.kv.shape import SplitBlockLayout
from triforce_offload.weights.split_formats import SplitBF16, SplitExperts, SplitFP8, SplitQuants


class Compiled(NamedTuple):
    """What one kernel of one launch takes: bytes of shared memory, bytes spilt, registers of a
    thread, bytes of the widest read, reads of a single byte, and divisions that round otherwise
    than IEEE 754.
    """

    name: str
    shared: int
    spilt: int
    registers: int
    widest: int
    byte_reads: int
    approximate_divisions: int


class _Device:
    """What the launcher asks of a driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Launches compile for that compute capability (89 for 8.9) and do not run; the list tells."""
    compiled: list[Compiled] = []
    original = JITFunction.run

    def run(function, *args, grid, warmup, **options):
        kernel = original(function, *args, grid=grid, warmup=True, **options)
        compiled.append(_looked_at(kernel))
        return kernel

    driver.set_active(_Device(capability))
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = original
        driver._active = None


def _looked_at(kernel) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # What does not fit into registers lies on the stack.
    spilt = max(map(int, re.findall(r"STACK:(\d+)", usage)))
    registers = max(map(int, re.findall(r"REG:(\d+)", usage)))
    ptx = kernel.asm["ptx"]
    reads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    # Where all that is read comes by asynchronous copies there is no such load.
    widest = max((int(count or 1) * int(bits) // 8 for count, bits in reads), default=0)
    byte_reads = sum(not count and bits == "8" for count, bits in reads)
    approximate = len(re.findall(r"\bdiv\.(?:full|approx)", ptx))
    return Compiled(
        kernel.metadata.name, kernel.metadata.shared, spilt, registers, widest, byte_reads,
        approximate,
    )  # fmt: skip


class Attention(NamedTuple):
    """kv_heads, heads of each, tokens, head_dim, dtype, keys of a scored chunk or 0"""

    kv_heads: int
    group: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    size: int


HALF = torch.float16
ATTENTION = {
    "llama2-7b": Attention(32, 1, 17, 128, HALF, 8),
    "llama2-7b, not scored": Attention(32, 1, 17, 128, HALF, 0),
    "llama2-7b, a tree": Attention(32, 1, 57, 128, HALF, 8),
    "llama3.1-8b": Attention(8, 4, 17, 128, torch.bfloat16, 8),
    "llama3.1-8b, one token": Attention(8, 4, 1, 128, HALF, 8),
    "qwen2.5-32b": Attention(8, 5, 65, 128, torch.bfloat16, 8),
    "llama-68m": Attention(12, 1, 1, 64, HALF, 0),
    "smollm2, float32": Attention(3, 3, 25, 64, torch.float32, 8),
    "llama2-7b, float32": Attention(32, 1, 9, 128, torch.float32, 8),
    "head dim 80": Attention(32, 1, 17, 80, HALF, 8),
    "head dim 256": Attention(4, 2, 17, 256, HALF, 8),
    "gemma4-31b": Attention(4, 8, 17, 512, torch.bfloat16, 8),
    "gemma4-31b, one token": Attention(4, 8, 1, 512, torch.bfloat16, 8),
    "gemma4-31b, float32": Attention(4, 8, 17, 512, torch.float32, 8),
    "glm-4.7-flash": Attention(1, 20, 17, 576, torch.bfloat16, 8),
    "glm-4.7-flash, one token": Attention(1, 20, 1, 576, torch.bfloat16, 8),
    "mistral-small-4": Attention(1, 32, 17, 320, torch.bfloat16, 8),
}


def launch_attention(case: Attention) -> None:
    with same_bits(wanted=True):
        launch_passes(case)
        for count in (case.tokens, WHOLE_ROWS + 1):
            query = torch.empty(case.kv_heads, case.group * count, case.head_dim, dtype=case.dtype)
            keys = torch.empty(case.kv_heads, 1024, case.head_dim, dtype=case.dtype)
            for seen in (None, 512):
                attend_cache(query, keys, keys, count, 600, seen)
    query, visible = launch_passes(case)
    # Of a retrieval cache.
    whole = torch.empty(case.kv_heads, 1024, case.head_dim, dtype=torch.int8)
    end = torch.zeros(1, dtype=torch.int64)
    attend_cache(query, whole, whole, case.tokens, end)
    attend_cache(query, whole, whole, case.tokens, end, visible=visible)


def launch_passes(case: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the queries, and which of their keys they see as a tree."""
    rows, dtype = case.group * case.tokens, case.dtype
    query = torch.empty(case.kv_heads, rows, case.head_dim, dtype=dtype)
    keys = torch.empty(2, case.kv_heads, 1024, case.head_dim, dtype=dtype)
    scores = None
    if case.size:
        out = torch.empty(case.kv_heads, rows, 3 * 1024 // case.size)
        scores = ScoreBuffer(out, 0, case.size)
    running = Running.of(query)
    attend_blocks(running, query, keys, keys, scores)
    tail = keys[0, :, : case.tokens + 7]
    running.fresh = False
    attend_tail(running, query, tail, tail, case.tokens, scores=scores)
    visible = torch.ones(case.tokens, case.tokens, dtype=torch.bool)
    attend_tail(running, query, tail, tail, case.tokens, visible=visible, scores=scores)
    end = torch.zeros(1, dtype=torch.int64)
    for seen in (None, visible):
        attend_cache(query, keys[0], keys[0], case.tokens, end, visible=seen)
        attend_tail(running, query, keys[0], keys[0], case.tokens, end=end, visible=seen)
    return query, visible


def launch_others(dtype: torch.dtype) -> None:
    """The other kernels, of Llama-2-7B's shape."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    number = torch.zeros(1, dtype=torch.int64)
    hidden, cache = empty(17, 4096), empty(32, 4224, 128)
    rms_norm(hidden, hidden[0], 1e-5)
    rms_norm(hidden, hidden[0], 1e-5, hidden)
    for offset in (0.0, 1.0):
        rms_norm(hidden, hidden[0], 1e-5, hidden, offset=offset)
    layer_norm(hidden, hidden[0], 1e-5, hidden)
    for start in (5, number):
        rope_into(empty(17, 96, 128), empty(17, 128), empty(17, 128), cache, cache[:], start)
        whole, scale = cache.to(torch.int8), empty(2, 32, 128, dtype=torch.float32)
        rope_into(empty(17, 96, 128), empty(17, 128), empty(17, 128), whole, whole[:], start, scale)
        one, scale = empty(1, 4224, 576), empty(1, 1, 576, dtype=torch.float32)
        angles = empty(17, 576)
        rope_into(empty(17, 21, 576), angles, angles, one, one, start)
        whole = one.to(torch.int8)
        rope_into(empty(17, 21, 576), angles, angles, whole, whole, start, scale)
    streams = empty(17, 4 * 2560)
    rms_norm(streams.view(17, 4, -1), streams[:4, :2560].contiguous(), 1e-6, offset=1.0)
    silu_of_mean(empty(17, 320), 4)
    mean_of_gated(streams, streams, 4)
    add_to_streams(streams, empty(17, 4), empty(17, 2560))
    swiglu(empty(17, 22016))
    geglu(empty(17, 22016))
    scores, lse = empty(32, 17, 16384, dtype=torch.float32), empty(32, 17, dtype=torch.float32)
    means = torch.empty(8, 32, 16384, dtype=torch.bfloat16)
    group_scores(scores, lse, 131072, 8, 8, 17, means)
    chunk_of = torch.full((2, 32, 512), -1)
    moves = choose_chunks(scores[:2, :1].expand(2, 32, 16384).contiguous(), chunk_of, 16384, 4)
    target = empty(2, 2, 32, 512, 8, 128)
    gather_chunks(moves, ChunkSource(torch.zeros(2, 129, dtype=torch.int64), 1024, 1100), target)
    whole = torch.empty(target.shape, dtype=torch.int8)
    round_chunks(moves, target, empty(2, 2, 32, 128, dtype=torch.float32), whole)
    one = empty(2, 1, 1, 512, 8, 576)
    some = moves[:, :1].contiguous()
    gather_chunks(some, ChunkSource(torch.zeros(2, 129, dtype=torch.int64), 1024, 1100), one)
    whole = torch.empty(one.shape, dtype=torch.int8)
    round_chunks(some, one, empty(2, 1, 1, 576, dtype=torch.float32), whole)
    logits = empty(17, 32000, dtype=torch.float32)
    for temperature, top_k, top_p in ((0, 0, 1.0), (0.6, 0, 0.9), (1.0, 50, 1.0), (1.0, 50, 0.9)):
        distribution(logits, temperature, top_k, top_p)
    coins = torch.zeros(1, 17, dtype=torch.float64)
    for laws in (logits[None, :16], None):
        accept(torch.zeros(1, 16, dtype=torch.int64), laws, logits[None], coins)
    pick(logits, coins[0])


def launch_recurrent(dtype: torch.dtype) -> None:
    """Kernels of recurrent layers, of Qwen3.8-27B's shape: steps, passes and trees."""
    inputs, weight = torch.empty(20, 10240, dtype=dtype), torch.empty(10240, 1, 4, dtype=dtype)
    for bias, lineage in ((None, None), (weight[:, 0, 0].contiguous(), torch.zeros(17, 4).long())):
        convolve(inputs, Convolution(weight, bias, bias is None), lineage)
    state, left = torch.empty(48, 128, 128), torch.empty(48, 128, 128)
    heads = torch.empty(64, 80, 128, dtype=dtype).split((16, 16, 48), 1)
    gates = torch.empty(2, 64, 48)
    for corrects in (True, False):
        delta_chunks(DeltaRows(*heads, *gates, corrects), state, 32)
    for count, first in ((1, torch.zeros(1, dtype=torch.int64)), (17, 5), (65, 5)):
        heads = torch.empty(count, 80, 128, dtype=dtype).split((16, 16, 48), 1)
        joint, each = torch.empty(count, 96, dtype=dtype), torch.empty(48)
        gates = delta_gates(joint[:, :48], joint[:, 48:], each, each)
        rows = DeltaRows(*heads, *gates)
        gate = torch.empty(count, 48 * 128, dtype=dtype)
        gated_norm(heads[2].contiguous(), gate[0, :128].contiguous(), gate, 1e-6)
        step_gates(joint[:, :48], each, each)
        wide = torch.empty(gate.shape)
        norm_of_gated(wide, Skip(wide, each), gate[0].contiguous(), gate, 1e-6, 8)
        seen = None if count == 17 else torch.ones(count, count, dtype=torch.bool)
        room = LeftRows(left[:16], left, left[..., 0].contiguous())
        for corrects in (True, False):
            delta_rule(rows._replace(corrects=corrects), state, room, first, seen)


def launch_coded(dtype: torch.dtype) -> None:
    """Kernels of weights and KV that are not dense."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    for rows in (1, FEW_ROWS + 1):
        with same_bits(wanted=True):
            linear(empty(rows, 4096), empty(4096, 4096))
    for bits in (3, 4):
        integers = quantise(torch.zeros(4096, 4096, dtype=dtype), bits=bits)
        for rows in (1, 17, 64):
            integer_matmul(empty(rows, 4096), integers)
    weight = encode(torch.zeros(64, 4096, dtype=torch.bfloat16))
    decode_split(weight)
    decode_rows(weight, torch.zeros(3, dtype=torch.int64))
    for rows in (1, 17, 64):
        split_matmul(empty(rows, 4096), weight)
        high_bits_matmul(empty(rows, 4096), HighBitsWeight.of(weight))
    quants = [SplitQuants(64, 4096, BLOCK_TYPES[name]) for name in HIGH_QUANTS]
    for form in (SplitFP8(64, 4096), *quants):
        form.view(torch.zeros(form.nbytes, dtype=torch.uint8)).join()
    heads, tokens, head_dim = 4, 64, 128
    block = torch.zeros(heads, tokens, head_dim, dtype=torch.bfloat16)
    at = SplitBlockLayout.of(heads, tokens, head_dim)
    coded = torch.zeros(2, at.nbytes, dtype=torch.uint8)
    addresses = torch.zeros(2, 9, dtype=torch.int64)
    slots = torch.zeros(2, 2, 4, dtype=torch.int64)
    chunks = torch.zeros(2, 2, 2, 4, 8, head_dim, dtype=torch.bfloat16)
    gather_split_chunks(
        slots, SplitChunkSource(addresses, tokens, 100, at.high, at.low, at.base), chunks
    )
    encode_block(block, SplitKV.of(coded[0], at))
    decode_blocks(coded, at, block.expand(2, *block.shape))
    for name in FUSED:
        kind = ALL_TYPES[name]
        data = torch.zeros(64, kind.row_bytes(4096), dtype=torch.uint8)
        decode(data, kind, dtype)
        for rows in (1, 17, 64):
            block_matmul(empty(rows, 4096), BlockWeight(data, kind, 4096))


def launch_experts(dtype: torch.dtype) -> None:
    """Products with experts of Qwen3-30B-A3B's shape, fewer of them, in every format."""
    count, columns, depth = 8, 1536, 2048
    split = encode(torch.zeros(count * columns, depth, dtype=torch.bfloat16))
    apart = SplitExperts(count, SplitBF16(columns, depth))
    weights = [
        torch.empty(count * columns, depth, dtype=dtype),
        quantise(torch.zeros(count * columns, depth, dtype=dtype)),
        quantise(torch.zeros(count * columns, depth, dtype=dtype), bits=3),
        split,
        apart.view(torch.zeros(apart.nbytes, dtype=torch.uint8)),
        HighBitsWeight.of(split),
    ]
    for name in FUSED:
        kind = ALL_TYPES[name]
        data = torch.zeros(count * columns, kind.row_bytes(depth), dtype=torch.uint8)
        weights.append(BlockWeight(data, kind, depth))
    router = torch.empty(17, 128)
    for choice in (Choice(8), Choice(8, sigmoid=True, groups=8, chosen_groups=4)):
        choose(router, router[0] if choice.sigmoid else None, choice)
    chosen = torch.zeros(17, 2, dtype=torch.int64)
    _, order, _, experts, places = in_tiles(chosen, count)
    weighted_sums(torch.empty(32, depth, dtype=dtype), places, torch.empty(17, 2))
    x = torch.empty(17, depth, dtype=dtype)
    for weight in weights:
        product(x, weight, Tiles(EXPERT_TILE, columns, order, experts))
    if dtype == HALF:
        for weight, tile in product_of(weights, (32, 64)):
            if isinstance(weight, torch.Tensor) or tile <= weight.most_tile_rows:
                order = torch.zeros(tile * len(experts), dtype=torch.int64)
                product(x, weight, Tiles(tile, columns, order, experts))


def main(capability: int, which: str) -> None:
    launched = set()

    def implementation(kernel: str, device: torch.device) -> Callable:
        launched.add(kernel)
        return dispatch._load(KERNELS[kernel].triton)

    # Launchers look their kernels up by the device of the inputs, which is this processor.
    for name, module in list(sys.modules.items()):
        if name.startswith("triforce_kernels.") and hasattr(module, "implementation"):
            module.implementation = implementation
    blocks.has_kernel = lambda kind, device: True
    rows = []
    with compiling(capability) as compiled:
        for name, case in ATTENTION.items():
            if which == "few" and rows:
                continue
            launch_attention(case)
            rows += [(name, *kernel) for kernel in compiled]
            compiled.clear()
        for dtype in (HALF, torch.float32) if which == "all" else (HALF,):
            launch_others(dtype)
            launch_coded(dtype)
            launch_recurrent(dtype)
            launch_experts(dtype)
            rows += [(str(dtype), *kernel) for kernel in compiled]
            compiled.clear()
    print(json.dumps({"launched": sorted(launched), "rows": rows}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
