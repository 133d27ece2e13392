"""Attention over a KVStore: what the model calls, whatever the placement.

Block by block and in token order at every placement, so that streamed and resident KV give bitwise
equal results.
"""

from __future__ import annotations

import torch
from triforce_kernels.attention import Partial, merge, partial_attention
from triforce_kernels.streaming import Running, attend_blocks, attend_tail

from offload.conveyor import Conveyor
from offload.kv.scores import ChunkScores
from offload.kv.sizes import SCORED_TOKENS
from offload.kv.store import Block, KeysValues, KVStore, Room


class KVPass:
    """A pass's view of a KVStore: attention over everything committed and the pass's own tokens."""

    def __init__(
        self, store: KVStore, conveyor: Conveyor, scores: ChunkScores | None = None
    ) -> None:
        """scores: collects what each chunk of keys is worth to the pass, if given."""
        self._store = store
        self._conveyor = conveyor
        self._scores = scores
        self._slots: dict[int, KeysValues] = {}

    def room(self, layer: int, tokens: int) -> Room:
        """model.Cache.room."""
        return self._store.room(layer, tokens)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """model.Cache.attend."""
        store = self._store
        scores = self._scores if self._scores and self._scores.enabled else None
        blocks, tail = store.layer_blocks(layer), store.tail(layer)
        keys = len(blocks) * store.shape.block_tokens + tail.shape[2]
        attention = PassAttention(query, store.shape.kv_heads, scores, keys)
        resident = store.resident(layer)
        attention.blocks(*resident)
        for block in blocks[resident.shape[1] :]:
            key, value = self._arrived(block)
            attention.blocks(key.unsqueeze(0), value.unsqueeze(0))
            self._conveyor.release(block.key)
        out = attention.tail(*tail)
        attention.end_layer(layer)
        return out

    def _arrived(self, block: Block) -> KeysValues:
        """A streamed block's keys and values, in the slot it came to."""
        buffer = self._conveyor.acquire(block.key)
        views = self._slots.get(buffer.data_ptr())
        if views is None:
            views = self._slots[buffer.data_ptr()] = self._store.shape.keys_values(buffer)
        return views


class PassAttention:
    """One layer's attention of some tokens, as the keys come: blocks in token order, then the tail.

    Scores of chunks are collected on the way.
    """

    def __init__(
        self, query: torch.Tensor, kv_heads: int, scores: ChunkScores | None, keys: int
    ) -> None:
        """query: [heads, tokens, head_dim]; keys: all there will be, the tokens' own included."""
        heads, self._tokens, head_dim = self._shape = query.shape
        self._rows = query.reshape(kv_heads, heads // kv_heads * self._tokens, head_dim)
        self._running = Running.of(self._rows)
        self._scores = scores
        self._keys = keys
        self._sheet = scores.sheet(self._rows, keys) if scores else None
        self._lse: torch.Tensor | None = None

    def blocks(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Blocks that all tokens see, [blocks, kv_heads, tokens, head_dim]; of each but the last,
        and of the last but for the tail, a whole number of chunks.
        """
        attend_blocks(self._running, self._rows, key, value, self._sheet)
        if self._sheet:
            chunks = key.shape[0] * (key.shape[2] // self._sheet.size)
            self._sheet = self._sheet.at(self._sheet.first + chunks)

    def tail(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The newest keys, [kv_heads, tail, head_dim], of which the last are the tokens' own.

        Returns the whole attention, [heads, tokens, head_dim].
        """
        # Whole chunks that all see are a block like any other: it is read by more of the device.
        size = self._sheet.size if self._sheet else 1
        seen = (key.shape[1] - self._tokens) // size * size
        self.blocks(key[None, :, :seen], value[None, :, :seen])
        out, self._lse = attend_tail(
            self._running,
            self._rows,
            key[:, seen:],
            value[:, seen:],
            self._tokens,
            scores=self._sheet,
        )
        return out.view(self._shape)

    def end_layer(self, layer: int) -> None:
        """Hands the scores in, if they are collected."""
        if self._scores:
            self._scores.end_layer(layer, self._lse, self._tokens, self._keys)


class PrefillPass:
    """A prompt's first pass: a layer's KV is gathered on the device, then stored block by block.

    Every layer's KV crosses the link once, to the host. Chunks of the prompt attend to the chunks
    before them without a mask, and to themselves causally.
    """

    def __init__(
        self,
        store: KVStore,
        tokens: int,
        gathered: torch.Tensor,
        scores: ChunkScores | None = None,
    ) -> None:
        """gathered: flat uint8 device buffer of tokens * shape.token_bytes bytes.

        scores: gets what each chunk of the prompt is worth to the prompt's last tokens, if given.
        """
        shape = store.shape
        self._scores = scores
        self._store = store
        self._gathered = gathered.view(shape.dtype).view(2, shape.kv_heads, tokens, shape.head_dim)
        self._tokens = tokens
        self._done = 0

    def room(self, layer: int, tokens: int) -> Room:
        """model.Cache.room."""
        return Room(*self._gathered, self._done)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """model.Cache.attend, over the prompt's tokens so far."""
        heads, tokens, head_dim = query.shape
        kv_heads = self._gathered.shape[1]
        group = heads // kv_heads
        start, end = self._done, self._done + tokens
        keys, values = self._gathered
        own = (x[:, start:end].repeat_interleave(group, 0) for x in (keys, values))
        partials = [partial_attention(query, *own, causal=True)]
        if start:
            rows = query.reshape(kv_heads, group * tokens, head_dim)
            past = partial_attention(rows, keys[:, :start], values[:, :start])
            partials.append(
                Partial(past.out.reshape(heads, tokens, head_dim), past.lse.reshape(heads, tokens))
            )
        self._done = end % self._tokens
        if end == self._tokens:
            if self._scores:
                self._score(layer, query[:, -SCORED_TOKENS:])
            self._store.fill(layer, self._gathered)
        else:
            self._store.fill(layer, self._gathered, end)
        return merge(partials)

    def _score(self, layer: int, query: torch.Tensor) -> None:
        """What the prompt's chunks are worth to its last tokens: query [heads, tokens, head_dim]"""
        tokens, size = query.shape[1], self._store.shape.block_tokens
        whole = (self._tokens - tokens) // size
        blocks = self._gathered[:, :, : whole * size].unflatten(2, (whole, size)).transpose(1, 2)
        attention = PassAttention(query, self._gathered.shape[1], self._scores, self._tokens)
        attention.blocks(*blocks)
        attention.tail(*self._gathered[:, :, whole * size :])
        attention.end_layer(layer)
