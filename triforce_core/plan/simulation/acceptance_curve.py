"""How many drafted tokens hold: what a plan assumes, or what an earlier run measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from triforce_core.settings import DEFAULT_BUDGET
from triforce_offload.errors import UsageError

# The target accepts this share of the retrieval model's tokens, at a budget of 4096. Published for
# 120K tokens of PG-19 with a 4K budget: .965 (TriForce); SmolLM2-135M after 6,000 tokens: .96 to
# .99 with 1K (benchmarks/results/bench_triforce.json).
DEFAULT_ACCEPTANCE = 0.95
# The model above accepts this share of what n-gram lookup proposes, misses included: passes gave
# 1.0 to 1.3 tokens, and steps of the retrieval model 1.0 to 1.1 (the same file).
NGRAM_ACCEPTANCE = 0.1
# N-gram lookup finds something for this share of the steps: 0.04 to 0.13 tokens a step (the same
# file), in drafts that are mostly of one token.
NGRAM_PROPOSED = 0.2
# The model above accepts this share of a small model's tokens: one alone speeds an A100 up by 1.42
# to 1.56 (TriForce), about what one accepted token in two gives.
MODEL_ACCEPTANCE = 0.5
# A model accepts this share of what it drafts itself with all layers in 4 bits. SmolLM2-135M:
# .910 where exact weights have .964 (scripts/bench int4_copies); larger models lose less:
# Qwen2.5-7B makes 28 tokens a pass of such drafts (SubSpec, arXiv 2509.18344). Not measured here on
# any of their size.
INT4_ACCEPTANCE = 0.95
# And this share with all layers read by their high bits, 8 bits a number. SmolLM2-135M in
# float32, three stretches each: .982 after 2,000 tokens, .978 after 6,000 (bench_readings). With
# its output matrix read so too .969 and .960, so that is not done.
SPLIT_ACCEPTANCE = 0.98
# Of float16 the high byte has two bits of mantissa: .952 and .933.
HALVES_ACCEPTANCE = 0.942
# And this share with a retrieval cache in 8 bits. SmolLM2-135M in float32, with all of a text in
# the cache: .995 (bench_rounded_kv), .995 and .994 (bench_readings).
ROUNDED_ACCEPTANCE = 0.995
# Of what holds with weights read cheaply this share does with such a cache, too: the same tokens
# are lost. .9805 and .9771, where the weights alone give .9815 and .9777 (bench_readings).
_ROUNDED_TOO = 0.999
# The rejected share falls with this power of the budget: see `AcceptanceCurve`.
_EXPONENT = 0.5
# No other budget is taken to be accepted more often than this.
_MOST = 0.995


@dataclass(frozen=True)
class AcceptanceCurve:
    """outer: of the retrieval model's tokens by the target, at `budget` tokens
    inner: of the drafter's tokens by the model above it
    churn: share of the retrieval cache that a refresh moves
    int4_copies: of what a model all of whose layers are in 4 bits drafts, by itself with the exact
        ones; split, halves: of one that reads the high bits of all layers, in bfloat16 and in
        float16; rounded: of one whose retrieval cache is in 8 bits
    assumed: whether `outer` and `inner` are the defaults, and nobody measured or gave them

    What is rejected falls with the square root of the budget: (1 - a) ~ budget ** -0.5. Between 256
    and 1024 tokens it fell with powers of 0.64 and 0.76 (SmolLM2-135M, refreshed by mass), between
    4K and 12K with 0.49 (TriForce's .914 on a chip and .95 offloaded): the least of these.
    """

    outer: float = DEFAULT_ACCEPTANCE
    budget: int = DEFAULT_BUDGET
    inner: float = NGRAM_ACCEPTANCE
    churn: float = 0.06
    int4_copies: float = INT4_ACCEPTANCE
    split: float = SPLIT_ACCEPTANCE
    halves: float = HALVES_ACCEPTANCE
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
        int4: float = 0.0,
        by_high_bits: float = 0.0,
        *,
        halves: bool = False,
        rounded: bool = False,
    ) -> float:
        """Acceptance with another budget. Nothing is rejected for what a budget leaves out of a
        text that it holds.

        context: tokens of the text, far more than any budget if None. int4: share of the
            layers in 4 bits; by_high_bits: of those that are read by their high bits; halves:
            whether these are bytes of float16; rounded: whether the retrieval cache is in 8 bits
        """
        rejected = (1 - self.outer) * (self.budget / budget) ** _EXPONENT
        if left_out := _left_out(self.budget, self.context):
            rejected *= _left_out(budget, context) / left_out
        held = min(max(0.0, 1 - rejected), max(_MOST, self.outer))
        weights = 1 - int4 * (1 - self.int4_copies)
        weights *= 1 - by_high_bits * (1 - (self.halves if halves else self.split))
        if rounded:
            weights = min(self.rounded, weights * _ROUNDED_TOO)
        return held * weights

    @classmethod
    def measured(cls, path: str | Path) -> AcceptanceCurve:
        """From what `triforce generate --stats` wrote. Raises UsageError."""
        try:
            stats = json.loads(Path(path).read_text("utf-8"))
            acceptance, cache = stats["acceptance"], stats["retrieval"]
            curve = cls(assumed=False)
            if cache and acceptance["target"] is not None:
                curve = replace(
                    curve,
                    outer=min(float(acceptance["target"]), 0.999),
                    budget=int(cache["budget_tokens"]),
                    inner=float(acceptance["retrieval"] or 0.0)
                    * min(1.0, float(stats["draft_tokens"]["inner_mean"] or 0.0)),
                )
                if stats["placement"].get("int4_layers"):
                    # It is in what was measured.
                    curve = replace(curve, int4_copies=1.0)
                if cache.get("reads_high_bits"):
                    curve = replace(curve, split=1.0, halves=1.0)
                if cache.get("in_8_bits"):
                    curve = replace(curve, rounded=1.0)
                if cache["churn"] is not None:
                    curve = replace(curve, churn=float(cache["churn"]))
            elif acceptance["target"] is not None:
                curve = replace(curve, inner=min(float(acceptance["target"]), 0.999))
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise UsageError(f"{path} does not hold the stats of a run: {error}") from error
        return curve


def _left_out(budget: int, context: int | None) -> float:
    """The share of a text that a budget does not hold."""
    return 1.0 if context is None else max(0.0, 1 - budget / context)


def expected_tokens(acceptance: float, drafted: float) -> float:
    """Tokens of a round that drafts so many: (1 - a^(g+1)) / (1 - a) (Leviathan et al., 2023)."""
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
