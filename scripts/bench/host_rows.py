"""What reading a number costs the processor's kernels, in rows that it is multiplied with.

Products of 1 to 64 rows, and attention of 1 to 64 queries to dense and to split blocks of KV, with
what is read in bfloat16. The seconds of 8 rows and more, for which numbers are decoded to a buffer
first, give the rate of the arithmetic, and how many further rows take as long as reading: the
planner's constants for a processor.

    python scripts/bench host_rows [--threads 2]

Writes benchmarks/results/bench_host_rows.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import linear_regression

import torch

from frame import Benchmark, Figures, Option
from triforce_kernels.attention.streaming import Running, attend_blocks
from triforce_kernels.kv.split_kv import SplitKV, decode_blocks, encode_block
from triforce_kernels.weights import split_bf16
from triforce_kernels.weights.block_types import ALL_TYPES
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.linear import Weight, linear
from triforce_offload.kv.shape import SplitBlockLayout
from triforce_offload.machine.openmp import limit_busy_waiting
from triforce_offload.machine.timing import seconds_of

ROWS = (1, 4, 8, 16, 32, 64)
# Fewer rows are multiplied as numbers are decoded, and read in less time.
BUFFERED = ROWS[2:]
SIZE, MATRICES = 4096, 4
# Heads of keys, tokens and numbers of a block; as many blocks as no cache of a processor holds.
HEADS, TOKENS, HEAD_DIM, BLOCKS = 32, 512, 128, 16


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    torch.set_num_threads(args.threads)
    limit_busy_waiting()
    torch.manual_seed(0)
    yield {"threads": args.threads, "dtype": "bfloat16"}
    with torch.inference_mode():
        for name in ("bfloat16", "split bfloat16", *args.types):
            weights = [matrix(name) for _ in range(MATRICES)]
            yield {"products": {name: fitted(products(weights), MATRICES * SIZE * SIZE)}}
        for name, attention in (("dense", dense()), ("split", split())):
            yield {"attention": {name: fitted(attention, 2 * BLOCKS * HEADS * TOKENS * HEAD_DIM)}}


def matrix(name: str) -> Weight:
    """Return a matrix of any numbers in a format."""
    if "bfloat16" in name:
        dense = torch.randn(SIZE, SIZE).bfloat16()
        return dense if name == "bfloat16" else split_bf16.encode(dense)
    kind = ALL_TYPES[name]
    blocks = torch.randint(0, 100, (SIZE, kind.row_bytes(SIZE)), dtype=torch.uint8)
    return BlockWeight(blocks, kind, SIZE)


def products(weights: list[Weight]) -> Callable[[int], None]:
    def run(rows: int) -> None:
        x = torch.ones(rows, SIZE, dtype=torch.bfloat16)
        for weight in weights:
            linear(x, weight)

    return run


def dense() -> Callable[[int], None]:
    """Return attention of some queries of each head to all blocks."""
    blocks = torch.randn(BLOCKS, 2, HEADS, TOKENS, HEAD_DIM).bfloat16()

    def run(rows: int) -> None:
        query = torch.randn(HEADS, rows, HEAD_DIM).bfloat16()
        attend_blocks(Running.of(query), query, *blocks.unbind(1))

    return run


def split() -> Callable[[int], None]:
    """Return the same of blocks that are decoded first, one after the other."""
    at = SplitBlockLayout.of(2 * HEADS, TOKENS, HEAD_DIM)
    blocks = torch.zeros(BLOCKS, at.nbytes, dtype=torch.uint8)
    for block in blocks:
        encode_block(torch.randn(2 * HEADS, TOKENS, HEAD_DIM).bfloat16(), SplitKV.of(block, at))
    decoded = torch.empty(1, 2 * HEADS, TOKENS, HEAD_DIM, dtype=torch.bfloat16)

    def run(rows: int) -> None:
        query = torch.randn(HEADS, rows, HEAD_DIM).bfloat16()
        running = Running.of(query)
        for block in blocks:
            decode_blocks(block[None], at, decoded)
            attend_blocks(running, query, *decoded.unflatten(1, (2, HEADS)).unbind(1))

    return run


def fitted(run: Callable[[int], None], numbers: int) -> Figures:
    """Return the seconds by rows, and the line of least squares through those of BUFFERED. numbers:
    that are read
    """
    seconds = {rows: seconds_of(lambda rows=rows: run(rows)) for rows in ROWS}
    each, reading = linear_regression(BUFFERED, [seconds[rows] for rows in BUFFERED])
    return {
        "ms": {str(rows): 1e3 * taken for rows, taken in seconds.items()},
        "gflop_per_s": 2 * numbers / each / 1e9,
        "rows_of_reading": reading / each,
    }


main = Benchmark(
    __doc__,
    "bench_host_rows",
    measure,
    (
        Option("--threads", 2, "threads that compute"),
        Option("--types", ["Q4_K", "Q8_0", "MXFP4"], "types of blocks"),
    ),
)
