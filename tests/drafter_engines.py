"""What tests of drafters in files of their own have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from float_bounds import assert_within
from helpers import BLOCK, placed, random_ids
from oracle import assert_equal_but_for_ties, greedy

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import MOST_LOGIT
from triforce_core.decoding.drafters.model_proposer import ModelDrafter

NEW = 40
# Ways to draft, directly or below a retrieval level.
RUNS = {
    "speculative": {"method": "speculative", "draft_tokens": 6},
    "tree": {"method": "speculative", "tree": 13},
    "retrieval": {"budget": 16, "draft_tokens": 12, "inner_draft_tokens": 3},
    "learned": {},
}
FAMILIES = ("llama", "qwen3", "gemma3", "gpt-oss-moe", "qwen3_5", "mistral-windows")
DIRECT = {"method": "speculative", "draft_tokens": 6}


def engine(path: Path, placement: str = "kv-in-part", **options: object) -> Engine:
    fixed = {"device": "cpu", "max_context": 500, "block_tokens": BLOCK, "dtype": "float32"}
    return Engine.from_pretrained(path, **fixed, **placed(placement, options))


def assert_close(found: torch.Tensor, exact: torch.Tensor, share: float = 1e-4) -> None:
    known = exact.isfinite()
    assert torch.equal(found > -MOST_LOGIT, known)
    assert_within(found[known], exact[known], share * float(exact[known].abs().max()))


def of_latest(ours: Engine) -> tuple[ModelDrafter, list[int], torch.Tensor]:
    """The drafter of the latest context, the text with a further token, and what it predicts."""
    context = ours._contexts.latest
    text, drafter = [*context.text.tokens[: context.length], 5], context.levels.drafter
    return drafter, text, drafter.forward(drafter.catch_up(Text(text), 5))[0]


def assert_text_of_transformers(ours: Engine, model: torch.nn.Module, drafter: str) -> None:
    """That greedy texts are those of transformers, and that a drafter has what passes showed."""
    for tokens in (1, 70):
        prompt = random_ids(tokens, tokens)
        result = ours.generate(prompt, greedy(NEW))
        assert result.stats["levels"][0] == drafter
        context = ours._contexts.latest
        assert context.levels.drafter._kv.end == context.length
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, tokens:].tolist())


def assert_each_has_its_own(path: Path, draft: Path, check: Callable[[Engine], None]) -> None:
    """That several sequences have the texts that each has alone. check: the drafter of the last"""
    prompts = [random_ids(length, length) for length in (5, 40, 90)]
    with engine(path, "kv", sequences=3, draft=draft, **DIRECT) as together:
        found = [each.token_ids for each in together.generate_all(prompts, [greedy(20)] * 3)]
        check(together)
    with engine(path, "kv", method="autoregressive") as alone:
        assert found == [alone.generate(prompt, greedy(20)).token_ids for prompt in prompts]


def assert_saved_goes_on(path: Path, draft: Path, saved: Path) -> Engine:
    """That a saved context goes on as it would have. Return the open engine that loaded it."""
    prompt, params = random_ids(80), SamplingParams(20, temperature=0)
    with engine(path, draft=draft) as first:
        first.generate(prompt, SamplingParams(1))
        first.save_context(saved)
        expected = first.generate([*prompt, 9], params).token_ids
    other = engine(path, draft=draft)
    assert other.load_context(saved).tokens == 80
    assert other.generate([*prompt, 9], params).token_ids == expected
    return other
