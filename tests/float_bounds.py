"""Bounds on rounding errors, so that a test of floats holds on any processor.

Libraries add the terms of a sum in another order on another processor, with or without fused
multiply-adds. The bounds here follow from the dtype, the sizes and float64, never from the results
of one machine.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import DynamicCache

# A forward's errors are drawn this often. The bound is the largest deviation among them.
_TRIALS = 4
# Times the standard deviation that the theory gives, for what it leaves out: functions, rotations.
_SPREAD = 2.0


def gamma(terms: int, dtype: torch.dtype) -> float:
    """Bound the error of a sum of `terms` products, added in any order, relative to the sum of the
    products' magnitudes: n eps / (1 - n eps).

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition (SIAM, 2002),
    section 3.1. Higham has the unit roundoff, half of eps; with eps the bound also covers the
    difference between two computations. Raises ValueError where there is no bound.
    """
    share = terms * torch.finfo(dtype).eps
    if share >= 1:
        raise ValueError(f"the sum of {terms} products in {dtype} has no bound")
    return share / (1 - share)


def likely_gamma(terms: int, dtype: torch.dtype) -> float:
    """The same where rounding errors are independent of each other: 4 sqrt(n) u, which all but one
    in a thousand sums keep to by far.

    Source: see `forward_bound`.
    """
    return 2 * terms**0.5 * torch.finfo(dtype).eps


def product_bound(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bound the error of each number of x [..., rows, n] @ weight [..., columns, n].T whose sums
    are made in `dtype`: float64 [..., rows, columns].
    """
    magnitudes = x.double().abs() @ weight.double().abs().transpose(-2, -1)
    return gamma(x.shape[-1], dtype) * magnitudes


def attention_bound(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Bound the error of float32 attention of query [heads, rows, columns] over keys and values
    [heads, tokens, columns]: [heads, rows, 1].

    To first order: a score's error moves a weight by its share, and the others as much by the sum
    that all are divided by; then the weighted sum has an error of its own, as has each merge.
    """
    query, key, value = query.double(), key.double(), value.double()
    columns, tokens = query.shape[-1], key.shape[1]
    # A rounding more for the scale.
    scores = gamma(columns + 1, torch.float32) * (query.abs() @ key.abs().transpose(1, 2))
    worst = scores.amax(-1, keepdim=True) * columns**-0.5
    return (2 * worst + 2 * gamma(tokens, torch.float32)) * value.abs().amax((1, 2), keepdim=True)


def assert_within(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float) -> None:
    """Assert that each number is within its bound (one for all, or one each) of the exact one."""
    gap = (found.double() - exact.double()).abs()
    assert bool((gap <= bound).all()), f"off by up to {float(gap.max())}; the bound is {bound}"


@dataclass(frozen=True)
class ForwardBound:
    """Bounds on the absolute error of every number that a forward computes.

    hidden: of hidden states before the last norm
    keys_values: of rotated keys, and of values
    attention: of a query's attention probabilities, and of their sum over any set of tokens
    logits: of logits
    """

    hidden: float
    keys_values: float
    attention: float
    logits: float

    @property
    def logprobs(self) -> float:
        """Of logarithms of probabilities at temperature 1: a logit's error and that of the sum."""
        return 2 * self.logits

    def probs(self, temperature: float) -> float:
        """Of probabilities: a softmax moves by at most half of what its logits move by."""
        return self.logits / temperature / 2


@torch.no_grad()
def forward_bound(
    model: nn.Module, tokens: int, dtype: torch.dtype = torch.float32
) -> ForwardBound:
    """Bound the error of a forward of a transformers model over contexts of up to `tokens` tokens.

    In float64 every product of matrices is moved by random errors, as large as those of `dtype`: a
    standard deviation of u sqrt(n) times the 2-norm of the n products that are added. How far the
    results move tells how the errors grow through the layers. Worst cases, `gamma`'s, would be a
    thousand times what is ever seen after a few layers, and would hide mistakes.

    Source of sqrt(n): N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error
    Analysis (SIAM Journal on Scientific Computing 41(5), 2019), section 3.
    """
    exact = copy.deepcopy(model).double()
    # The implementation that returns attention probabilities.
    exact.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(model.config.vocab_size, (1, tokens), generator=generator)
    unmoved = _computed(exact, text)
    for layer in exact.modules():
        if isinstance(layer, nn.Linear):
            terms = layer.in_features + model.config.hidden_size + tokens
            layer.register_forward_hook(partial(_moved, terms, dtype, generator))
    moved = [_computed(exact, text) for _ in range(_TRIALS)]
    gaps = [[(a - b).abs() for a, b in zip(each, unmoved, strict=True)] for each in moved]
    return ForwardBound(
        hidden=max(float(hidden.max()) for hidden, *_ in gaps),
        keys_values=max(float(keys_values.max()) for _, keys_values, *_ in gaps),
        # Probabilities add up to one: those that rise do so by half of all changes.
        attention=max(float(attention.sum(-1).max()) / 2 for _, _, attention, _ in gaps),
        logits=max(float(logits.max()) for *_, logits in gaps),
    )


def _moved(
    terms: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    layer: nn.Linear,
    inputs: tuple[torch.Tensor],
    output: torch.Tensor,
) -> torch.Tensor:
    """A product with the errors of sums of `terms` terms: its own sum, that of the norm before it
    over the hidden size, and those of attention over a head and over the tokens.
    """
    squares = inputs[0].square() @ layer.weight.square().T
    if layer.bias is not None:
        squares += layer.bias.square()
    deviation = torch.finfo(dtype).eps / 2 * (terms * squares).sqrt()
    drawn = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    return output + _SPREAD * deviation * drawn


def _computed(model: nn.Module, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a forward computes, in the order of ForwardBound's fields."""
    hidden: list[torch.Tensor] = []
    names = "norm", "embedding_norm", "hyper_connection_mixer"
    last = next(filter(None, (getattr(model.model, name, None) for name in names)))
    hook = last.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    # A cache of its own keeps all tokens of layers with a window too.
    recurrent = set(getattr(model.config, "layer_types", None) or ()) & {"linear_attention", "conv"}
    cache = DynamicCache(config=model.config) if recurrent else DynamicCache()
    result = model(text, output_attentions=True, past_key_values=cache)
    hook.remove()
    # A model whose last layers were cut off still has caches for these.
    layers = result.past_key_values.layers[: len(model.model.layers)]
    stored = [it for it in layers if hasattr(it, "keys")]
    keys_values = torch.cat([each.flatten() for it in stored for each in (it.keys, it.values)])
    # Layers may differ in their heads.
    rows = [each.flatten(0, 2) for each in result.attentions if each is not None]
    return hidden[0], keys_values, torch.cat(rows), result.logits
