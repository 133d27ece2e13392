"""The proposer of a draft model or a head: chains, or trees."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Protocol

import torch

from triforce_core.decoding.acceptance import Draft, Rule
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import conditioned, distributions
from triforce_core.decoding.levels import check_token
from triforce_core.decoding.trees.growing import Candidate, Tree, younger
from triforce_core.decoding.trees.growth import Growth
from triforce_core.decoding.trees.prefixes import Prefixes
from triforce_core.params import SamplingParams
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import put

# Number of likeliest tokens of a row that may become its children.
_WIDEST = 32


class ModelDrafter(Protocol):
    """A model that drafts token by token, or level by level of a tree.

    device: device that computes
    most: number of tokens of the largest draft
    """

    device: torch.device
    most: int

    @property
    def deepest(self) -> int:
        """Number of tokens of the longest chain, or path of a tree."""
        return self.most

    def catch_up(self, text: Text, count: int) -> torch.Tensor | None:
        """Prepare for a draft of `count` tokens. Return the tokens of the text that must run first;
        None if nothing can be drafted now.
        """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run tokens [n] after those run so far. Return the logits after the last, [1, vocab]."""

    def forward_tree(self, tree: Tree, rows: Sequence[int]) -> torch.Tensor:
        """Run the given rows of a tree, of one level, behind the tokens of `catch_up`, or the whole
        tree. Rows come in the order of the tree. Return the logits after the given rows, [rows,
        vocab].
        """

    def have_drawn(self, tokens: torch.Tensor) -> None:
        """Note the tokens [n] that were drawn, and run, since `catch_up`."""


class ModelProposer:
    """A proposer for one request. A chain takes one forward a token, without waiting for the
    device; a tree one forward a level, and one wait.
    """

    def __init__(self, drafter: ModelDrafter, params: SamplingParams, rule: Rule) -> None:
        self._drafter = drafter
        self._params = params
        self._rule = rule

    def propose(self, text: Text, count: int) -> Draft:
        """Propose at most `count` tokens; -1 where the draft model's logits are not finite."""
        drafter = self._drafter
        count = min(count, drafter.most, drafter.deepest)
        tokens: list[torch.Tensor] = []
        drawn_from: list[torch.Tensor] = []
        batch = drafter.catch_up(text, count) if count else None
        for i in range(count if batch is not None else 0):
            # A distribution that contains NaN gives -1, which the verifier detects.
            before = Prefixes.of_chain(torch.cat(tokens).clamp_(min=0), 1) if tokens else None
            drawn_from.append(distributions(drafter.forward(batch), self._params, text, before))
            tokens.append(self._rule.draw(drawn_from[-1], len(text.tokens) + i))
            batch = tokens[-1].clamp(min=0)
        if not tokens:
            return Draft(put([], drafter.device))
        drawn = torch.cat(tokens)
        # All but the last were run.
        drafter.have_drawn(drawn[:-1])
        return Draft(drawn, torch.cat(drawn_from))

    def branch(self, text: Text, growth: Growth, nodes: int, deepest: int) -> Draft:
        """Brancher.branch. Raises CheckpointError if a distribution contains NaN."""
        drafter, tree, drawn_from = self._drafter, Tree(), []
        nodes, deepest = min(nodes, drafter.most), min(deepest, drafter.deepest)
        if (batch := drafter.catch_up(text, nodes)) is None:
            return tree.draft(drafter.device)
        logits, rows = drafter.forward(batch), [0]
        for depth in range(deepest):
            below = len(tree)
            if self._params.changes_logits:
                paths = [tree.path(row) for row in rows]
                after = Prefixes(put(tree.tokens, drafter.device), paths)
                logits = conditioned(logits, self._params, text, after)
            self._grow(tree, rows, logits, growth, nodes, len(text.tokens) + depth, drawn_from)
            rows = [
                row for row in range(below + 1, len(tree) + 1) if growth.may_bear(tree.values[row])
            ]
            if not rows or len(tree) == nodes or depth + 1 == deepest:
                break
            if not growth.is_worth_a_level([tree.values[row] for row in rows]):
                break
            logits = drafter.forward_tree(tree, rows)
        growth.grew(len(tree))
        return tree.draft(drafter.device, drawn_from)

    def _grow(
        self,
        tree: Tree,
        rows: Sequence[int],
        logits: torch.Tensor,
        growth: Growth,
        nodes: int,
        position: int,
        drawn_from: list[torch.Tensor],
    ) -> None:
        """Add children to rows of equal depth in a tree.

        logits: logits after the rows, [rows, vocab]
        position: index in the sequence of the children
        """
        # Probabilities at temperature 1, because a request's distribution may have a single token.
        best = logits.log_softmax(-1).topk(min(_WIDEST, logits.shape[-1]))
        likely = come(best.values.exp()).tolist()
        tokens = best.indices.tolist()
        check_token(-1 if any(isnan(row[0]) for row in likely) else 0)
        # Decide which rows get a first child before it is drawn: another choice would add bias.
        firsts = []
        for i, row in enumerate(rows):
            chance = growth.chance(0, likely[i][0])
            if (value := tree.values[row] * chance) >= growth.level_least:
                firsts.append((value, -i))
        firsts = sorted(firsts, reverse=True)[: nodes - len(tree)]
        if not firsts:
            return
        chosen = [-i for _, i in firsts]
        probs = distributions(logits[put(chosen, logits.device)], self._params)
        places = torch.full((len(chosen),), position, device=logits.device)
        drawn = come(self._rule.draw(probs, places)).tolist()
        check_token(min(drawn))
        # The token of a one-hot distribution was certain to be proposed.
        has_law = self._params.temperature > 0
        if has_law:
            drawn_from.append(probs)
        later: list[Candidate] = []
        for (value, _), i, token in zip(firsts, chosen, drawn, strict=True):
            row = rows[i]
            tree.add(row, token, value, likely[i][0], drawn=has_law)
            others = [pair for pair in zip(tokens[i], likely[i], strict=True) if pair[0] != token]
            rest = 1 - dict(zip(tokens[i], likely[i], strict=True)).get(token, 0.0)
            later += younger(growth, tree.values[row] - value, row, rest, others)
        # The sort is stable, so no child comes before an elder sibling of equal value.
        later.sort(key=lambda candidate: -candidate.value)
        for candidate in later[: nodes - len(tree)]:
            tree.add(candidate.parent, candidate.token, candidate.value, candidate.sure)
