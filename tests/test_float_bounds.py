"""Bounds of float_bounds.py: no order of a sum is past them, and mistakes are."""

from __future__ import annotations

import copy

import pytest
import torch
from float_bounds import assert_within, forward_bound, gamma, product_bound
from helpers import VOCAB, random_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_in_any_order_are_within_their_bound(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(5, 60, generator=generator).to(dtype) for _ in "xw")
    exact, bound = x.double() @ weight.double().T, product_bound(x, weight, dtype)
    for _ in range(20):
        order = torch.randperm(60, generator=generator)
        total = torch.zeros(5, 5, dtype=dtype)
        for column in order:
            total += x[:, column, None] * weight[None, :, column]
        assert_within(total, exact, bound)
    if dtype == torch.float32:
        # A product left out is seen.
        without = x[:, 1:].double() @ weight[:, 1:].double().T
        with pytest.raises(AssertionError, match="the bound is"):
            assert_within(without, exact, bound)


def test_gamma_grows_with_the_terms_until_there_is_no_bound() -> None:
    eps = torch.finfo(torch.bfloat16).eps
    assert gamma(1, torch.bfloat16) == eps / (1 - eps)
    assert gamma(64, torch.bfloat16) == 1
    with pytest.raises(ValueError, match=r"128 products in torch.bfloat16 has no bound"):
        gamma(128, torch.bfloat16)


def test_what_is_no_number_is_within_no_bound() -> None:
    with pytest.raises(AssertionError, match="nan"):
        assert_within(torch.tensor([1.0, float("nan")]), torch.ones(2), 1.0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama-mqa"])
def test_a_forward_is_within_its_bound_and_a_mistake_is_not(tiny, family: str) -> None:
    _, twin = tiny(family)
    bound = forward_bound(twin, 60)
    text = torch.tensor([random_ids(60)])
    with torch.no_grad():
        exact = copy.deepcopy(twin).double()(text).logits
        found = twin(text).logits
        assert_within(found, exact, bound.logits)
        assert_within(found.log_softmax(-1), exact.log_softmax(-1), bound.logprobs)
        assert_within((found / 0.5).softmax(-1), (exact / 0.5).softmax(-1), bound.probs(0.5))
        # The token before the last is another one, or stands one position further.
        other = text.clone()
        other[0, -2] = (other[0, -2] + 1) % VOCAB
        positions = torch.arange(60)[None]
        positions[0, -2] += 1
        for wrong in (twin(other), twin(text, position_ids=positions)):
            assert (wrong.logits - exact)[0, -1].abs().max() > 20 * bound.logits
    half = forward_bound(twin, 60, torch.bfloat16)
    assert half.logits > 1000 * bound.logits
