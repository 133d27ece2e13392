"""Acceptance rates of draft tokens: assumed by a plan, or measured in an earlier run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path

from triforce_core.model.config import ModelConfig
from triforce_core.settings import DEFAULT_BUDGET
from triforce_kernels.weights.block_types import BlockType
from triforce_offload.errors import UsageError

# Share of the retrieval level's tokens that the target accepts, with a budget of 4096. Published
# for 120K tokens of PG-19 with a 4K budget: .965 (TriForce). SmolLM2-135M after 6,000 tokens: .96
# to .99 with 1K (benchmarks/results/bench_triforce.json).
DEFAULT_ACCEPTANCE = 0.95
# Share of the n-gram drafter's tokens that the level above accepts, misses included: passes gave
# 1.0 to 1.3 tokens, and steps of the retrieval level 1.0 to 1.1 (the same file).
NGRAM_ACCEPTANCE = 0.1
# Share of the steps for which n-gram lookup finds a match: 0.04 to 0.13 tokens a step (the same
# file), in drafts of mostly one token.
NGRAM_PROPOSED = 0.2
# Share of a draft model's tokens that the level above accepts: a draft model alone speeds up an
# A100 by 1.42 to 1.56 (TriForce), which corresponds to about one accepted token in two.
MODEL_ACCEPTANCE = 0.5
# Share of an MTP head's tokens that its model accepts: llama.cpp with drafts of 3 tokens is 1.8 to
# 2.2 times as fast on Qwen3.8-27B (its pull request 22673), which corresponds to about .7. With the
# assistant of Gemma 4 31B and drafts of 4 it is 2.6 to 3.3 times as fast (its pull request 23398).
HEAD_ACCEPTANCE = 0.7
# Share of a DFlash drafter's tokens that its model accepts, for drafts of 7 tokens. Passes of
# Qwen3.8-27B with DFlash 2 yield about 4 tokens for prose and 5 for technical texts (mistral.rs,
# pull request 2386), and 5.5 on average (exllamav3, pull request 379): .78, .86 and .88.
BLOCK_ACCEPTANCE = 0.8
# Share of its own drafts with all layers in 4 or 3 bits that a model accepts. SmolLM2-135M: .947
# and .848, if only these bits cause rejections (scripts/bench readings). Larger models lose less:
# Qwen2.5-7B makes 28 tokens a pass with drafts of 4 bits (SubSpec, arXiv 2509.18344). Assumed: a
# loss of two thirds of SmolLM2's. Not measured here for models of that size.
COPY_ACCEPTANCE = {4: 0.96, 3: 0.9}
# The same share for drafts from the high bits of all layers, 8 bits a number. SmolLM2-135M in
# float32, three stretches each: .982 after 2,000 tokens, .978 after 6,000 (bench_readings). With
# the high bits of the output matrix, too: .969 and .960, so the output matrix is read exactly.
SPLIT_ACCEPTANCE = 0.98
# The same share for the high bits of blocks, by their type: 5.25 bits a number of FP8, 4.5 or a
# little more of the others. SmolLM2-135M in each of these types, three stretches after 2,000
# tokens: .937, .900 and .956, where copies in 4 bits have .947, .943 and .967
# (benchmarks/results/bench_readings_fp8.json and bench_readings_quants.json). Assumed, as for
# copies: a loss of two thirds of that in larger models.
BLOCKS_SPLIT_ACCEPTANCE = {"F8_E4M3": 0.96, "Q6_K": 0.93, "Q5_K": 0.97}
# The same share for a retrieval cache in 8 bits. SmolLM2-135M in float32, with the whole context in
# the cache: .995 (bench_rounded_kv), .995 and .994 (bench_readings).
ROUNDED_ACCEPTANCE = 0.995
# Factor for such a cache in addition to draft copies or high bits, which lose mostly the same
# tokens: .9805 and .9771, where the weights alone give .9815 and .9777 (bench_readings).
_ROUNDED_TOO = 0.999
# Probability that the target accepts a younger child of a token, once it has rejected the elder
# ones, where first children are accepted with HEAD_ACCEPTANCE or more. Assumed: a count by hand, of
# the retrieval level's tokens, gave 8 of 14 (SmolLM2-135M, temperature .6, top-p .9), which is too
# few to be a measurement. Trees of 64 tokens by a head then yield 4.8 and 5.2 tokens a pass with
# paths of 5 and 8 tokens; EAGLE-3 yields 4.68 and 5.39 with such paths for Llama-3.1-8B, in trees
# whose size is not stated (SGLang's pull request 4247).
SIBLING_ACCEPTANCE = 0.5
# Younger children that a token may get.
_SIBLINGS = 4
# Exponent of the budget by which the rejected share falls: see `AcceptanceCurve`.
_EXPONENT = 0.5
# Upper limit of the acceptance that is assumed for another budget.
_MOST = 0.995


def drafter_acceptance(drafter: ModelConfig) -> float:
    """Return the acceptance that is assumed of a draft model or a head."""
    if not drafter.joins:
        return MODEL_ACCEPTANCE
    return BLOCK_ACCEPTANCE if drafter.joins.block else HEAD_ACCEPTANCE


@dataclass(frozen=True)
class AcceptanceCurve:
    """Acceptance rates of draft tokens.

    outer: acceptance of the retrieval level's tokens by the target, with a budget of `budget`
    inner: acceptance of the drafter's tokens by the level above it
    churn: share of the retrieval cache that a refresh copies
    draft_copies: acceptance of drafts from draft copies of all layers, by the exact model; None for
        what is assumed for their bits
    split: acceptance of drafts from the high bits of all layers; None for what is assumed for them
    rounded: acceptance of drafts from a retrieval cache in 8 bits
    context: number of tokens of the context for which `outer` holds; None for far more than a
        budget
    assumed: whether `outer` and `inner` are the defaults, neither measured nor given

    The rejected share falls with the square root of the budget: (1 - a) ~ budget ** -0.5. Between
    256 and 1024 tokens it fell with powers of 0.64 and 0.76 (SmolLM2-135M, refreshed by mass),
    between 4K and 12K with 0.49 (TriForce's .914 on a chip and .95 offloaded). The default is about
    the least of these.
    """

    outer: float = DEFAULT_ACCEPTANCE
    budget: int = DEFAULT_BUDGET
    inner: float = NGRAM_ACCEPTANCE
    churn: float = 0.06
    draft_copies: float | None = None
    split: float | None = None
    rounded: float = ROUNDED_ACCEPTANCE
    context: int | None = None
    assumed: bool = True

    def __post_init__(self) -> None:
        for name, value in (("acceptance", self.outer), ("inner acceptance", self.inner)):
            if not 0 <= value < 1:
                raise UsageError(f"{name} must be at least 0 and less than 1, got {value!r}")

    def at(
        self,
        budget: int,
        context: int | None = None,
        lost_by_copies: float = 0.0,
        lost_by_high_bits: float = 0.0,
        *,
        rounded: bool = False,
    ) -> float:
        """Return the acceptance with another budget. A budget that covers the whole context causes
        no rejections.

        context: number of tokens of the context; None for far more than any budget
        lost_by_copies: share of tokens that is rejected because of draft copies
        lost_by_high_bits: the same because layers are read by their high bits
        rounded: whether the retrieval cache is in 8 bits
        """
        rejected = (1 - self.outer) * (self.budget / budget) ** _EXPONENT
        if left_out := _left_out(self.budget, self.context):
            rejected *= _left_out(budget, context) / left_out
        held = min(max(0.0, 1 - rejected), max(_MOST, self.outer))
        weights = (1 - lost_by_copies) * (1 - lost_by_high_bits)
        if rounded:
            weights = min(self.rounded, weights * _ROUNDED_TOO)
        return held * weights

    def of_copies(self, bits: int) -> float:
        """Return the acceptance with draft copies of all layers."""
        return COPY_ACCEPTANCE[bits] if self.draft_copies is None else self.draft_copies

    def of_high_bits(self, split: Mapping[BlockType | None, float]) -> float:
        """Return the acceptance with the high bits of all layers.

        split: the shares of their numbers that are split, by the type of their blocks; None for
            those that are in none
        """
        if self.split is not None:
            return self.split
        return 1 - sum(share * (1 - _of_type(kind)) for kind, share in split.items())

    @classmethod
    def measured(cls, path: str | Path) -> AcceptanceCurve:
        """Read the rates from a file of `triforce generate --stats`. Raises UsageError."""
        try:
            stats = json.loads(Path(path).read_text("utf-8"))
            acceptance, cache = stats["acceptance"], stats["retrieval"]
            curve = cls()
            if cache and acceptance["target"] is not None:
                curve = replace(
                    curve,
                    assumed=False,
                    outer=min(float(acceptance["target"]), 0.999),
                    budget=int(cache["budget_tokens"]),
                    inner=float(acceptance["retrieval"] or 0.0)
                    * min(1.0, float(stats["draft_tokens"]["inner_mean"] or 0.0)),
                )
                placement = stats["placement"]
                if placement.get("copied_layers") or placement.get("int4_layers"):
                    # The measured rates already include the effect.
                    curve = replace(curve, draft_copies=1.0)
                if cache.get("reads_high_bits"):
                    curve = replace(curve, split=1.0)
                if cache.get("in_8_bits"):
                    curve = replace(curve, rounded=1.0)
                if cache["churn"] is not None:
                    curve = replace(curve, churn=float(cache["churn"]))
            elif acceptance["target"] is not None:
                held = min(float(acceptance["target"]), 0.999)
                if 2 * int(stats["draft_tokens"].get("trees", 0)) > int(stats["passes"]):
                    held = first_child_acceptance(held)
                curve = replace(curve, inner=held)
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise UsageError(f"{path} does not hold the stats of a run: {error}") from error
        return curve


def _of_type(kind: BlockType | None) -> float:
    """Return the acceptance with the high bits of all layers in blocks of one type."""
    return BLOCKS_SPLIT_ACCEPTANCE[kind.name] if kind else SPLIT_ACCEPTANCE


def _left_out(budget: int, context: int | None) -> float:
    """Return the share of the context that a budget does not cover."""
    return 1.0 if context is None else max(0.0, 1 - budget / context)


def expected_tokens(acceptance: float, drafted: float) -> float:
    """Return the expected tokens of a round that drafts g tokens with acceptance a:
    (1 - a^(g+1)) / (1 - a) (Leviathan et al., 2023).
    """
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def sibling_acceptance(acceptance: float) -> float:
    """Return the probability that a younger child is accepted, once the elder ones are rejected.

    acceptance: that of first children. Below `HEAD_ACCEPTANCE`, younger ones are worth less too.
        Assumed to fall with its square: a head of .34 made 1.9 tokens a pass with trees of 24
        (`scripts/bench eagle3_head`), which this takes to be 2.0.
    """
    return SIBLING_ACCEPTANCE * min(1.0, acceptance / HEAD_ACCEPTANCE) ** 2


def first_child_acceptance(held: float) -> float:
    """Return the acceptance of first children of trees of which a token had a child that was
    accepted in a share `held` of cases.
    """
    least, most = 0.0, held
    for _ in range(40):
        middle = (least + most) / 2
        missed = (1 - middle) * (1 - sibling_acceptance(middle)) ** _SIBLINGS
        least, most = (middle, most) if 1 - missed < held else (least, middle)
    return most


def expected_tree(acceptance: float, nodes: int, deepest: int) -> float:
    """Return the expected tokens of a round whose draft is a tree of at most `nodes` tokens and
    `deepest` tokens on a path.

    The tree has the tokens of the greatest probability of being reached and accepted, as
    `trees/retrieval_tree` grows it (Sequoia, Chen et al., 2024). A first child is accepted with
    probability `acceptance`, a younger one with `sibling_acceptance`.
    """
    tokens, sibling = 1.0, sibling_acceptance(acceptance)
    # Value, number of elder siblings, depth, and probability of reaching the token's place.
    waiting = [(-acceptance, 0, 1, 1.0)]
    for _ in range(nodes):
        if not waiting:
            break
        value, elder, depth, reached = heappop(waiting)
        tokens -= value
        if depth < deepest:
            heappush(waiting, (value * acceptance, 0, depth + 1, -value))
        left = reached + value
        if elder < _SIBLINGS:
            heappush(waiting, (-left * sibling, elder + 1, depth, left))
    return tokens
