"""What a forward is over: texts, trees and several sequences, whole and in parts."""

from __future__ import annotations

import random

import pytest
import torch
from float_bounds import assert_within, forward_bound
from helpers import random_ids

from triforce_core import Engine
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.sequences import SequenceCaches
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.weights.store import ResidentWeights

CPU = torch.device("cpu")


def test_a_text_stands_at_consecutive_positions_and_is_cut_where_asked() -> None:
    batch = ForwardBatch.text(torch.arange(10), 7, CPU)
    assert batch.positions.tolist() == list(range(7, 17))
    parts = list(batch.parts(4))
    assert [(part.first, part.end, part.rows) for part in parts] == [
        (0, 4, 4),
        (4, 8, 4),
        (8, 10, 2),
    ]
    assert torch.cat([part.tokens for part in parts]).tolist() == list(range(10))
    assert list(batch.parts(None)) == list(batch.parts(10)) == [batch]
    assert batch.visible is None
    on_device = ForwardBatch.text(torch.arange(3), torch.tensor([5]), CPU)
    assert on_device.positions.tolist() == [5, 6, 7]


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_tree_stand_behind_their_ancestors_and_see_them(seed: int) -> None:
    choose = random.Random(seed)
    parents = [choose.randint(-1, row - 1) for row in range(choose.randint(1, 20))]
    batch = ForwardBatch.tree(torch.arange(len(parents)), 9, parents, CPU)
    for row in range(len(parents)):
        path, at = [], row
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        assert batch.positions[row] == 9 + len(path) - 1
        assert batch.visible[row].nonzero().flatten().tolist() == path
        batch.check_path(path)
        batch.check_path(path[:-1])
        with pytest.raises(RuntimeError, match="no path"):
            batch.check_path([*path, row])
    with pytest.raises(ValueError, match="cannot be cut if it is a tree"):
        list(batch.parts(len(parents) - 1 or 1)) if len(parents) > 1 else list(
            ForwardBatch.side_by_side([batch, batch]).parts(1)
        )


def test_a_tree_comes_after_what_it_follows() -> None:
    with pytest.raises(ValueError, match="row 1 of a tree cannot follow row 1"):
        ForwardBatch.tree(torch.arange(2), 0, (-1, 1), CPU)


def test_sequences_in_one_forward_compute_what_each_does_alone(tiny) -> None:
    """Texts and trees of different lengths, each over a cache of its own."""
    path, twin = tiny("llama")
    # No cache of six steps holds more tokens. Each of the two computations has this error.
    bound = forward_bound(twin, 30)
    options = {"device": "cpu", "max_context": 100, "method": "autoregressive"}
    with Engine.from_pretrained(path, **options) as engine, torch.inference_mode():
        model, weights = engine.model, ResidentWeights(engine.runtime.weights)
        memory = DeviceMemory(CPU, None)

        def caches() -> list[DenseKV]:
            return [DenseKV(engine.runtime.plan.kv.shape, 60, memory, "test") for _ in range(3)]

        alone, together = caches(), caches()
        shared = SequenceCaches(together)
        for step in range(6):
            batches = []
            for i, cache in enumerate(alone):
                tokens = torch.tensor(random_ids(1 + (step + 2 * i) % 5, 10 * step + i))
                batches.append(ForwardBatch.text(tokens, cache.end, CPU))
            if step % 2:
                parents = [-1, *range(batches[1].rows - 1)]
                parents[-1] = max(-1, batches[1].rows - 3)
                batches[1] = ForwardBatch.tree(batches[1].tokens, alone[1].end, parents, CPU)
            whole = ForwardBatch.side_by_side(batches)
            assert whole.sequences == tuple(batch.rows for batch in batches)
            hidden = model.forward(whole, weights, shared)
            expected = [model.forward(f, weights, c) for f, c in zip(batches, alone, strict=True)]
            assert_within(hidden, torch.cat(expected), 2 * bound.hidden)
            for batch, cache, other in zip(batches, alone, together, strict=True):
                kept, at = [], batch.rows - 1
                while at >= 0:
                    kept.insert(0, at)
                    at = batch.parent(at)
                cache.keep(kept)
                other.keep(kept)
            assert [cache.end for cache in together] == [cache.end for cache in alone]
        assert max(cache.end for cache in alone) <= 30
        for mine, theirs in zip(together, alone, strict=True):
            assert_within(mine.rows, theirs.rows, 2 * bound.keys_values)
