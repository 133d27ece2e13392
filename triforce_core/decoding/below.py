"""The levels below the target, as a context gets them: the drafter and the retrieval cache."""

from __future__ import annotations

from contextlib import ExitStack

from offload.kv.direct import reader
from offload.kv.gather import ChunkReader
from offload.kv.scores import ChunkScores
from offload.kv.sizes import GATHER_BUFFERS, reader_bytes
from offload.kv.store import KVStore
from offload.passes import Passes
from offload.weights import ResidentWeights
from triforce_core.decoding.levels import Drafter, Nothing
from triforce_core.decoding.models import Models
from triforce_core.decoding.ngram import NGramDrafter
from triforce_core.decoding.resident import ResidentModel
from triforce_core.decoding.retrieval import POLICIES, RetrievalCache
from triforce_core.decoding.small_model import SmallModelDrafter, WindowCache
from triforce_core.sizing.drafting import fitting_budget


def retrieval_level(
    models: Models, passes: Passes, resources: ExitStack
) -> tuple[ChunkScores, RetrievalCache, ResidentModel]:
    """The retrieval cache over a text, the scores that it is chosen by, which its passes collect
    from now on, and the model over it. resources: gives it all back. Raises DoesNotFitError.
    """
    runtime, method, demand = models.runtime, models.method, models.runtime.demand
    scores = ChunkScores(
        demand.kv,
        method.chunk_size,
        demand.context_tokens,
        POLICIES[method.retrieval],
        runtime.memory,
    )
    resources.callback(scores.close)
    passes.collect(scores)
    resources.callback(passes.collect, None)
    cache = retrieval_cache(models, passes.kv, scores)
    resources.callback(cache.close)
    level = ResidentModel(
        models.target,
        ResidentWeights(runtime.weights, models.substitutes, upper=models.reads_upper),
        cache.kv,
        models.recorder,
        runtime.trace,
        "retrieval model",
    )
    resources.callback(level.close)
    return scores, cache, level


def retrieval_cache(models: Models, kv: KVStore, scores: ChunkScores) -> RetrievalCache:
    """The retrieval cache over a text's KV. Raises DoesNotFitError."""
    runtime, method = models.runtime, models.method
    budget = fitting_budget(models.budget, method.chunk_size, runtime.demand.context_tokens)
    collected = ChunkReader(
        kv,
        runtime.link,
        runtime.memory,
        runtime.host,
        method.chunk_size,
        reader_bytes(kv.shape, budget) // GATHER_BUFFERS,
    )
    return RetrievalCache(
        kv,
        reader(kv, runtime.link, runtime.host, collected),
        runtime.memory,
        scores,
        method.retrieval,
        budget,
        method.chunk_size,
        method.max_draft_tokens,
        rounded=models.rounds_kv,
    )


def make_drafter(models: Models) -> Drafter:
    """The lowest level. Raises DoesNotFitError."""
    runtime, small = models.runtime, models.small
    if not models.method.has_drafter or not models.method.drafts:
        return Nothing(runtime.memory.device)
    if small is None:
        return NGramDrafter(runtime.memory.device)
    cache = WindowCache(small.shape, small.model.rope, small.capacity, runtime.memory)
    level = ResidentModel(
        small.model,
        ResidentWeights(small.store),
        cache.kv,
        models.recorder,
        runtime.trace,
        "drafter",
    )
    return SmallModelDrafter(level, cache, models.target.config.vocab)
