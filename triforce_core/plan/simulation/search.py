"""The planner: finds the plan with the least simulated seconds per token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from triforce_core.plan.fitting import needs_keys, needs_weights
from triforce_core.plan.formats import splits_blocks
from triforce_core.plan.plan import Plan
from triforce_core.plan.simulation.candidates import Candidate, candidates
from triforce_core.plan.simulation.case import Case
from triforce_core.settings import (
    AUTO,
    AUTO_DRAFT_TOKENS,
    EXACT,
    INT8,
    NO_DRAFTER,
    SPLIT,
    SPLIT_EXPERTS,
)
from triforce_offload.errors import DoesNotFitError, TriforceError, UsageError
from triforce_offload.units import format_bytes

BUDGETS = tuple(256 << i for i in range(8))
DRAFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 224, 256)
INNER_DRAFTS = (1, 2, 3, 4, 6, 8)
# Numbers of tokens of a head's trees.
TREES = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, AUTO_DRAFT_TOKENS)
# Of these, those by which plans are compared before the lengths of the best are chosen.
_FEW_DRAFTS = (1, 4, 12, 32, 80)
_FEW_INNER_DRAFTS = (1, 3, 6)
# Blocks are split unasked if a token takes this share of the seconds at most: what joining them
# takes was not measured on a GPU.
_LEAST_GAIN_OF_SPLITTING = 0.98


def choose(case: Case) -> Candidate:
    """Return the fastest plan, over all permitted formats of weights and KV, and with n-grams in
    place of a head that nobody asked for: its memory may be worth more than its drafts.

    A few draft lengths decide where everything goes; then the best of all lengths is taken.

    Raises UsageError, or DoesNotFitError, which suggests the smallest changes that would fit.
    """
    plans, refused = [], None
    drafters = [case, case.without_head] if "draft" in case.auto else [case]
    for each in chain.from_iterable(map(_ways, drafters)):
        found = None
        try:
            found = choose_in_format(each)
            plans.append(found)
        except DoesNotFitError as error:
            refused = refused or error
        if found is None or found.memory.streamed_layers:
            plans += _with_smaller_copies(each)
    if refused and not plans:
        raise refused
    return with_best_lengths(min(plans, key=_with_a_margin))


def _with_a_margin(plan: Candidate) -> float:
    """Return the seconds of a token, more of a plan that must be clearly faster to be chosen."""
    splits_blocks = plan.case.split is not None and plan.case.pieces is not None
    return plan.seconds_per_token / (_LEAST_GAIN_OF_SPLITTING if splits_blocks else 1)


def _with_smaller_copies(case: Case) -> list[Candidate]:
    """Return the fastest plan in which copies in fewer bits draft, if there is one."""
    method = case.method.with_smaller_copies
    if method is None or case.fixed.get("method", "triforce") != "triforce":
        return []
    with suppress(DoesNotFitError):
        best = choose_in_format(replace(case, method=method))
        return [best] if best.plan.placement.copied_layers else []
    return []


def _ways(case: Case) -> list[Case]:
    """Return the case in each combination of "auto" formats that may be the fastest.

    Weights and KV of bfloat16 may be split, and weights in blocks. Quantised weights may become
    dense on the emulated device, where decoding takes longer than reading.
    """
    ways, splits = [case], case.dtype.name == "bfloat16"
    if "weights" in case.auto:
        if case.pieces and case.hardware.emulated:
            ways.append(replace(case, pieces=None))
        elif not case.pieces and splits:
            ways.append(replace(case, split=SPLIT))
            if case.layouts.experts:
                ways.append(replace(case, split=SPLIT_EXPERTS))
        elif _may_split_blocks(case):
            ways.append(replace(case, split=SPLIT))
    stores_blocks = case.config.kv_layers and not case.config.chooses_keys
    if "kv" in case.auto and splits and stores_blocks:
        ways += [replace(each, split_kv=True) for each in ways]
    return ways


def _may_split_blocks(case: Case) -> bool:
    """Whether weights in blocks may be split. Experts cannot, and the processor computes no share
    of such layers.
    """
    if case.layouts.experts or case.host_compute not in (AUTO, 0):
        return False
    return splits_blocks(case.config, case.dtype, case.stored)


def choose_in_format(case: Case) -> Candidate:
    """Return the fastest plan of a case with fixed formats, with one of a few lengths."""
    case.check()
    draft_kv = case.method.draft_kv
    if rounds := draft_kv == AUTO and case.hardware.asynchronous:
        draft_kv = INT8
    fitting, refused = _grid(case, _budgets(case), draft_kv)
    if not fitting:
        raise shortest_change(case, refused) from refused
    best = _fastest(fitting)
    if rounds and best.plan.budget:
        # Also try an exact cache, or a larger one: it causes no rejections, but takes twice the
        # bytes.
        most = 2 * best.plan.budget
        budgets = [each for each in _budgets(case) if best.plan.budget <= each <= most]
        exact, _ = _grid(case, budgets, EXACT)
        best = _fastest([best, *exact])
    return best


def with_best_lengths(best: Candidate) -> Candidate:
    """Return the plan with whichever drafts are fastest, in the formats that it has."""
    case, plan = best.case, best.plan
    fitting, _ = _of_lengths(
        case,
        plan.budget,
        _lengths(case, plan.budget, DRAFTS, INNER_DRAFTS),
        plan.method.draft_kv,
    )
    return _fastest([best, *fitting, *_trees(case, plan)])


def _trees(case: Case, plan: Plan) -> list[Candidate]:
    """Return a plan in which the retrieval level drafts trees, with each length of the drafter's
    drafts, if it may; without a retrieval level, plans in which a head does.
    """
    method = replace(case.method, draft_tokens=AUTO)
    if "draft_tokens" in case.fixed or case.method.tree != AUTO:
        return []
    if not plan.budget:
        return _trees_of_head(case)
    if not (case.sizes(plan.method).grows_trees and method.grows_trees):
        return []
    (_, inners), *_ = _lengths(case, plan.budget, DRAFTS[-1:], INNER_DRAFTS)
    with suppress(DoesNotFitError):
        return candidates(case, plan.budget, 0, inners, plan.method.draft_kv)
    return []


def _trees_of_head(case: Case) -> list[Candidate]:
    """Return plans in which a head drafts trees for the target, if one does."""
    head, found = case.drafter and case.drafter.joins, []
    plain = case.fixed.get("method") == "autoregressive"
    if head and not plain and "draft_tokens" not in case.fixed and case.method.tree == AUTO:
        with suppress(DoesNotFitError):
            for tokens in TREES:
                found += candidates(case, 0, 0, (0,), tree=tokens)
    return found


def _grid(
    case: Case, budgets: Iterable[int], draft_kv: str
) -> tuple[list[Candidate], DoesNotFitError | None]:
    """Return what fits of some budgets with a few lengths, and the first refusal."""
    fitting: list[Candidate] = []
    refused: DoesNotFitError | None = None
    for budget in budgets:
        lengths = _lengths(case, budget, _FEW_DRAFTS, _FEW_INNER_DRAFTS)
        found, error = _of_lengths(case, budget, lengths, draft_kv)
        fitting += found if budget else [*found, *_trees_of_head(case)]
        refused = refused or error
    return fitting, refused


def _of_lengths(
    case: Case,
    budget: int,
    lengths: Iterable[tuple[int, tuple[int, ...]]],
    draft_kv: str,
) -> tuple[list[Candidate], DoesNotFitError | None]:
    fitting: list[Candidate] = []
    for drafted, inners in lengths:
        try:
            fitting += candidates(case, budget, drafted, inners, draft_kv)
        except DoesNotFitError as error:
            # What comes first needs the least memory; a longer draft needs more.
            return fitting, error
    return fitting, None


def _fastest(candidates: list[Candidate]) -> Candidate:
    """Return the fastest candidate by simulation. Candidates whose lower bound is above the best
    time are not simulated.
    """
    best, *others = sorted(candidates, key=lambda each: each.least)
    for other in others:
        if other.least >= best.seconds_per_token:
            break
        if other.seconds_per_token < best.seconds_per_token:
            best = other
    return best


def _budgets(case: Case) -> tuple[int, ...]:
    """Return the retrieval budgets to try, smallest first; 0 is no retrieval level."""
    method, budget = case.fixed.get("method"), case.fixed.get("budget")
    if method == "speculative" and case.draft == NO_DRAFTER:
        raise UsageError("--method speculative needs a drafter, and --draft is none")
    if method in ("speculative", "autoregressive"):
        return (0,)
    if case.config.chooses_keys:
        if budget:
            raise needs_keys(budget, case.config.family)
        return (0,)
    streamed = case.fixed.get("streamed_layers", ())
    instead = [
        layer for name in ("copied_layers", "split_layers") for layer in case.fixed.get(name, ())
    ]
    if not set(streamed) <= set(instead):
        if budget:
            raise needs_weights(budget, len(streamed))
        return (0,)
    if budget:
        return (int(budget),)
    least, most = 2 * case.chunk_tokens, 2 * case.context
    budgets = tuple(budget for budget in BUDGETS if least <= budget < most) or (least,)
    if not case.config.kv_layers:
        # The retrieval level reads the windows and cheaper weights, and retrieves nothing.
        budgets = (least,)
    # Also try no retrieval level, unless triforce is fixed or there is no drafter for drafts.
    alone = case.draft == NO_DRAFTER and _fixes_drafts(case)
    return budgets if method == "triforce" or alone else (0, *budgets)


def _lengths(
    case: Case, budget: int, drafts: tuple[int, ...], inners: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield draft tokens to look at, shorter drafts first, each with inner draft tokens; 0 for
    plain decoding.
    """
    fixed = case.fixed
    alone = case.draft == NO_DRAFTER and not budget
    if alone or fixed.get("method") == "autoregressive":
        yield 0, (0,)
        return
    if not budget and "method" not in fixed and not _fixes_drafts(case):
        # Drafts may not pay, as where each of their tokens makes a pass read other experts.
        yield 0, (0,)
    if "draft_tokens" in fixed:
        drafts = (fixed["draft_tokens"],)
    if "inner_draft_tokens" in fixed:
        inners = (fixed["inner_draft_tokens"],)
    if case.draft == NO_DRAFTER or not budget:
        inners = (0,)
    for drafted in drafts:
        few = tuple(inner for inner in inners if inner <= drafted)
        yield drafted, inners if "inner_draft_tokens" in fixed else few


def _fixes_drafts(case: Case) -> bool:
    """Whether the user chose how long drafts are, and so that there are some."""
    return not case.fixed.keys().isdisjoint(("draft_tokens", "inner_draft_tokens"))


def shortest_change(case: Case, refused: DoesNotFitError) -> DoesNotFitError:
    """Return the error extended by the smallest changes with which the case would fit."""
    remedies = []
    best = _largest_context(case)
    if best:
        remedies.append(f"--context {best} fits")
    for name in ("budget", "resident_kv_blocks"):
        if case.fixed.get(name) and _fits(
            replace(case, fixed={k: v for k, v in case.fixed.items() if k != name})
        ):
            flag = "--budget" if name == "budget" else "--resident-kv"
            remedies.insert(0, f"it fits without {flag} {case.fixed[name]}")
    missing = refused.needed_bytes - refused.available_bytes
    which = "host" if "host memory" in str(refused) else "device"
    remedies.append(f"so does {format_bytes(missing)} more {which} memory")
    if not best:
        remedies[-1] = f"{format_bytes(missing)} more {which} memory would do"
    if which == "host" and case.hardware.disk_bytes_per_second is None:
        remedies.append("--disk-bandwidth lets layers that stream be read from disk")
    what = str(refused).split(" needs ")[0]
    return DoesNotFitError(what, refused.needed_bytes, refused.available_bytes, "; ".join(remedies))


def _largest_context(case: Case) -> int:
    """Return the longest context that fits, in steps of 256 tokens; 0 if none does."""
    low, high = 0, case.context // 256
    while low < high:
        middle = (low + high + 1) // 2
        tokens = middle * 256
        if tokens > 1 and _fits(
            replace(case, context=tokens, new_tokens=min(case.new_tokens, tokens - 1))
        ):
            low = middle
        else:
            high = middle - 1
    return low * 256


def _fits(case: Case) -> bool:
    """Whether any plan of the case fits. The smallest plans of each method suffice to know."""
    for budget in _budgets(case)[:2]:
        with suppress(TriforceError):
            candidates(case, budget, *next(_lengths(case, budget, DRAFTS, INNER_DRAFTS)))
            return True
    return False
