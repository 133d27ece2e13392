"""Attention over a KVStore: what the model calls, whatever the placement.

Block by block and in token order at every placement, so that streamed and resident KV give bitwise
equal results.
"""

from __future__ import annotations

import torch
from triforce_kernels.attention import Partial, merge, partial_attention

from .conveyor import Conveyor
from .kv import Block, KeysValues, KVStore
from .scores import ChunkScores
from .sizes import SCORED_TOKENS


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

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of the pass's next tokens.

        query: [heads, tokens, head_dim]; key, value: [kv_heads, tokens, head_dim], rotated already.
        Returns [heads, tokens, head_dim].
        """
        store = self._store
        heads, tokens, head_dim = query.shape
        kv_heads = key.shape[0]
        store.append(layer, key, value)
        rows = query.reshape(kv_heads, heads // kv_heads * tokens, head_dim)
        scores = self._scores if self._scores and self._scores.enabled else None
        partials = []

        def attend_to(
            keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
        ) -> None:
            partials.append(partial_attention(rows, keys, values, mask=mask))
            if scores:
                scores.add(rows, keys, partials[-1], mask)

        for block in store.layer_blocks(layer):
            if block.resident is not None:
                attend_to(*block.resident)
            else:
                attend_to(*self._arrived(block))
                self._conveyor.release(block.key)
        keys, values = store.tail(layer)
        attend_to(keys, values, causal_mask(tokens, keys.shape[1], heads // kv_heads, query))
        if scores:
            scores.end_layer(layer, partials, tokens)
        return merge(partials).view(heads, tokens, head_dim)

    def _arrived(self, block: Block) -> KeysValues:
        """A streamed block's keys and values, in the slot it came to."""
        buffer = self._conveyor.acquire(block.key)
        views = self._slots.get(buffer.data_ptr())
        if views is None:
            views = self._slots[buffer.data_ptr()] = self._store.shape.keys_values(buffer)
        return views


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

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As KVPass.attend, over the prompt's tokens so far."""
        heads, tokens, head_dim = query.shape
        kv_heads = key.shape[0]
        group = heads // kv_heads
        start, end = self._done, self._done + tokens
        self._gathered[0, :, start:end] = key
        self._gathered[1, :, start:end] = value
        partials = [
            partial_attention(
                query,
                key.repeat_interleave(group, 0),
                value.repeat_interleave(group, 0),
                causal=True,
            )
        ]
        if start:
            keys, values = self._gathered[:, :, :start]
            rows = query.reshape(kv_heads, group * tokens, head_dim)
            past = partial_attention(rows, keys, values)
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
        heads, tokens, head_dim = query.shape
        kv_heads = self._gathered.shape[1]
        rows = query.reshape(kv_heads, heads // kv_heads * tokens, head_dim)
        size = self._store.shape.block_tokens
        last = (self._tokens - tokens) // size * size
        partials = []
        for start in range(0, last + 1, size):
            stop, mask = start + size, None
            if start == last:
                stop = self._tokens
                mask = causal_mask(tokens, stop - start, heads // kv_heads, query)
            keys, values = self._gathered[:, :, start:stop]
            partials.append(partial_attention(rows, keys, values, mask=mask))
            self._scores.add(rows, keys, partials[-1], mask)
        self._scores.end_layer(layer, partials, tokens)


def causal_mask(tokens: int, keys: int, group: int, like: torch.Tensor) -> torch.Tensor | None:
    """Additive causal mask of the last `tokens` of `keys`, repeated for each head of a group."""
    if tokens == 1:
        return None
    mask = torch.full((tokens, keys), float("-inf"), dtype=like.dtype, device=like.device)
    return mask.triu_(keys - tokens + 1).repeat(group, 1)
