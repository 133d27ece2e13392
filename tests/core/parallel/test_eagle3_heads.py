"""EAGLE-3 heads where ranks share the model: the head is whole on the first rank."""

from __future__ import annotations

import pytest
import torch
from eagle3_heads import KINDS, RandomHead
from head_walks import ON_RANKS
from helpers import make_model, random_ids
from oracle import assert_equal_but_for_ties, greedy
from thread_ranks import engine

PROMPT, NEW = 120, 40


@pytest.mark.parametrize("kind", ["specforge", "speculators"])
@pytest.mark.parametrize("method", ON_RANKS)
def test_text_and_drafts_are_those_of_one_rank(tmp_path, leaders, kind: str, method: str) -> None:
    """With the model's embedding, of which each rank has a part, and with one of its own."""
    model = make_model("llama", tmp_path / "model")
    head = RandomHead(model, tmp_path / "head", KINDS[kind])
    prompt = random_ids(PROMPT)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    accepted = []
    for ranks in (1, 2):
        options = {"draft": head.directory, **ON_RANKS[method]}
        with engine(tmp_path / "model", ranks, "kv", **options) as ours:
            result = ours.generate(prompt, greedy(NEW))
            assert result.stats["levels"][0] == "eagle3"
            assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, PROMPT:].tolist())
            accepted.append(result.stats["acceptance"])
    if method != "learned":
        assert accepted[0] == accepted[1]
