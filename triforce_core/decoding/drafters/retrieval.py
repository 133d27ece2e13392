"""The retrieval cache: the chunks of the full KV cache that matter now, on the device."""

from __future__ import annotations

import torch

from triforce_core.plan.levels import chosen_bytes, own_tokens
from triforce_kernels.kv.selection import choose_chunks
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.rounded import RoundedKV
from triforce_offload.kv.gather import Reader
from triforce_offload.kv.scores import ChunkScores, Score
from triforce_offload.kv.store import KVStore
from triforce_offload.link.waiting import number
from triforce_offload.memory.device import DeviceMemory

# mass: exact attention mass of the passes' queries, chosen anew after every pass.
# mean: query times mean key, chosen once after prefill, as the published TriForce; and again only
# when new tokens have taken a quarter of the budget.
POLICIES = {"mass": Score.MASS, "mean": Score.MEAN}

# Tokens that are always in, besides the first chunk and the chunk that fills.
_NEWEST_TOKENS = 32
# The share of the budget, as a divisor, that new tokens take before `mean` chooses anew.
_MEAN_REFRESH = 4


class RetrievalCache:
    """KV that the retrieval model attends to: for each layer and KV head its own chunks.

    Each head's keys (and values) lie in one row of `kv`: its chunks in any order, then the tokens
    of the chunk that is not full yet, then the tokens fed since the last pass. The latter two are
    common to all heads. `refresh` takes over what a pass has kept; nothing is overwritten in
    between, so a text may grow past any budget. `roll_back` forgets chunks of which the text may
    say something else now.
    """

    def __init__(
        self,
        store: KVStore,
        reader: Reader,
        memory: DeviceMemory,
        scores: ChunkScores,
        policy: str,
        budget: int,
        chunk_tokens: int,
        max_draft_tokens: int,
        *,
        rounded: bool = False,
    ) -> None:
        """reader: brings what is chosen. budget: tokens in chunks, a multiple of chunk_tokens.

        rounded: whether it is kept in 8 bits. Raises DoesNotFitError.
        """
        shape = store.shape
        self.budget = budget
        self._store = store
        self._scores = scores
        self._policy = policy
        self._chunk = chunk_tokens
        self._slots = budget // chunk_tokens
        self._newest = min(self._slots - 1, max(1, _NEWEST_TOKENS // chunk_tokens))
        tokens = budget + own_tokens(chunk_tokens, max_draft_tokens)
        self._reader = reader
        self._memory = memory
        self._allocation = memory.allocate(chosen_bytes(shape, self._slots), "chosen chunks")
        try:
            self.kv = (RoundedKV if rounded else DenseKV)(shape, tokens, memory, "retrieval cache")
        except BaseException:
            memory.free(self._allocation)
            raise
        self._chunk_of = self._allocation.bytes.view(torch.int64)
        self._chunk_of = self._chunk_of.view(shape.layers, shape.kv_heads, self._slots).fill_(-1)
        self._filled = 0
        self._chosen_at = 0
        self._measured_at = 0
        self.begin()

    @property
    def length(self) -> int:
        """Tokens of the text that were fed, at whatever level: the next one's position."""
        own = self.kv.end - self._filled * self._chunk
        return self._store.length - self._store.length % self._chunk + own

    def begin(self) -> None:
        """A request begins: its text is about to be read, and chunks are chosen by it. Waits for
        the device.
        """
        self._reader.release()
        self._base_scores: torch.Tensor | None = None
        self._scores.enabled = True
        self._first = True
        self._chosen = 0
        # On the device, which is not asked for it in between.
        self._moved: torch.Tensor | int = 0
        self._read_before = self._reader.bytes_read

    @property
    def churn(self) -> float | None:
        """Share of the chosen chunks that had to be moved, over all refreshes of a request but its
        first. Asking waits for the device. Raises LinkError.
        """
        return number(self._moved) / self._chosen if self._chosen else None

    @property
    def bytes_read_in_place(self) -> int:
        """Bytes of chunks that the device read from host memory itself. Raises LinkError."""
        return self._reader.bytes_read - self._read_before

    def expect(self, tokens: int) -> None:
        """Says that a pass of `tokens` tokens comes: scores are collected if they will be used."""
        self._scores.enabled = self._policy == "mass" or self._is_due(tokens)

    def refresh(self, tokens: int) -> None:
        """Takes over the first `tokens` tokens of the pass, or of the prompt's scored end, that
        was just kept: chooses chunks, moves those that changed, forgets what was drafted.

        Raises LinkError.
        """
        chunks = self._store.length // self._chunk
        if isinstance(self.kv, RoundedKV) and self._store.length >= 2 * self._measured_at:
            # What scales were measured by is a small part of the text, or of another one.
            self._measured_at = self._store.length
            self._chunk_of.fill_(-1)
            self._first = True
            self.kv.measure_again(self._store.length)
        if chunks:
            scores = self._current_scores(tokens, chunks)
            moves = choose_chunks(scores, self._chunk_of, chunks, self._newest)
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
        self.kv.end = start + rest

    def roll_back(self, tokens: int) -> None:
        """Forgets chunks that are not among the first `tokens` tokens of the text."""
        chunks = tokens // self._chunk
        self._measured_at = min(self._measured_at, tokens)
        self._chunk_of.masked_fill_(self._chunk_of >= chunks, -1)
        # Where a text has fewer chunks than slots the others are not used.
        self._filled = min(self._slots, chunks)
        self._chunk_of[..., self._filled :] = -1
        self.kv.end = self._filled * self._chunk

    def close(self) -> None:
        self._reader.close()
        self.kv.close()
        self._memory.free(self._allocation)
        del self._chunk_of

    def _is_due(self, tokens: int) -> bool:
        grown = self._store.length + tokens - self._chosen_at
        return grown * _MEAN_REFRESH > self.budget

    def _current_scores(self, tokens: int, chunks: int) -> torch.Tensor:
        """[layers, kv_heads, chunks]; chunks that are newer than the scores are worth most."""
        if self._base_scores is None or self._scores.enabled:
            scores = self._scores.take(tokens, chunks)
            self._chosen_at = self._store.length
            if self._policy == "mean":
                self._base_scores = scores
                self._scores.enabled = False
            return scores
        base = self._base_scores
        # Chunks that came later are worth more than any score, the newest most.
        later = 1e20 * torch.arange(1, 1 + chunks - base.shape[2], device=base.device)
        return torch.cat((base, later.expand(*base.shape[:2], -1)), -1)
