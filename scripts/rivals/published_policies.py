"""Policies of the published TriForce in our engine, one at a time, for an ablation.

They follow Infini-AI-Lab/TriForce at 164c8c0 (models/cache.py, utils/decoding.py). Policies that
the engine has as options are not here: mean keys, fixed lengths, blocks as long as a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

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


def _chosen_once(blocks_of_layer: int) -> list[tuple[Any, str, Any]]:
    """Chunks keep the scores that they had after prefill; new chunks have none."""
    from triforce_core.decoding.drafters.retrieval import RetrievalCache

    score, begin = RetrievalCache._current_scores, RetrievalCache.begin
    first: dict[int, torch.Tensor] = {}

    def scores(self: RetrievalCache, tokens: int, chunks: int) -> torch.Tensor:
        if id(self) not in first:
            first[id(self)] = score(self, tokens, chunks).clone()
        kept = first[id(self)]
        if kept.shape[-1] >= chunks:
            return kept[..., :chunks]
        least = kept.new_full((*kept.shape[:-1], chunks - kept.shape[-1]), float("-inf"))
        return torch.cat((kept, least), -1)

    def begins(self: RetrievalCache) -> None:
        first.pop(id(self), None)
        begin(self)

    return [(RetrievalCache, "_current_scores", scores), (RetrievalCache, "begin", begins)]


def _by_layers(blocks_of_layer: int) -> list[tuple[Any, str, Any]]:
    """The device holds the KV of whole layers, starting with the first."""
    from triforce_offload import runtime
    from triforce_offload.kv import sequence

    def share(blocks: int, layers: int) -> tuple[int, ...]:
        each = blocks_of_layer
        return tuple(max(0, min(each, blocks - i * each)) for i in range(layers))

    return [(module, "share_blocks", share) for module in (sequence, runtime)]


_POLICIES = {CHOSEN_ONCE: _chosen_once, BY_LAYERS: _by_layers}
