"""The choice of experts for each token, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triforce_kernels.checks import require
from triforce_kernels.dispatch import implementation


@dataclass(frozen=True)
class Choice:
    """How experts are chosen by their scores.

    active: number of experts of each token
    sigmoid: whether scores are sigmoids of a router's products, not a softmax over all of them
    normalised: whether the weights of a token are its scores divided by their sum
    scale: factor of the weights
    groups, chosen_groups: the experts are in `groups` groups of neighbours, and are chosen from the
        `chosen_groups` groups with the greatest sums of two scores (DeepSeek-V3, 2024)
    """

    active: int
    sigmoid: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1


def choose(
    products: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each row and their weights, [rows, active] int64 and float32.

    products: products of the rows with the router, [rows, experts] float32
    bias: added to the scores for the choice alone, [experts] float32
    Raises ValueError.
    """
    count = products.shape[-1]
    require(
        "choose",
        products.dim() == 2
        and products.dtype == torch.float32
        and products.is_contiguous()
        and 0 < choice.active <= count // choice.groups * choice.chosen_groups
        and count % choice.groups == 0
        and (
            bias is None
            or ((bias.shape, bias.dtype) == ((count,), torch.float32) and bias.is_contiguous())
        ),
        products=products,
        bias=bias,
        choice=choice,
    )
    return implementation("choose_experts", products.device)(products, bias, choice)


def reference_choose(
    products: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = products.sigmoid() if choice.sigmoid else products.softmax(-1)
    wanted = scores if bias is None else scores + bias
    if choice.groups > 1:
        wanted = _within_groups(wanted, choice)
    chosen = wanted.topk(choice.active).indices
    weights = scores.gather(1, chosen)
    if choice.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * choice.scale


def _within_groups(wanted: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return the scores with -inf for experts outside the chosen groups."""
    grouped = wanted.unflatten(1, (choice.groups, -1))
    best = grouped.topk(min(2, grouped.shape[2])).values.sum(-1)
    chosen = best.topk(choice.chosen_groups).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, value=False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)
