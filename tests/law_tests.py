"""Holding what was drawn against the law it should have."""

from __future__ import annotations

import torch
from scipy.stats import chi2

LEAST_P = 1e-6
"""A right law fails below it once in a million tests."""


def p_value(counts: torch.Tensor, laws: torch.Tensor) -> float:
    """Pearson's chi-square of counts [rows, outcomes] against a law for each row, [rows, outcomes].

    Outcomes expected fewer than 5 times are counted together. An outcome that cannot be, and was,
    gives 0.
    """
    counts, laws = counts.double(), laws.double()
    statistic, freedom = 0.0, 0
    for row, law in zip(counts, laws / laws.sum(-1, keepdim=True), strict=True):
        if (row[law == 0] > 0).any():
            return 0.0
        expected = law * row.sum()
        rare = expected < 5
        observed = torch.cat((row[~rare], row[rare].sum().view(1)))
        expected = torch.cat((expected[~rare], expected[rare].sum().view(1)))
        used = expected > 0
        statistic += ((observed - expected)[used].square() / expected[used]).sum().item()
        freedom += max(0, int(used.sum()) - 1)
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


def random_law(vocab: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """A law over `vocab` outcomes: "full", with "zeros", or "one-hot"."""
    law = (1.5 * torch.randn(vocab, generator=generator)).softmax(-1)
    if kind == "zeros":
        law[torch.randperm(vocab, generator=generator)[: vocab // 2]] = 0
    if kind == "one-hot":
        law = torch.eye(vocab)[torch.randint(vocab, (), generator=generator)]
    return law / law.sum()
