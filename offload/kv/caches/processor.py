"""Attention of a pass to blocks of KV where they are in host memory, by the processor.

A thread waits for the queries, computes, and leaves the result in host memory. The link goes on
meanwhile, and so does the device with the blocks that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from triforce_kernels.attention.attention import Partial
from triforce_kernels.attention.scoring import ScoreBuffer
from triforce_kernels.attention.streaming import Running, attend_blocks, attend_tail
from triforce_offload.kv.block_format import BlockFormat, DenseBlocks, SplitBlocks
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.store import KVStore
from triforce_offload.link.link import Link
from triforce_offload.link.trace import Tracer
from triforce_offload.link.waiting import patience
from triforce_offload.plan.placement import left_to_processor
from triforce_offload.weights.locations import Location

# Bytes of split blocks that are decoded at a time: they should stay in the processor's caches.
_DECODED_BYTES = 4 << 20


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of a layer in host memory.

    layer: index among the layers that store KV in blocks
    first: index of the first block
    """

    layer: int
    first: int
    locations: Sequence[Location]


class PendingAttention:
    """Attention to some blocks that is being computed. `take` waits for it."""

    def __init__(
        self, result: Future[Partial], scores: ScoreBuffer | None, into: ScoreBuffer | None
    ) -> None:
        """scores: where the processor writes scores of chunks; into: where they belong"""
        self._result = result
        self._scores = scores
        self._into = into

    def take(self, device: torch.device) -> Partial:
        """Return the attention on a device, and give the scores of chunks to their buffer.

        Raises whatever the computation raised.
        """
        part = self._result.result()
        if self._scores is not None:
            chunks = self._scores.out.shape[2]
            into = self._into.out[:, :, self._into.first : self._into.first + chunks]
            into.copy_(self._scores.out, non_blocking=True)
        return Partial(*(each.to(device, non_blocking=True) for each in part))


class ProcessorAttention:
    """The thread that attends, one layer after the other."""

    def __init__(self, shape: KVShape, share: float, link: Link, trace: Tracer) -> None:
        """share: of a layer's blocks that are in host memory alone, how many it attends to"""
        self._shape = shape
        self._share = share
        self._link = link
        self._trace = trace
        self._dense = DenseBlocks(shape)
        self._split: BlockFormat | None = None
        if shape.split:
            count = max(1, _DECODED_BYTES // shape.dense_block_bytes)
            room = torch.empty(count * shape.dense_block_bytes, dtype=torch.uint8)
            self._split = SplitBlocks(shape, room)
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "processor", torch.set_num_threads, (threads,))

    def blocks(self, store: KVStore, layer: int) -> range:
        """Return which of a layer's blocks it attends to in a pass: the oldest of those that have
        no place on the device.
        """
        first = store.first_away(layer)
        count = left_to_processor(self._share, max(0, len(store.locations(layer)) - first))
        return range(first, first + count)

    def begin(
        self,
        query: torch.Tensor,
        blocks: Blocks,
        into: ScoreBuffer | None,
        cap: float | None = None,
    ) -> PendingAttention:
        """Start attention of queries [kv_heads, rows, head_dim] on the device to blocks.

        into: where scores of chunks belong, from the chunk of the blocks' first key; or None
        cap: see `Softmax`
        """

        def room(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            """Return host memory that copies need not wait for."""
            return torch.empty(size, dtype=dtype, pin_memory=query.is_cuda)

        here, after, into_host = query, None, None
        if query.is_cuda:
            here = room(*query.shape, dtype=query.dtype).copy_(query, non_blocking=True)
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(query.device))
            into_host = Partial(room(*query.shape, dtype=query.dtype), room(*query.shape[:2]))
        scores = None
        if into is not None:
            chunks = len(blocks.locations) * -(-self._shape.block_tokens // into.size)
            scores = ScoreBuffer(room(*query.shape[:2], chunks), 0, into.size)

        def compute() -> Partial:
            if after is not None:
                patience(query.device).wait(after)
            with self._trace.processor("attention", layer=blocks.layer), torch.inference_mode():
                part = self._attended(here, blocks, scores, cap)
                if into_host is None:
                    return part
                for pinned, each in zip(into_host, part, strict=True):
                    pinned.copy_(each)
                return into_host

        return PendingAttention(self._thread.submit(compute), scores, into)

    def drain(self) -> None:
        """Wait until nothing is computed any more: blocks may then change, or be freed."""
        # The thread takes one after the other; once closed, it takes nothing.
        with suppress(RuntimeError):
            self._thread.submit(int).result()

    def close(self) -> None:
        self._thread.shutdown()

    def _attended(
        self, query: torch.Tensor, blocks: Blocks, scores: ScoreBuffer | None, cap: float | None
    ) -> Partial:
        running = Running.of(query, cap)
        running.keys = blocks.first * self._shape.block_tokens
        for run in adjacent(blocks.locations):
            for event in (event for each in run if each.source for event in each.source.after):
                self._link.wait_on_host(event)
            stored = self._split if self._split and not run[0].dense else self._dense
            for key, value in stored.runs(_as_one(run)):
                attend_blocks(running, query, key, value, scores)
                if scores is not None:
                    chunks = len(key) * (key.shape[2] // scores.size)
                    scores = scores.at(scores.first + chunks)
        none = query.new_empty(query.shape[0], 0, query.shape[2])
        return attend_tail(running, query, none, none, 1)


def adjacent(locations: Sequence[Location]) -> Iterator[list[Location]]:
    """Yield locations in runs, each of blocks of one kind that lie at equal distances in one piece
    of memory, one behind the other.
    """
    run: list[Location] = []
    for location in locations:
        if run and not _follows(run, location):
            yield run
            run = []
        run.append(location)
    if run:
        yield run


def _follows(run: Sequence[Location], location: Location) -> bool:
    last, memory = run[-1].memory, location.memory
    step = memory.data_ptr() - last.data_ptr()
    same = memory.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    even = len(run) == 1 or step == last.data_ptr() - run[-2].memory.data_ptr()
    return same and even and step >= last.numel() and location.dense == run[0].dense


def _as_one(run: Sequence[Location]) -> torch.Tensor:
    """Return the blocks of a run, [blocks, bytes of one] uint8."""
    first = run[0].memory
    step = run[1].memory.data_ptr() - first.data_ptr() if len(run) > 1 else first.numel()
    return first.as_strided((len(run), first.numel()), (step, 1))
