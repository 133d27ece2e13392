"""Policies of the published TriForce in our engine, one at a time, for an ablation.

They follow Infini-AI-Lab/TriForce at 164c8c0 (models/cache.py, utils/decoding.py). Policies that
the engine has as options are not here: fixed lengths, blocks as long as a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

MEAN_KEYS = "mean keys"
CHOSEN_ONCE = "chosen once"
BY_LAYERS = "resident by layers"


@contextlib.contextmanager
def installed(policies: Sequence[str], blocks_of_layer: int) -> Iterator[None]:
    """Give the engines of this process some of these policies.

    blocks_of_layer: the number of KV blocks of a full context in one layer
    """
    with contextlib.ExitStack() as stack:
        for policy in policies:
            for target, name, replacement in _POLICIES[policy](blocks_of_layer):
                stack.enter_context(mock.patch.object(target, name, replacement))
        yield


def _mean_keys(blocks_of_layer: int) -> list[tuple[Any, str, Any]]:
    """A chunk is worth the queries times its mean key, not its share of attention. Chunks are
    chosen after the prompt, and again when new tokens have taken a quarter of the budget.
    """
    from triforce_core.decoding.drafters.retrieval import RetrievalCache
    from triforce_offload.kv.scores import ChunkScores

    buffer, end_layer, begin = ChunkScores.buffer, ChunkScores.end_layer, RetrievalCache.begin
    queries: dict[ChunkScores, dict[int, torch.Tensor]] = {}
    chosen: dict[RetrievalCache, tuple[int, torch.Tensor]] = {}
    latest: list[torch.Tensor] = []

    def collects(self: ChunkScores, rows: torch.Tensor, keys: int) -> Any:
        latest[:] = [rows.float().mean(1)]
        return buffer(self, rows, keys)

    def ends(self: ChunkScores, layer: int, *args: Any) -> None:
        queries.setdefault(self, {})[layer] = latest[0]
        end_layer(self, layer, *args)

    def measured(self: RetrievalCache, chunks: int) -> torch.Tensor:
        layers = []
        for layer, query in sorted(queries[self._scores].items()):
            keys = self._store.on_host(layer)[0, :, : chunks * self._chunk]
            keys = keys.to(query.device).float()
            means = keys.unflatten(1, (chunks, self._chunk)).mean(2)
            layers.append((means @ query.unsqueeze(-1)).squeeze(-1))
        return torch.stack(layers)

    def worth(self: RetrievalCache, tokens: int, chunks: int) -> torch.Tensor:
        length = self._store.length
        before, scores = chosen.get(self, (-self.budget, None))
        if scores is None or 4 * (length - before) > self.budget:
            scores = measured(self, chunks)
            chosen[self] = length, scores
        # Later chunks rank above the others, the newest highest.
        later = 1e20 * torch.arange(1.0, 1 + chunks - scores.shape[2], device=scores.device)
        return torch.cat((scores, later.expand(*scores.shape[:2], -1)), -1)

    def begins(self: RetrievalCache) -> None:
        chosen.pop(self, None)
        begin(self)

    of_scores = ((ChunkScores, "buffer", collects), (ChunkScores, "end_layer", ends))
    return [*of_scores, (RetrievalCache, "_worth", worth), (RetrievalCache, "begin", begins)]


def _chosen_once(blocks_of_layer: int) -> list[tuple[Any, str, Any]]:
    """Chunks keep what they were worth after the prompt; new chunks are worth nothing."""
    from triforce_core.decoding.drafters.retrieval import RetrievalCache

    worth, begin = RetrievalCache._worth, RetrievalCache.begin
    first: dict[RetrievalCache, torch.Tensor] = {}

    def kept(self: RetrievalCache, tokens: int, chunks: int) -> torch.Tensor:
        if self not in first:
            first[self] = worth(self, tokens, chunks).clone()
        scores = first[self]
        if scores.shape[-1] >= chunks:
            return scores[..., :chunks]
        least = scores.new_full((*scores.shape[:-1], chunks - scores.shape[-1]), float("-inf"))
        return torch.cat((scores, least), -1)

    def begins(self: RetrievalCache) -> None:
        first.pop(self, None)
        begin(self)

    return [(RetrievalCache, "_worth", kept), (RetrievalCache, "begin", begins)]


def _by_layers(blocks_of_layer: int) -> list[tuple[Any, str, Any]]:
    """The device holds the KV of whole layers, starting with the first."""
    from triforce_offload import runtime
    from triforce_offload.kv import sequence

    def share(blocks: int, layers: int) -> tuple[int, ...]:
        each = blocks_of_layer
        return tuple(max(0, min(each, blocks - i * each)) for i in range(layers))

    return [(module, "share_blocks", share) for module in (sequence, runtime)]


_POLICIES = {MEAN_KEYS: _mean_keys, CHOSEN_ONCE: _chosen_once, BY_LAYERS: _by_layers}
