"""L6: laws equal transformers' warpers; what is drawn follows the law."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from triforce_core.decoding.distributions import distributions, draw
from triforce_core.params import SamplingParams

VOCAB = 50


def transformers_law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("temperature", [0.1, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, VOCAB + 10])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_laws_equal_the_warpers_of_transformers(temperature, top_k, top_p) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(200, VOCAB, generator=generator)
    logits[:20] = logits[:20].round()  # rows with many ties
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    ours = distributions(logits, params)
    assert (ours - transformers_law(logits, params)).abs().max() <= 1e-6
    assert (ours.sum(-1) - 1).abs().max() < 1e-5


def test_temperature_zero_is_one_hot_and_takes_the_first_of_ties() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, -1.0, 0.0]])
    for top_p in (1.0, 0.1):
        one_hot = distributions(logits, SamplingParams(temperature=0, top_p=top_p))
        assert one_hot.tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_seen(temperature, bad) -> None:
    logits = torch.tensor([[1.0, bad, 0.0], [1.0, 2.0, 0.0]])
    tokens = draw(distributions(logits, SamplingParams(temperature=temperature)), torch.Generator())
    assert tokens[0] == -1
    assert tokens[1] >= 0


def test_tiny_temperatures_are_the_arg_max() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9999]])
    for temperature in (1e-9, 1e-40, 5e-324):
        assert distributions(logits, SamplingParams(temperature=temperature)).tolist() == [
            [0, 1, 0]
        ]


def test_half_precision_logits_give_float32_laws() -> None:
    assert (
        distributions(torch.zeros(1, 4, dtype=torch.bfloat16), SamplingParams()).dtype
        == torch.float32
    )


@pytest.mark.parametrize("vocab", [3, 8, 32])
def test_draws_follow_the_law(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    p = (2 * torch.randn(vocab, generator=generator)).softmax(-1)
    p[0] = 0  # and what has probability 0 never comes
    p /= p.sum()
    drawn = draw(p.expand(100_000, vocab), generator).bincount(minlength=vocab)
    assert drawn[0] == 0
    assert chisquare(drawn[1:], 100_000 * p[1:].double() / p[1:].double().sum()).pvalue > 1e-6


def test_extreme_coins_stay_inside_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    for coin, token in ((0.0, 1), (1 - 2**-53, 2), (1.0, 2)):
        monkeypatch.setattr(torch, "rand", lambda *_, c=coin, **__: torch.tensor([c]).double())
        assert draw(p, None).tolist() == [token]
