"""The retrieval cache: what is in it is exactly the KV of the chunks that matter most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from float_bounds import assert_within, forward_bound
from helpers import BLOCK, PLACEMENTS, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.drafters.retrieval import RetrievalCache
from triforce_kernels.kv.rounding import rounded
from triforce_offload.kv.caches.rounded import RoundedKV
from triforce_offload.kv.scores import ChunkScores

CHUNK = 4


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[RetrievalCache]:
    """Every retrieval cache that is made."""
    made: list[RetrievalCache] = []
    original = RetrievalCache.__init__

    def init(cache: RetrievalCache, *args: object, **options: object) -> None:
        original(cache, *args, **options)
        made.append(cache)

    monkeypatch.setattr(RetrievalCache, "__init__", init)
    return made


def all_in(path: Path) -> Engine:
    """Whose retrieval cache has room for the whole context."""
    return Engine.from_pretrained(
        path,
        device="cpu",
        max_context=200,
        block_tokens=BLOCK,
        draft="none",
        draft_tokens=5,
        budget=200,
    )


def full_kv(cache: RetrievalCache, layer: int) -> torch.Tensor:
    """All kept KV of a layer, [2, kv_heads, tokens, head_dim], from wherever it lies."""
    store = cache._store
    parts = []
    for location in store.locations(layer):
        for event in location.source.after if location.source else ():
            cache._reader._link.wait_on_host(event)
        parts.append(store.read(location, location.memory).clone())
    parts.append(store.tail(layer))
    return torch.cat(parts, 2)


def kept(cache: RetrievalCache, layer: int, kv: torch.Tensor, head: int | slice) -> torch.Tensor:
    """KV of a head, or of several, [2, ..., tokens, head_dim], as the cache keeps it."""
    if not isinstance(cache.kv, RoundedKV):
        return kv
    return rounded(kv, cache.kv.scale[layer][:, head].unsqueeze(-2))


def check(cache: RetrievalCache) -> None:
    """Each slot holds its chunk's KV, exact or rounded once; no chunk is in twice, first and newest
    are in.
    """
    store, filled = cache._store, cache._filled
    chunks = store.length // CHUNK
    assert filled == min(cache.budget // CHUNK, chunks)
    rest = store.length % CHUNK
    for layer in range(store.shape.layers):
        kv = full_kv(cache, layer)
        for head in range(store.shape.kv_heads):
            chosen = cache._chunk_of[layer, head, :filled].tolist()
            assert len(set(chosen)) == filled
            assert all(0 <= chunk < chunks for chunk in chosen)
            if filled:
                assert {0, chunks - 1} <= set(chosen) or filled == 1
            for slot, chunk in enumerate(chosen):
                held = cache.kv.rows[layer, :, head, slot * CHUNK : (slot + 1) * CHUNK]
                expected = kv[:, head, chunk * CHUNK : (chunk + 1) * CHUNK]
                assert torch.equal(held, kept(cache, layer, expected, head))
        start = filled * CHUNK
        newest = kept(cache, layer, kv[:, :, store.length - rest :], slice(None))
        assert torch.equal(cache.kv.rows[layer, :, :, start : start + rest], newest)
    assert cache.length == store.length


@pytest.mark.one_in(13)
@pytest.mark.parametrize("placement", ["resident", "kv", "kv-in-part"])
@pytest.mark.parametrize(
    ("budget", "prompt_tokens", "draft_kv"),
    [
        (8, 70, "exact"),
        (16, 3, "exact"),
        (24, 41, "exact"),
        (64, 50, "exact"),
        (16, 3, "int8"),
        (24, 41, "int8"),
    ],
)
def test_it_holds_the_kv_after_every_pass(
    tiny, watched, monkeypatch, placement, budget, prompt_tokens, draft_kv
) -> None:
    refreshes = []
    original = RetrievalCache.refresh

    def refresh(cache: RetrievalCache, tokens: int) -> None:
        original(cache, tokens)
        check(cache)
        refreshes.append(cache._store.length)

    monkeypatch.setattr(RetrievalCache, "refresh", refresh)
    path, _ = tiny("llama")
    with Engine.from_pretrained(
        path,
        device="cpu",
        max_context=200,
        block_tokens=BLOCK,
        placement=PLACEMENTS[placement],
        draft="none",
        draft_tokens=5,
        budget=budget,
        chunk_size=CHUNK,
        draft_kv=draft_kv,
    ) as engine:
        stats = engine.generate(
            random_ids(prompt_tokens), SamplingParams(60, temperature=1.0, seed=1)
        ).stats
    assert len(watched) == 1
    assert refreshes[0] == prompt_tokens
    assert refreshes == sorted(set(refreshes))
    assert 0 < stats["retrieval"]["churn"] < 1


def test_short_prompts_are_all_in(tiny, watched) -> None:
    path, _ = tiny("llama")
    with all_in(path) as engine:
        result = engine.generate(random_ids(61), SamplingParams(100, temperature=1.0, seed=1))
    # As of the last refresh; the request's last pass needs none after it.
    assert watched[0]._filled * 8 >= 160 - 16
    assert result.stats["acceptance"]["target"] > 0.99
    # 8-token chunks enough for the whole context, and no more than that.
    assert watched[0].budget == 200


def test_mass_follows_what_queries_attend_to(tiny, watched, monkeypatch) -> None:
    """With scores that name some chunks, these are the ones that are in, for each head its own."""
    path, _ = tiny("llama")
    wanted = {(0, 0): 3, (0, 1): 7, (1, 0): 5, (1, 1): 2, (2, 0): 9, (2, 1): 4}

    def take(scores: ChunkScores, tokens: int, chunks: int) -> torch.Tensor:
        made = torch.rand(3, 2, chunks)
        for (layer, head), chunk in wanted.items():
            made[layer, head, chunk] = 2
        return made

    monkeypatch.setattr(ChunkScores, "take", take)
    with Engine.from_pretrained(
        path,
        device="cpu",
        max_context=200,
        block_tokens=BLOCK,
        placement=PLACEMENTS["kv"],
        draft="none",
        draft_tokens=5,
        budget=48,
    ) as engine:
        engine.generate(random_ids(90), SamplingParams(40, temperature=1.0, seed=1))
        for (layer, head), chunk in wanted.items():
            assert chunk in watched[0]._chunk_of[layer, head].tolist()


@pytest.mark.parametrize("placement", ["resident", "kv"])
def test_scores_are_the_mass_of_the_tokens_that_held(tiny, monkeypatch, placement: str) -> None:
    """Against softmax attention over the whole context, computed from transformers' own."""
    path, model = tiny("llama")
    prompt = random_ids(75)
    seen: list[tuple[int, int, torch.Tensor]] = []
    original = ChunkScores.take

    def take(scores: ChunkScores, tokens: int, chunks: int) -> torch.Tensor:
        scores._sums.zero_()
        result = original(scores, tokens, chunks)
        seen.append((tokens, chunks, result.clone()))
        return result

    monkeypatch.setattr(ChunkScores, "take", take)
    with Engine.from_pretrained(
        path,
        device="cpu",
        max_context=200,
        block_tokens=BLOCK,
        placement=PLACEMENTS[placement],
        draft="none",
        draft_tokens=6,
        budget=200,
    ) as engine:
        result = engine.generate(prompt, SamplingParams(40, temperature=1.0, seed=1))
    # Two computations of probabilities, and ours are kept in bfloat16.
    near = 2 * forward_bound(model, 75 + 40).attention
    rounding = torch.finfo(torch.bfloat16).eps / 2
    model.set_attn_implementation("eager")
    text = torch.tensor([prompt + result.token_ids])
    with torch.no_grad():
        maps = torch.stack(model(text, output_attentions=True).attentions)[:, 0]
    model.set_attn_implementation("sdpa")
    per_head = maps.unflatten(1, (2, 2)).mean(2)  # [layers, kv_heads, queries, keys]
    # The prompt's last 16 queries, then those of each pass: the token fed last and what held.
    first = 75 - 16
    for tokens, chunks, scores in seen:
        mass = per_head[:, :, first : first + tokens].mean(2)
        mass = torch.nn.functional.pad(mass, (0, -mass.shape[-1] % 8))
        expected = mass.unflatten(-1, (-1, 8)).sum(-1)[..., :chunks]
        assert_within(scores, expected, near + rounding * (expected + near))
        first += tokens
    assert len(seen) > 4


def test_step_uses_what_was_committed(tiny, watched, monkeypatch) -> None:
    """Level 1's own KV of a draft is gone after the pass: it came from approximate attention."""
    path, _ = tiny("llama")
    original = Context.refresh
    lengths = []

    def refresh(context: Context, scored: int) -> None:
        original(context, scored)
        lengths.append((watched[0].length, context.length))

    monkeypatch.setattr(Context, "refresh", refresh)
    with all_in(path) as engine:
        engine.generate(random_ids(30), SamplingParams(40, temperature=1.0, seed=1))
    assert len(lengths) > 5
    assert all(own == committed for own, committed in lengths)
