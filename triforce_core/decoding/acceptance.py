"""Acceptance of drafts: rules that keep the output distribution exactly the verifier's.

One rule serves every level. Below, `p` is the verifier's distribution at a position, and `q` is
the distribution from which the proposed token was actually drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from triforce_core.decoding.distributions import draw
from triforce_core.decoding.trees.tree import Branches, Walk, accept_tree
from triforce_core.params import SamplingParams
from triforce_core.plan.levels import DISTRIBUTION_ROWS
from triforce_kernels.sampling import sampling
from triforce_offload.memory.device import put


class Draft(NamedTuple):
    """Proposed tokens, each with the distribution it was drawn from.

    tokens: [n] int64
    probs: [n, vocab] float32; None if every distribution is one-hot, because the token was certain
        to be proposed
    confidence: the greatest probability of each distribution; empty if the proposer does not
        report it
    branches: how the tokens follow one another, and which of them the rows of `probs` belong to;
        None for a chain, in which each token follows the one before it
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    confidence: Sequence[float] = ()
    branches: Branches | None = None


class Verdict(NamedTuple):
    """What a rule decided about drafts. Both fields are [...] int64.

    accepted: number of accepted draft tokens; for a tree, the row of the last accepted token
    token: the token that follows; -1 if the verifier's probabilities are not numbers
    """

    accepted: torch.Tensor
    token: torch.Tensor


class Rule(Protocol):
    """How tokens are drawn, and when a draft token is as good as one that the verifier draws.

    position: index in the sequence of the first row's token
    """

    def draw(self, probs: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
        """Draw one token for each row of `probs` [rows, vocab].

        position: a tensor [rows] int64 of each row's position if the rows are not consecutive
        """

    def likeliest(
        self, logits: torch.Tensor, params: SamplingParams, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that a verifier most likely draws if its logits are near these, and
        their chances: [rows, count] int64 and float32, likeliest first.

        logits: [rows, vocab] float32
        positions: [rows] int64 of the tokens
        """

    def accept(self, draft: Draft, probs: torch.Tensor, position: int) -> Verdict:
        """Accept a prefix of a chain, or a path of a tree.

        probs: the verifier's distributions [n + 1, vocab], one for each draft token and one for
            the token after them
        """


def accept(
    tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    generator: torch.Generator,
) -> Verdict:
    """Apply speculative sampling (Leviathan et al., 2023; Chen et al., 2023) to all positions.

    Each token x is accepted with probability min(1, p[x] / q[x]). After the first rejection, the
    next token is drawn from norm(max(p - q, 0)); if all tokens are accepted, it is drawn from the
    p that follows them. Every token then has distribution p given the tokens before it. This holds
    for any q, as long as x was drawn from q.

    Shapes: tokens [..., n], draft_probs [..., n, vocab], target_probs [..., n + 1, vocab]; n may
    be 0. If draft_probs is None, each q is one-hot.
    """
    many, n, vocab = tokens.shape[:-1], tokens.shape[-1], target_probs.shape[-1]
    drafts = many.numel()
    coins = torch.rand(
        (drafts, n + 1), dtype=torch.float64, device=tokens.device, generator=generator
    )
    accepted, token = sampling.accept(
        tokens.reshape(drafts, n),
        None if draft_probs is None else draft_probs.reshape(drafts, n, vocab),
        target_probs.reshape(drafts, n + 1, vocab),
        coins,
    )
    return Verdict(accepted.view(many), token.view(many))


class Optimal:
    """The rule that accepts with probability 1 - TV(p, q), the highest that any rule can reach.

    All coins come from one generator.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def draw(self, probs: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
        return draw(probs, self._generator)

    def likeliest(
        self, logits: torch.Tensor, params: SamplingParams, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _likeliest(logits, count)

    def accept(self, draft: Draft, probs: torch.Tensor, position: int) -> Verdict:
        if draft.branches is None:
            return accept(draft.tokens, draft.probs, probs, self._generator)
        rows, device = probs.shape[0], probs.device
        coins = torch.rand(1, rows, dtype=torch.float64, device=device, generator=self._generator)
        drawn_from = None if draft.probs is None else draft.probs[None]
        last, token = accept_tree(
            draft.tokens[None], draft.branches, drawn_from, probs[None], coins
        )
        return Verdict(last[0], token[0])


class Coupled:
    """The rule by which all levels draw with the same noise, a function of (seed, position) alone.

    The token at a position is the arg-max of the log-probabilities plus Gumbel noise. A draft token
    is accepted if the verifier draws the same token. So the output for a seed does not depend on
    the draft: up to rounding, it is the output of plain decoding. The acceptance probability is at
    least (1 - TV) / (1 + TV) (Daliri et al., 2024: coupling without communication).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draw(self, probs: torch.Tensor, position: int | torch.Tensor) -> torch.Tensor:
        # arg-max of log p + Gumbel = arg-max of p / Exponential, with no log of zero.
        rows, vocab = probs.shape
        if isinstance(position, int):
            position = torch.arange(position, position + rows, device=probs.device)
        # The noise takes several times as much memory as the distributions.
        parts = zip(probs.split(DISTRIBUTION_ROWS), position.split(DISTRIBUTION_ROWS), strict=True)
        return torch.cat([self._race(*part, vocab) for part in parts])

    def _race(self, probs: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
        race = probs.double() / exponential_noise(self._seed, positions, vocab)
        return race.argmax(-1).masked_fill(probs.sum(-1).isnan(), -1)

    def likeliest(
        self, logits: torch.Tensor, params: SamplingParams, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rule.likeliest: the first ones in the race that all levels run with the same noise."""
        if not params.temperature:
            return _likeliest(logits, count)
        best = logits.topk(min(_RACING, logits.shape[-1]))
        noise = exponential_noise(self._seed, positions, logits.shape[-1], best.indices)
        race = (best.values.double() / params.temperature - noise.log()).softmax(-1)
        first = race.topk(min(count, race.shape[-1]))
        return best.indices.gather(1, first.indices), first.values.float()

    def accept(self, draft: Draft, probs: torch.Tensor, position: int) -> Verdict:
        if draft.branches is not None:
            return self._walk(draft.tokens, draft.branches, probs, position)
        own = self.draw(probs, position)
        accepted = (own[:-1] == draft.tokens).cumprod(-1).sum(-1)
        return Verdict(accepted, own.gather(0, accepted.view(1)).squeeze(0))

    def _walk(
        self, tokens: torch.Tensor, branches: Branches, probs: torch.Tensor, position: int
    ) -> Verdict:
        own = self.draw(probs, position + put(branches.depths, probs.device))
        walk = Walk(branches, probs.device)
        holds = (tokens[walk.child] == own.unsqueeze(1)) & walk.exists
        last = walk.end(holds[None])
        return Verdict(last[0], own.gather(0, last).squeeze(0))


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of greatest probability at temperature 1, since a request's distribution
    may have a single token.
    """
    best = logits.topk(min(count, logits.shape[-1]))
    return best.indices, (best.values - logits.logsumexp(-1, keepdim=True)).exp()


def exponential_noise(
    seed: int, positions: torch.Tensor, vocab: int, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return Exponential(1) noise [rows, vocab] float64 for positions [rows] int64, or for `tokens`
    [rows, n] alone.

    The noise is a function of (seed, position, token) alone, and equal on every device: splitmix64
    (Steele et al., 2014) with seed and position as the key and the token as the counter.
    """
    counters = torch.arange(vocab, device=positions.device) if tokens is None else tokens
    key = _mix(_wrap(_mix_int(seed)) + (positions.unsqueeze(1) + 1) * _GOLDEN)
    bits = _shift(_mix(key + (counters + 1) * _GOLDEN), 12)
    return ((bits.double() + 0.5) * 2.0**-52).log_().neg_()


# Number of tokens that run in a race for `likeliest`, those of greatest probability.
_RACING = 64
_MASK = (1 << 64) - 1


def _wrap(value: int) -> int:
    """Return the signed 64-bit integer with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _wrap(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _wrap(0xBF58476D1CE4E5B9), _wrap(0x94D049BB133111EB)


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right logically, which torch does not offer."""
    return (bits >> by) & ((1 << 64 - by) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _mix_int(value: int) -> int:
    value = (value ^ value >> 30) * (_FIRST & _MASK) & _MASK
    value = (value ^ value >> 27) * (_SECOND & _MASK) & _MASK
    return value ^ value >> 31


def make_rule(name: str, seed: int, device: torch.device) -> Rule:
    """Return the rule of a request. All its randomness comes from `seed`."""
    if name == "coupled":
        return Coupled(seed)
    return Optimal(torch.Generator(device).manual_seed(seed))
