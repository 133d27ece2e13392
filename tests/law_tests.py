"""Holding what was drawn against the law it should have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.stats import chi2

from triforce_core.decoding.acceptance import accept
from triforce_core.decoding.distributions import draw
from triforce_core.decoding.trees.tree import Branches, accept_tree

# A right law has a smaller p-value once in a million tests.
LEAST_P = 1e-6


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


KINDS = ("full", "zeros", "one-hot", "same")


def configuration(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft laws [n, vocab] and target laws [n + 1, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    vocab, length = (2, 8, 16, 32)[seed % 4], 1 + seed % 8
    kinds = [KINDS[(seed + i) % 4] for i in range(length + 1)]
    draft = torch.stack([random_law(vocab, kind, generator) for kind in kinds[:length]])
    kinds = [KINDS[(seed // 4 + i) % 3] for i in range(length + 1)]
    target = torch.stack([random_law(vocab, kind, generator) for kind in kinds])
    for i in range(length):
        if (seed + i) % 4 == 3:
            draft[i] = target[i]
    return draft, target


def emitted(
    draft: torch.Tensor, target: torch.Tensor, draws: int, generator: torch.Generator
) -> torch.Tensor:
    """How often each token came at each position: [n + 1, vocab]."""
    length, vocab = draft.shape
    counts = torch.zeros(length + 1, vocab, dtype=torch.int64)
    for start in range(0, draws, 10_000):
        trials = min(10_000, draws - start)
        proposed = torch.stack(
            [draw(law.expand(trials, vocab), generator) for law in draft], 1
        ).view(trials, length)
        verdict = accept(
            proposed,
            draft.expand(trials, length, vocab),
            target.expand(trials, length + 1, vocab),
            generator,
        )
        tokens = torch.cat((proposed, proposed[:, :1]), 1)
        tokens.scatter_(1, verdict.accepted.unsqueeze(1), verdict.token.unsqueeze(1))
        for i in range(length + 1):
            reached = verdict.accepted >= i
            counts[i] += tokens[reached, i].bincount(minlength=vocab)
    return counts


def tree_configuration(seed: int) -> tuple[Branches, torch.Tensor, torch.Tensor]:
    """Branches, draft laws [drawn, vocab] and target laws [n + 1, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    vocab, length = (2, 8, 16, 32)[seed % 4], 1 + seed % 8
    most, parents = min(4, vocab - 1), []
    for token in range(length):
        open_rows = [row for row in range(token + 1) if parents.count(row) < most]
        parents.append(open_rows[int(torch.randint(len(open_rows), (), generator=generator))])
    firsts = [token for token in range(length) if parents[token] not in parents[:token]]
    drawn = tuple(token for token in firsts if torch.rand((), generator=generator) < 0.7)
    kinds = [KINDS[(seed + i) % 4] for i in range(length + 1)]
    draft = torch.stack([random_law(vocab, KINDS[i % 3], generator) for i in range(len(drawn) + 1)])
    target = torch.stack([random_law(vocab, kind, generator) for kind in kinds])
    for index, token in enumerate(drawn):
        if (seed + index) % 4 == 3:
            draft[index] = target[parents[token]]
    return Branches(tuple(parents), drawn), draft[:-1], target


def trees_drawn(
    branches: Branches, draft: torch.Tensor, target: torch.Tensor, trials: int, generator
) -> torch.Tensor:
    """Tokens of trees, [trials, n]: first children from their laws where they have one, others the
    likeliest untried.
    """
    tokens = torch.zeros(trials, len(branches.parents), dtype=torch.int64)
    for children in branches.children:
        # What is sure may depend on anything that was drawn, and on nothing that verifies.
        likely = (7 * torch.arange(target.shape[1]) % target.shape[1] + 1.0).expand(trials, -1)
        for child in children:
            token = child - 1
            if token in branches.drawn:
                law = draft[branches.drawn.index(token)]
                likely = likely * 0 + law + 1e-6 * likely
                tokens[:, token] = draw(law.expand(trials, -1).contiguous(), generator)
            else:
                tokens[:, token] = likely.argmax(-1)
            likely = likely.scatter(1, tokens[:, token : token + 1], -1.0)
    return tokens


def emitted_by_trees(
    branches: Branches,
    draft: torch.Tensor,
    target: torch.Tensor,
    draws: int,
    generator: torch.Generator,
    propose: Callable[..., torch.Tensor] = trees_drawn,
) -> torch.Tensor:
    """How often each token came after each row: [n + 1, vocab]."""
    rows, vocab = target.shape
    counts = torch.zeros(rows, vocab, dtype=torch.int64)
    for start in range(0, draws, 10_000):
        trials = min(10_000, draws - start)
        proposed = propose(branches, draft, target, trials, generator)
        coins = torch.rand(trials, rows, dtype=torch.float64, generator=generator)
        ends, after = accept_tree(
            proposed,
            branches,
            draft.expand(trials, *draft.shape) if branches.drawn else None,
            target.expand(trials, *target.shape),
            coins,
        )
        for end in ends.unique().tolist():
            here = ends == end
            path = branches.path(end)
            for row, child in zip(path, [*path[1:], 0], strict=True):
                came = proposed[here, child - 1] if child else after[here]
                counts[row] += came.bincount(minlength=vocab)
    return counts
