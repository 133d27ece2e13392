"""The retrieval cache: the most relevant chunks of the full KV cache, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_core.decoding.drafters.drafted_rows import DraftedRows, TreeRows
from triforce_core.plan.levels import chosen_bytes, own_tokens
from triforce_kernels.kv.selection import choose_chunks
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.rounded import RoundedKV
from triforce_offload.kv.gather import Reader
from triforce_offload.kv.recent.stores import NO_STORES, RecentStores
from triforce_offload.kv.scores import ChunkScores
from triforce_offload.kv.store import KVStore
from triforce_offload.link.waiting import number
from triforce_offload.memory.device import DeviceMemory

# Recent tokens that are always included, besides the first chunk and the incomplete chunk.
_NEWEST_TOKENS = 32


class RetrievalCache:
    """The KV that the retrieval level attends to: each layer and KV head has its own chunks.

    The keys (and values) of a head are in one row of `kv`: its chunks in any order, then the tokens
    of the incomplete chunk, then the tokens drafted since the last pass. The latter two groups are
    common to all heads. `refresh` takes over the tokens that a pass has kept. Nothing is
    overwritten in between, so a text may grow past any budget. `roll_back` forgets the chunks whose
    tokens may change.
    """

    def __init__(
        self,
        store: KVStore,
        reader: Reader,
        memory: DeviceMemory,
        scores: ChunkScores,
        budget: int,
        chunk_tokens: int,
        max_draft_tokens: int,
        *,
        recent: RecentStores = NO_STORES,
        rounded: bool = False,
    ) -> None:
        """reader: copies the chosen chunks to the device
        budget: number of tokens in chunks, a multiple of chunk_tokens
        recent: the windows and states of the sequence
        rounded: whether the cache keeps its tokens in 8 bits
        Raises DoesNotFitError.
        """
        shape = store.shape
        self.budget = budget
        self._store = store
        self._scores = scores
        self._chunk = chunk_tokens
        self._slots = budget // chunk_tokens
        self._newest = min(self._slots - 1, max(1, _NEWEST_TOKENS // chunk_tokens))
        tokens = budget + own_tokens(chunk_tokens, max_draft_tokens)
        self._reader = reader
        self._memory = memory
        self._allocation = memory.allocate(chosen_bytes(shape, self._slots), "chosen chunks")
        try:
            kind = RoundedKV if rounded else DenseKV
            self.kv = kind(shape, tokens, memory, "retrieval cache", recent)
        except BaseException:
            memory.free(self._allocation)
            raise
        self._chunk_of = self._allocation.bytes.view(torch.int64)
        self._chunk_of = self._chunk_of.view(shape.layers, shape.kv_heads, self._slots).fill_(-1)
        self._drafted = DraftedRows()
        self._filled = 0
        self._measured_at = 0
        self.begin()

    @property
    def length(self) -> int:
        """Number of tokens with KV, kept or only drafted: if the drafted rows are a chain, the
        position of the next token.
        """
        own = self.kv.end - self._filled * self._chunk
        return self._store.length - self._store.length % self._chunk + own

    def follow(self, count: int, parents: Sequence[int] | None) -> TreeRows | None:
        """Return how the `count` rows of the next forward follow the drafted ones; None if all of
        them are a chain. parents: see `DraftLevels.draft`
        """
        return self._drafted.follow(count, parents, self.length - len(self._drafted))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep rows of the last forward, in this order, as drafted ones: each with the row that it
        follows.
        """
        self.kv.keep(rows)
        self._drafted.keep(rows)

    def begin(self) -> None:
        """Prepare for the prefill of a request. Waits for the device."""
        self._reader.release()
        self._first = True
        self._chosen = 0
        # A tensor on the device, so that counting never waits.
        self._moved: torch.Tensor | int = 0
        self._read_before = self._reader.bytes_read

    @property
    def churn(self) -> float | None:
        """Share of the chosen chunks that had to be copied, over all refreshes of a request except
        the first. Waits for the device. Raises LinkError.
        """
        return number(self._moved) / self._chosen if self._chosen else None

    @property
    def bytes_read_in_place(self) -> int:
        """Bytes of chunks that the device itself read from host memory. Raises LinkError."""
        return self._reader.bytes_read - self._read_before

    def refresh(self, tokens: int) -> None:
        """Take over the tokens that the last pass or prefill kept: choose chunks, copy those that
        changed, and forget drafted tokens.

        tokens: number of rows, from the first, whose scores count; of a pass, or of the scored end
            of a prompt
        Raises LinkError.
        """
        chunks = self._store.length // self._chunk
        if isinstance(self.kv, RoundedKV) and self._store.length >= 2 * self._measured_at:
            # The scales were measured on a small part of this text, or on another text.
            self._measured_at = self._store.length
            self._chunk_of.fill_(-1)
            self._first = True
            self.kv.measure_again(self._store.length)
        # If no layer has KV, the level drafts by cheaper weights alone.
        if chunks and self._store.shape.layers:
            worth = self._worth(tokens, chunks)
            moves = choose_chunks(worth, self._chunk_of, chunks, self._newest)
            self._filled = min(self._slots, chunks)
            self.kv.gather(moves, self._reader, self._chunk)
            self._reader.count(moves, self._chunk)
            if not self._first:
                self._moved = self._moved + (moves >= 0).sum()
                self._chosen += self._chunk_of[..., : self._filled].numel()
            self._first = False
        rest = self._store.length % self._chunk
        start = self._filled * self._chunk
        self.kv.write(start, self._store.newest(rest))
        self._forget_drafted(start + rest)

    def roll_back(self, tokens: int) -> None:
        """Forget chunks that are not among the first `tokens` tokens of the text."""
        chunks = tokens // self._chunk
        self._measured_at = min(self._measured_at, tokens)
        self._chunk_of.masked_fill_(self._chunk_of >= chunks, -1)
        # If a text has fewer chunks than there are slots, the other slots are unused.
        self._filled = min(self._slots, chunks)
        self._chunk_of[..., self._filled :] = -1
        self._forget_drafted(self._filled * self._chunk)

    def close(self) -> None:
        self._reader.close()
        self.kv.close()
        self._memory.free(self._allocation)
        del self._chunk_of

    def _forget_drafted(self, end: int) -> None:
        """Set the end of the cache, which has no drafted tokens."""
        self.kv.end = end
        self.kv.recent.forget()
        self._drafted.forget()

    def _worth(self, tokens: int, chunks: int) -> torch.Tensor:
        """Return what each chunk is worth, [layers, kv_heads, chunks] float32."""
        return self._scores.take(tokens, chunks)
