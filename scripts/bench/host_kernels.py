"""Products and attention of the processor's compiled kernels, beside reading the same bytes.

Each weight is larger than the caches. Bytes a second of a product with one row are held against
those of a sum over the same memory in the same run, in turns; then seconds with more rows.

    python scripts/bench host_kernels [--mib 160] [--repeats 7] [--threads 2]

Writes benchmarks/results/bench_host_kernels.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from frame import Benchmark, Figures, Option
from triforce_kernels.attention.streaming import attend_cache
from triforce_kernels.host.library import sum_of, vectors
from triforce_kernels.weights import integers, split_bf16
from triforce_kernels.weights.block_types import ALL_TYPES
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.high_bits import HighBitsWeight
from triforce_kernels.weights.linear import Weight, linear

COLUMNS, ROWS = 4096, (1, 4, 17, 64)
BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("MXFP4", "F8_E4M3", "INT4_128", "INT4_32", "F16", "BF16"),
)


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    if args.threads:
        torch.set_num_threads(args.threads)
    yield {"vectors": vectors(), "columns": COLUMNS, "mib": args.mib}
    memory = torch.ones(args.mib << 17, dtype=torch.int64)
    for name in (*BLOCKS, "float32", "split bf16", "high bits", "int4", "int3"):
        weight, nbytes = make(name, args.mib << 20)
        seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
        reading: list[float] = []
        for _ in range(args.repeats):
            reading.append(timed(lambda: sum_of(memory)))
            for rows in ROWS:
                x = torch.randn(rows, COLUMNS)
                seconds[rows].append(timed(lambda x=x, weight=weight: linear(x, weight)))
        rate, ceiling = nbytes / median(seconds[1]), memory.nbytes / median(reading)
        yield {
            "products": {
                name: {
                    "bytes_per_second": rate,
                    "read_bytes_per_second": ceiling,
                    "share_of_reading": rate / ceiling,
                    "milliseconds": {rows: 1e3 * median(each) for rows, each in seconds.items()},
                }
            }
        }
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        yield {"attention": {name: attention(dtype, args.repeats, memory)}}


def attention(dtype: torch.dtype, repeats: int, memory: torch.Tensor) -> Figures:
    """Time one query of 32 heads, and 17, over 8 KV heads of 128 and 32,768 keys."""
    cache, found = torch.randn(2, 8, 32768, 128).to(dtype), {}
    for tokens in (1, 17):
        query = torch.randn(8, 4 * tokens, 128).to(dtype)
        seconds, reading = [], []
        for _ in range(repeats):
            reading.append(timed(lambda: sum_of(memory)))
            seconds.append(timed(lambda t=tokens, q=query: attend_cache(q, *cache, t, 32768 - t)))
        rate, ceiling = cache.nbytes / median(seconds), memory.nbytes / median(reading)
        found[f"{tokens} tokens"] = {
            "milliseconds": 1e3 * median(seconds),
            "bytes_per_second": rate,
            "share_of_reading": rate / ceiling,
        }
    return found


def make(name: str, nbytes: int) -> tuple[Weight, int]:
    """Return a random weight of about `nbytes`, and the bytes that a product reads."""
    if name in BLOCKS:
        kind = ALL_TYPES[name]
        rows = nbytes // kind.row_bytes(COLUMNS)
        # The time of a product does not depend on its numbers, unless they are denormal: zeros have
        # scales of zero, but in MXFP4 the least one.
        value = 127 if name == "MXFP4" else 0
        data = torch.full((rows, kind.row_bytes(COLUMNS)), value, dtype=torch.uint8)
        if name.startswith("IQ"):
            # Indices of a table should differ; scales are 1 in half precision.
            data.random_(0, 256).view(rows, -1, kind.nbytes)[..., :2] = torch.tensor([0, 0x3C])
        return BlockWeight(data, kind, COLUMNS), data.nbytes
    each = {"float32": 4, "split bf16": 1.5, "high bits": 1, "int4": 0.5, "int3": 0.375}[name]
    dense = torch.randn(int(nbytes / each) // COLUMNS, COLUMNS)
    if name == "float32":
        return dense, dense.nbytes
    if name.startswith("int"):
        bits = int(name[-1])
        packed = torch.zeros(len(dense), COLUMNS * bits // 8, dtype=torch.uint8)
        scale = torch.ones(COLUMNS // 64, len(dense))
        weight = integers.IntegerWeight(packed, scale, scale.clone(), 64, bits)
        return weight, weight.nbytes
    split = split_bf16.encode(dense.bfloat16())
    whole = split.high.nbytes + split.low.nbytes
    return (split, whole) if name == "split bf16" else (HighBitsWeight.of(split), split.high.nbytes)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


main = Benchmark(
    __doc__,
    "bench_host_kernels",
    measure,
    (
        Option("--mib", 160, "size of each weight"),
        Option("--repeats", 7, "of each, in turns"),
        Option("--threads", 0, "0 for as many as torch uses"),
    ),
)
