"""The published policies, put into our engine for the ablation: they choose other chunks, and the
text stays.
"""

from __future__ import annotations

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids

from rivals.published_policies import BY_LAYERS, CHOSEN_ONCE, MEAN_KEYS, installed
from triforce_core import Engine, SamplingParams
from triforce_core.decoding.drafters.retrieval import RetrievalCache

LATER = 1e20


@pytest.mark.parametrize(
    "policies", [[], [MEAN_KEYS], [MEAN_KEYS, CHOSEN_ONCE], [MEAN_KEYS, CHOSEN_ONCE, BY_LAYERS]]
)
def test_they_choose_other_chunks_and_change_no_text(tiny, monkeypatch, policies) -> None:
    path, model = tiny("llama")
    prompt, seen = random_ids(150), []
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    options = {"draft": "none", "draft_tokens": 4, "budget": 32, "placement": PLACEMENTS["kv"]}
    with installed(policies, 12):
        worth = RetrievalCache._worth

        def noted(cache: RetrievalCache, tokens: int, chunks: int) -> torch.Tensor:
            seen.append(worth(cache, tokens, chunks).clone())
            return seen[-1]

        monkeypatch.setattr(RetrievalCache, "_worth", noted)
        with Engine.from_pretrained(
            path, device="cpu", max_context=200, block_tokens=BLOCK, **options
        ) as engine:
            ours = engine.generate(prompt, SamplingParams(40, temperature=0))
        monkeypatch.undo()
    assert ours.token_ids == expected[0, len(prompt) :].tolist()
    chunks = seen[0].shape[-1]
    first, last = seen[0], seen[-1]
    is_mass = bool((first >= 0).all() and (first.sum(-1) <= 1.01).all())
    assert is_mass == (MEAN_KEYS not in policies)
    assert last.shape[-1] > chunks, "the text grew by chunks"
    if CHOSEN_ONCE in policies:
        assert torch.equal(last[..., :chunks], first)
        assert (last[..., chunks:] == float("-inf")).all()
    elif policies:
        # 40 new tokens are chosen among again each time they have taken a quarter of 32.
        again = [one for one in seen if not (one[..., -1] >= LATER / 2).any()]
        assert 2 < len(again) < len(seen)
        grown = [one for one in seen if (one[..., -1] >= LATER / 2).all()]
        assert len(again) + len(grown) == len(seen)


def test_a_mean_key_is_worth_the_query_times_the_mean(tiny, monkeypatch) -> None:
    """Of one query, against the keys that the context holds."""
    from triforce_offload.kv.scores import ChunkScores

    path, _ = tiny("llama")
    queries: list[torch.Tensor] = []
    with installed([MEAN_KEYS], 12):
        worth, buffer = RetrievalCache._worth, ChunkScores.buffer

        def noted(scores: ChunkScores, rows: torch.Tensor, keys: int) -> object:
            queries.append(rows.double().mean(1))
            return buffer(scores, rows, keys)

        def checked(cache: RetrievalCache, tokens: int, chunks: int) -> torch.Tensor:
            found = worth(cache, tokens, chunks)
            for layer, query in enumerate(queries[-len(found) :]):
                keys = cache._store.on_host(layer)[0].double()
                means = torch.stack([keys[:, 8 * i : 8 * i + 8].mean(1) for i in range(chunks)], 1)
                torch.testing.assert_close(
                    found[layer].double(),
                    (means * query.unsqueeze(1)).sum(-1),
                    rtol=1e-4,
                    atol=1e-4,
                )
            return found

        monkeypatch.setattr(ChunkScores, "buffer", noted)
        monkeypatch.setattr(RetrievalCache, "_worth", checked)
        options = {"draft": "none", "budget": 32, "placement": PLACEMENTS["kv"]}
        with Engine.from_pretrained(
            path, device="cpu", max_context=200, block_tokens=BLOCK, **options
        ) as engine:
            engine.generate(random_ids(150), SamplingParams(1))
        monkeypatch.undo()
    assert queries
