"""The drafters: n-gram lookup, and a small model whose window rolls back with the text."""

from __future__ import annotations

import time

import pytest
import torch
from float_bounds import assert_within
from helpers import VOCAB, make_model, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.acceptance import Optimal
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.drafters.ngram import NGramDrafter
from triforce_core.decoding.drafters.resident import ResidentModel
from triforce_core.decoding.drafters.retrieval import RetrievalCache
from triforce_core.decoding.drafters.small_model import SINKS, SmallModelDrafter, WindowCache
from triforce_core.decoding.levels import Proposer
from triforce_core.model.rope import rotate
from triforce_offload.kv.scores import ChunkScores
from triforce_offload.kv.store import KVShape
from triforce_offload.link.trace import NoTrace
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.weights.store import ResidentWeights

CPU = torch.device("cpu")


def ngram(tokens: list[int], count: int, committed: int | None = None) -> list[int]:
    text = Text(tokens)
    if committed is not None:
        text.committed = committed
    draft = NGramDrafter(CPU).propose(text, count)
    assert draft.probs is None, "one-hot"
    return draft.tokens.tolist()


def test_ngram_proposes_what_followed_the_longest_match() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3]
    assert ngram(text, 2) == [4, 9]  # 1 2 3 matches better than the newer 2 3
    assert ngram(text[:3], 5) == []
    assert ngram([1], 5) == []
    assert ngram([1, 2], 5) == []
    assert ngram([7, 8, 1, 7, 8, 2, 7, 8], 1) == [2], "of equal matches the newest"
    assert ngram(text, 0) == []


def test_ngram_goes_on_with_a_text_that_repeats() -> None:
    assert ngram([5, 6, 7, 5, 6], 8) == [7, 5, 6, 7, 5, 6, 7, 5]
    assert ngram([4, 4, 4], 5) == [4] * 5


def test_ngram_follows_tokens_that_are_only_proposed_and_forgets_them() -> None:
    drafter = NGramDrafter(CPU)
    text = Text([1, 2, 3, 4, 5, 6])
    text.tokens += [2, 3]  # proposed by the level above
    assert drafter.propose(text, 2).tokens.tolist() == [4, 5]
    del text.tokens[6:]
    text.commit([8, 9, 2, 8, 9])
    assert drafter.propose(text, 1).tokens.tolist() == [2]


def test_ngram_kept_incrementally_equals_one_made_anew() -> None:
    """And rolled back to any length, behind which another text follows."""
    generator = torch.Generator().manual_seed(0)
    drafter, text = NGramDrafter(CPU), Text([0])
    for step in range(300):
        if step % 10 == 9:
            kept = int(torch.randint(1, len(text.tokens), (), generator=generator))
            drafter.roll_back(kept)
            text = Text(text.tokens[:kept])
        count = int(torch.randint(1, 6, (), generator=generator))
        tokens = torch.randint(4, (count,), generator=generator).tolist()
        proposed = drafter.propose(text, 7).tokens.tolist()
        assert proposed == ngram(list(text.tokens), 7)
        text.commit(tokens)


def test_ngram_costs_little_in_a_long_context() -> None:
    """A lookup looks at no more in 100,000 tokens than in 200: a factor of 20 is for noise, in the
    least processor time of three.
    """
    seconds: dict[int, list[float]] = {200: [], 100_000: []}
    for length in [*seconds] * 3:
        text = Text(random_ids(length, 1, 50))
        drafter = NGramDrafter(CPU)
        drafter.propose(text, 4)
        began = time.thread_time()
        for token in random_ids(300, 2, 50):
            text.commit([token])
            drafter.propose(text, 4)
        seconds[length].append(time.thread_time() - began)
    assert min(seconds[100_000]) < 20 * min(seconds[200])


@pytest.fixture
def small(tiny):
    """A drafter over tiny Llama, its model, cache and text."""
    path, twin = tiny("llama")
    with Engine.from_pretrained(path, device="cpu", draft=path, max_context=200) as engine:
        small_model = engine.models.small
        memory = DeviceMemory(CPU, None)

        def make(capacity: int) -> tuple[SmallModelDrafter, Proposer]:
            cache = WindowCache(small_model.shape, small_model.model.rope, capacity, memory)
            resident = ResidentModel(
                small_model.model,
                ResidentWeights(small_model.store),
                cache.kv,
                None,
                NoTrace(),
                "drafter",
            )
            drafter = SmallModelDrafter(resident, cache, VOCAB)
            rule = Optimal(torch.Generator().manual_seed(0))
            return drafter, drafter.proposer(SamplingParams(temperature=0), rule)

        yield make, twin


def greedy_from(twin, tokens: list[int], count: int) -> list[int]:
    out = twin.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return out[0, len(tokens) :].tolist()


def test_inside_its_window_it_is_the_model(small) -> None:
    make, twin = small
    _, drafter = make(200)
    text = Text(random_ids(50))
    for seed, keep in enumerate([3, 0, 5, 1, 5, 5]):
        draft = drafter.propose(text, 5)
        expected = greedy_from(twin, text.tokens, 5)
        assert draft.tokens.tolist() == expected
        # Some of it is accepted, then something else follows.
        text.commit(expected[:keep] + random_ids(1 + seed % 2, 100 + seed))


def test_rolled_back_tokens_of_the_level_above_are_forgotten(small) -> None:
    make, twin = small
    _, drafter = make(200)
    text = Text(random_ids(30))
    text.tokens += [5, 6, 7, 8]
    drafter.propose(text, 4)
    del text.tokens[30:]
    text.tokens += [5, 6, 40]
    assert drafter.propose(text, 4).tokens.tolist() == greedy_from(twin, text.tokens, 4)
    del text.tokens[30:]
    assert drafter.propose(text, 4).tokens.tolist() == greedy_from(twin, text.tokens, 4)


def test_another_text_is_followed_from_where_it_begins_to_differ(small) -> None:
    """What the window holds of the text before serves as far as the two are the same."""
    make, twin = small
    drafter, proposer = make(200)
    text = Text(random_ids(60))
    proposer.propose(text, 4)
    for kept in (40, 0, 59, 17):
        drafter.roll_back(kept)
        text = Text(text.tokens[:kept] + random_ids(60 - kept, kept))
        assert proposer.propose(text, 4).tokens.tolist() == greedy_from(twin, text.tokens, 4)


def test_the_window_slides_and_positions_stay_inside(small) -> None:
    make, _ = small
    drafter, proposer = make(64)
    cache = drafter._cache
    text = Text(random_ids(300))
    for step in range(60):
        draft = proposer.propose(text, 4)
        assert len(draft.tokens) == 4
        assert cache.kv.end <= cache.capacity
        assert cache.kv.end >= min(SINKS, cache.sinks)
        text.commit(draft.tokens.tolist()[: step % 5] + random_ids(1, step))


def test_keys_turned_back_are_keys_of_the_new_positions(tiny) -> None:
    """After sliding, the first layer's cache equals one that was fed at the new positions."""
    path, _ = tiny("llama3-rope")
    with Engine.from_pretrained(path, device="cpu", draft=path, max_context=200) as engine:
        small = engine.models.small
        memory = DeviceMemory(CPU, None)
        shape = KVShape(1, small.shape.kv_heads, small.shape.head_dim, 1, torch.float32)
        config = small.model.config
        rope, kind = small.model.rope, config.rotation_of(config.attention)
        cache = WindowCache(shape, rope, 64, memory)
        torch.manual_seed(0)
        raw = torch.randn(shape.kv_heads, 40, shape.head_dim)
        cache.kv.rows[0, 0, :, :40] = rotate(raw, *rope.rotations(torch.arange(40), raw)[kind])
        cache.kv.rows[0, 1, :, :40] = raw
        cache.kv.end = 40
        cache.keep_recent(10)
        kept = torch.cat((raw[:, : cache.sinks], raw[:, 30:]), 1)
        assert cache.kv.end == cache.sinks + 10
        turned = cache.kv.rows[0, 0, :, : cache.kv.end]
        places = torch.arange(cache.kv.end)
        expected = rotate(kept, *rope.rotations(places, kept)[kind])
        # Three rotations by up to 40 radians, whose angles, cosines and products are rounded.
        near = 3 * (40 + 4) * torch.finfo(torch.float32).eps * 2**0.5 * float(raw.abs().max())
        assert_within(turned, expected, near)
        assert torch.equal(cache.kv.rows[0, 1, :, : cache.kv.end], kept)


def test_keys_of_layers_that_do_not_rotate_stay_as_they_are(tiny) -> None:
    path, _ = tiny("smollm3")
    with Engine.from_pretrained(path, device="cpu", draft=path, max_context=200) as engine:
        keys = torch.randn(3, 2, 10, 16, generator=torch.Generator().manual_seed(0))
        turned = engine.models.small.model.rope.turned_back(keys, 7)
    assert torch.equal(turned[1], keys[1])
    assert not torch.isclose(turned[::2], keys[::2]).all(dim=(1, 2, 3)).any()


def test_a_retrieval_level_does_not_draft_short_texts_where_nothing_streams(tmp_path) -> None:
    """There, a step reads as much as a pass; the drafter then drafts for the target. With a budget
    that is asked for the level drafts.
    """
    model = make_model("llama", tmp_path, max_position_embeddings=20_000)
    prompt = random_ids(60)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    for budget, drafts in ((None, False), (1024, True)):
        with Engine.from_pretrained(
            tmp_path, device="cpu", max_context=16_384, budget=budget, draft="ngram"
        ) as engine:
            assert not engine.models.runtime.streams
            assert engine.models.budget == (budget or 4096)
            assert engine.models.retrieval_pays(60) == drafts
            assert engine.models.retrieval_pays(16_000)
            text = engine.generate(prompt, SamplingParams(24, temperature=0))
            assert (text.stats["retrieval"]["steps"] > 0) == drafts
            assert text.token_ids == theirs[0, len(prompt) :].tolist()


def test_each_request_decides_by_its_own_prompt_whether_the_level_drafts(
    tmp_path, monkeypatch
) -> None:
    """A level that does not draft chooses no chunks and scores none."""
    make_model("llama", tmp_path, max_position_embeddings=20_000)
    refreshed, scored = [], []
    for kind, name, calls in (
        (RetrievalCache, "refresh", refreshed),
        (ChunkScores, "end_layer", scored),
    ):
        known = getattr(kind, name)

        def counted(self, *args, known=known, calls=calls):
            calls.append(args)
            return known(self, *args)

        monkeypatch.setattr(kind, name, counted)
    long, short = random_ids(15_000), random_ids(60)
    with Engine.from_pretrained(
        tmp_path, device="cpu", max_context=16_384, draft="ngram", draft_tokens=4
    ) as engine:
        # The last one reuses a prefix of the one before it, and prefills a few tokens as a pass.
        for prompt, drafts in ((long, True), (short, False), (long, True), (short * 2, False)):
            refreshed.clear()
            text = engine.generate(prompt, SamplingParams(24, temperature=0))
            assert (text.stats["retrieval"]["steps"] > 0) == drafts
            assert bool(refreshed) == drafts
        scored.clear()
        text = engine.generate([*short * 2, 5], SamplingParams(24, temperature=0))
        assert text.stats["reused_tokens"] == 120
        # Those of the prompt are collected, in case the next text is long.
        assert len(scored) == len(engine.config.layers)
        # Scores of tokens that are no longer in the text are forgotten.
        engine.generate(short[:20], SamplingParams(1))
        levels = engine._contexts.latest.levels
        assert levels.idle
        assert not levels.scores.sums[..., 3:].any()
