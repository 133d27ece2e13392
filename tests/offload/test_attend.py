"""Attention over a store, in passes and while text is read, equals attention spelt out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from float_bounds import assert_within, attention_bound
from kv_stores import SHAPE, make_store, start

from triforce_offload.conveyor import Conveyor
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.attend import PassCache
from triforce_offload.kv.caches.prefill import PrefillCache
from triforce_offload.kv.store import KVStore
from triforce_offload.schedule import KV

HEADS = 4


class Text:
    """Random queries, keys and values, and their causal attention, spelt out."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.qkv = torch.randn(tokens, HEADS + 2 * SHAPE.kv_heads, 8, generator=generator)
        self.seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def batch(self, first: int, end: int, parents: Sequence[int] | None = None) -> ForwardBatch:
        rows = end - first
        # No rotation: cosines of one and sines of zero.
        rotation = (torch.ones(rows, 8), torch.zeros(rows, 8))
        parents = None if parents is None else tuple(parents)
        return ForwardBatch(torch.arange(rows), torch.arange(rows), parents, rotation=rotation)

    def attention(self, seen: torch.Tensor) -> torch.Tensor:
        """[heads, rows, head_dim] by seen [rows, keys], of the last rows."""
        query, key, value = self._heads(seen)
        scores = query @ key.transpose(1, 2) * 8**-0.5
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value

    def bound(self) -> float:
        """On the error of any row's attention."""
        return float(attention_bound(*self._heads(self.seen)).max())

    def _heads(self, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries of the last rows, and a key and a value for each of their heads, in float64."""
        heads = self.qkv.double().transpose(0, 1)
        query, key, value = heads.split((HEADS, SHAPE.kv_heads, SHAPE.kv_heads))
        return query[:, -seen.shape[0] :], *(x.repeat_interleave(2, 0) for x in (key, value))


def read(store: KVStore, conveyor: Conveyor, text: Text, end: int, cuts: Sequence[int]) -> None:
    """Reads the text up to `end` behind what is kept, in parts."""
    first = store.length
    gathered = torch.empty(end * SHAPE.token_bytes, dtype=torch.uint8)
    start(store, conveyor)
    cache = PrefillCache(store, conveyor, end - first, gathered)
    whole = text.batch(first, end)
    expected = text.attention(text.seen)
    for layer in range(SHAPE.layers):
        for a, b in itertools.pairwise([first, *cuts, end]):
            out = cache.attend(layer, text.qkv[a:b], whole.slice(a - first, b - first))
            assert_within(out, expected[:, a:b], text.bound())
    cache.keep(range(end - first))


def test_passes_and_reading_attend_as_one_prefill_would() -> None:
    """In any order: text is read behind what passes kept, and passes follow it."""
    text = Text(40)
    expected = text.attention(text.seen)
    for resident in ((0, 0), (1, 0), (9, 9)):
        store, conveyor = make_store(resident, slots=2)
        read(store, conveyor, text, 10, (4, 8))
        for counts in ((1, 6, 3), (1, 2, 1)):
            for count in counts:
                start(store, conveyor)
                cache, first = PassCache(store, conveyor), store.length
                for layer in range(SHAPE.layers):
                    part = slice(first, first + count)
                    out = cache.attend(layer, text.qkv[part], text.batch(first, first + count))
                    assert_within(out, expected[:, part], text.bound())
                cache.keep(range(count))
            end = store.length + 7
            read(store, conveyor, text, end, (end - 5, end - 4))
        store.use_reclaimed((2, 1))
        for _ in range(2):
            start(store, conveyor)
            cache, first = PassCache(store, conveyor), store.length
            for layer in range(SHAPE.layers):
                part = slice(first, first + 1)
                out = cache.attend(layer, text.qkv[part], text.batch(first, first + 1))
                assert_within(out, expected[:, part], text.bound())
            cache.keep([0])
        store.close()


def test_rows_of_a_tree_see_their_ancestors_and_a_path_of_them_is_kept() -> None:
    """Two branches over one root; the second is kept."""
    text = Text(16)
    store, conveyor = make_store((1, 0))
    read(store, conveyor, text, 10, ())
    parents = (-1, 0, 0, 1, 2, 4)
    seen = torch.ones(6, 16, dtype=torch.bool)
    seen[:, 10:] = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [1, 1, 0, 1, 0, 0],
            [1, 0, 1, 0, 1, 0],
            [1, 0, 1, 0, 1, 1],
        ]
    )
    start(store, conveyor)
    cache = PassCache(store, conveyor)
    for layer in range(SHAPE.layers):
        out = cache.attend(layer, text.qkv[10:], text.batch(10, 16, parents))
        assert_within(out, text.attention(seen), text.bound())
    with pytest.raises(RuntimeError, match=r"rows \[0, 1, 4\] are no path of a forward batch of 6"):
        cache.keep([0, 1, 4])
    assert store.length == 10
    cache.keep([0, 2, 4, 5])
    rows = [*range(10), 10, 12, 14, 15]
    start(store, conveyor)
    for layer in range(SHAPE.layers):
        parts = []
        for index, location in enumerate(store.locations(layer)):
            with conveyor.bring((KV, layer, index), location) as block:
                parts.append(store.read(location, block).clone())
        seen = torch.cat([*parts, store.tail(layer)], 2)
        keys, values = (text.qkv[rows, HEADS + i : HEADS + i + 2].transpose(0, 1) for i in (0, 2))
        assert torch.equal(seen, torch.stack((keys, values)))
