"""Trees where penalties change each row's logits by its own path: the exact output distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from exact_distributions import PROMPT, TOKENS, VOCAB, outcomes, target_and_drafter
from helpers import BLOCK, PLACEMENTS
from law_tests import LEAST_P, p_value

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import conditioned, distributions
from triforce_core.decoding.trees.prefixes import Prefixes

SAMPLES = 1_500
PENALTIES = {"repeat_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.5}
WAYS = {
    "model": {"method": "speculative", "draft": "{model}", "tree": 7},
    "n-grams": {"method": "speculative", "draft": "ngram", "tree": 7},
    "retrieval level": {"draft": "none", "tree": 9, "budget": 8},
    "model below it": {"draft": "{model}", "tree": 9, "budget": 8},
}


def params(seed: int | None = None) -> SamplingParams:
    return SamplingParams(TOKENS + 1, temperature=0.9, seed=seed, **PENALTIES)


def exact(model: torch.nn.Module) -> torch.Tensor:
    """Probabilities of all outcomes, in the order of `outcomes`."""
    each = torch.tensor(list(outcomes()))
    texts = torch.cat((torch.tensor(PROMPT).expand(len(each), -1), each), 1)
    with torch.no_grad():
        logits = model(texts).logits[:, len(PROMPT) - 1 : -1]
    probs = []
    for own, outcome in zip(logits, each, strict=True):
        after = Prefixes.of_chain(outcome[:-1], TOKENS)
        changed = conditioned(own, params(), Text(list(PROMPT)), after)
        probs.append(distributions(changed, SamplingParams(temperature=0.9)).double())
    return torch.stack(probs).gather(-1, each.unsqueeze(-1)).squeeze(-1).prod(-1)


def sampled(target: Path, drafter: Path, way: str, samples: int) -> Counter:
    options = {"placement": PLACEMENTS["kv-in-part"], "draft_tokens": 3} | WAYS[way]
    options["draft"] = str(options["draft"]).format(model=drafter)
    with Engine.from_pretrained(
        target,
        device="cpu",
        chunk_size=4,
        inner_draft_tokens=1,
        max_context=64,
        block_tokens=BLOCK,
        **options,
    ) as engine:
        counts: Counter = Counter()
        for seed in range(samples):
            result = engine.generate(PROMPT, params(seed))
            counts[tuple(result.token_ids[:TOKENS])] += 1
            trees = result.stats["draft_tokens"]["trees"]
        assert trees > 0
    return counts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.nn.Module]:
    return target_and_drafter(tmp_path_factory.mktemp("models"))


def p_of(counts: Counter, expected: torch.Tensor) -> float:
    return p_value(torch.tensor([[counts[each] for each in outcomes()]]), expected.unsqueeze(0))


@pytest.mark.parametrize("way", WAYS)
def test_three_tokens_have_the_exact_distribution(models, whole, way: str) -> None:
    target, drafter, model = models
    expected = exact(model)
    assert float(expected.sum()) == pytest.approx(1)
    counts = sampled(target, drafter, way, (4 if whole else 1) * SAMPLES)
    assert p_of(counts, expected) > LEAST_P


def test_rows_that_follow_other_paths_are_noticed(models) -> None:
    """Planted: each row counts the tokens of all rows before it, as if the tree were a chain."""
    target, drafter, model = models

    def as_chain(tokens: torch.Tensor, parents: object) -> Prefixes:
        return Prefixes.of_chain(tokens, len(tokens) + 1)

    with patch.object(Prefixes, "of_tree", as_chain):
        counts = sampled(target, drafter, "model", 4 * SAMPLES)
    assert p_of(counts, exact(model)) < LEAST_P
    assert len(list(outcomes())) == VOCAB**TOKENS
