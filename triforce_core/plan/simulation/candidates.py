"""Candidates of the planner: plans with their placement and the cost of a round."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from triforce_core.model.parts.kept import kv_shape
from triforce_core.plan.fitting import ProcessorShares, Resolved, fit_device, without_kernels
from triforce_core.plan.levels import fitting_budget
from triforce_core.plan.plan import Plan
from triforce_core.plan.simulation.acceptance_curve import (
    NGRAM_PROPOSED,
    expected_tokens,
    expected_tree,
)
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.costs.drafter import DrafterCost, drafter_cost
from triforce_core.plan.simulation.costs.prefill import prefill_seconds
from triforce_core.plan.simulation.costs.round import RoundCost
from triforce_core.plan.simulation.processor import fastest_counts
from triforce_core.settings import AUTO, MethodSettings
from triforce_offload.errors import DoesNotFitError
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import (
    layers_for_kv,
    place_on_processor,
    with_expert_pools,
    with_kv_instead,
)

# Rate at which one host thread gathers chunks before they cross an emulated link (`kv/gather`). A
# GPU reads chunks directly from host memory (`kv/direct`).
GATHER_BYTES_PER_SECOND = 4e9
# Most tokens on a path of a tree by a head, of which each level takes a forward.
_DEEPEST = 10


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and the cost of a round with it.

    step_seconds: duration of a step of the retrieval level
    drafter_seconds: duration of a draft of one token by the drafter
    """

    case: Case
    plan: Plan
    memory: MemoryPlan
    tokens_per_pass: float
    step_seconds: float
    drafter_seconds: float
    round: RoundCost

    @property
    def least(self) -> float:
        """Lower bound of the simulated seconds per token."""
        return self.round.least_seconds / self.tokens_per_pass

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token on the virtual clock."""
        return self.round.seconds / self.tokens_per_pass

    @property
    def device_bytes(self) -> int:
        """Bytes that the plan takes on one GPU."""
        return self.memory.device_bytes + self.case.library_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the plan takes for all GPUs."""
        return self.memory.host_bytes * self.case.hardware.gpus

    @property
    def prefill_seconds(self) -> float:
        """Duration of the prefill of a prompt that leaves room for the new tokens: the longer of
        compute and the copies meanwhile.
        """
        case, matrices = self.case, self.memory.weights_prefill_link_bytes
        compute = prefill_seconds(case.costs, case.context - case.new_tokens)
        rate = case.hardware.stream_bytes_per_second
        crossing = matrices / rate + self.round.disk_seconds
        outwards = max(0, self.memory.host_bytes - matrices)
        first = self.memory.slot_bytes / rate
        return first + max(compute, crossing, outwards / rate)


def candidates(
    case: Case,
    budget: int,
    draft_tokens: int,
    inners: Iterable[int],
    draft_kv: str | None = None,
    *,
    tree: int = 0,
) -> list[Candidate]:
    """Return plans with the placement that the engine would choose, one for each inner length.

    budget: retrieval budget, 0 for no retrieval level
    draft_tokens: length of drafts, 0 for no drafts, or for trees if there is a retrieval level
    inners: lengths of the drafter's drafts for the retrieval level
    tree: number of tokens of a drafter's trees for the target, instead of `draft_tokens`
    Raises DoesNotFitError or UsageError.
    """
    drafted = draft_tokens or tree
    method = replace(
        case.method,
        draft_kv=(draft_kv or case.method.draft_kv) if budget else AUTO,
        method="triforce" if budget else "speculative" if drafted else "autoregressive",
        draft=case.draft,
        draft_tokens=draft_tokens or AUTO,
        inner_draft_tokens=AUTO,
        budget=budget or None,
    )
    fitted, found = _fit(case, method), []
    for memory in _by_processor(case, fitted, drafted):
        chosen = Plan.of(method, memory, fitted.budget)
        chosen = replace(chosen, gpus=case.hardware.gpus, weights=case.weights, kv=case.kv)
        for inner in inners:
            decoding = replace(chosen.method, inner_draft_tokens=inner or AUTO)
            found.append(evaluate(case, replace(chosen, method=decoding), memory, tree))
    return found


def _by_processor(case: Case, fitted: Resolved, draft_tokens: int) -> list[MemoryPlan]:
    """Return a plan with each number of layers, and share of KV, that the processor might
    compute.

    draft_tokens: of a chain or of a tree; 0 for as many as there is room for
    """
    memory = fitted.memory
    if "processor_layers" in case.fixed:
        return [memory]
    if case.host_compute != AUTO:
        shares = ProcessorShares.asked(case.host_compute, case.layouts)
        return [shares.placed_on_processor(memory, case.room)]
    if case.hardware.emulated:
        return [memory]
    rows = case.sequences * (1 + (draft_tokens or memory.requirements.max_draft_tokens))
    cost = RoundCost(case.costs, memory, case.length, rows)
    if not cost.processor.known:
        return [memory]
    may = not without_kernels(case.layouts)
    # A retrieval level needs the layers, and a user's own choice of resident KV stays.
    free = may and not fitted.budget and "resident_kv_blocks" not in case.fixed
    plans = []
    for base in _with_more_kv(case, memory) if free else [memory]:
        here = replace(cost, memory=base)
        counts = fastest_counts(here.processor, base, here.compute_seconds) if may else {0}
        if base is not memory:
            # The further layers are for the processor.
            counts -= {0}
        plans += [place_on_processor(base, count) for count in sorted(counts)]
        if free:
            plans += _with_pools(case, base)
    return [
        plan.placed(processor_kv=share)
        for plan in plans
        for share in sorted(replace(cost, memory=plan).fastest_kv_shares)
    ]


def _with_pools(case: Case, memory: MemoryPlan) -> list[MemoryPlan]:
    """Return the plan with pools of experts, if it can have them and the host has room."""
    with suppress(DoesNotFitError):
        pooled = with_expert_pools(memory, case.room.device_bytes)
        if pooled is not memory:
            return [case.room.with_files(pooled)]
    return []


def _with_more_kv(case: Case, memory: MemoryPlan) -> list[MemoryPlan]:
    """Return the plan, and those in which more layers stream and less KV, if the host has room."""
    found = [memory]
    for more in sorted(layers_for_kv(memory) - {0}):
        with suppress(DoesNotFitError):
            found.append(case.room.with_files(with_kv_instead(memory, more)))
    return found


def evaluate(case: Case, chosen: Plan, memory: MemoryPlan, tree: int = 0) -> Candidate:
    """Return the cost of a round with a plan, and the tokens that a round yields.

    tree: as for `candidates`
    """
    method = chosen.method
    drafter = drafter_cost(case, chosen, memory)
    step = refresh = 0.0
    if chosen.budget:
        refresh = _refresh_seconds(case, chosen, memory)
        drafted, tokens, drafting, step = _level(case, chosen, memory, drafter)
    elif tree:
        drafted, (tokens, drafting) = tree, _tree(case, chosen, memory, tree)
    else:
        drafted = int(method.draft_tokens) if method.drafts else 0
        drafting = drafter.seconds(drafted)
        tokens = drafter.expected(case.curve.inner, drafted)
    cost = RoundCost(
        case.costs,
        memory,
        case.length,
        case.sequences * (drafted + 1),
        scored=bool(chosen.budget),
        draft_seconds=case.sequences * drafting,
        refresh_seconds=case.sequences * refresh,
        early_head=not method.drafts,
    )
    return Candidate(case, chosen, memory, tokens, step, drafter.seconds(1), cost)


def _level(
    case: Case, chosen: Plan, memory: MemoryPlan, drafter: DrafterCost
) -> tuple[int, float, float, float]:
    """Return what a retrieval level drafts: the number of tokens, how many of them and of the
    target's own a pass yields, the seconds of the draft, and those of a step.

    A chain has the length that the plan says. A tree has the depth that is fastest, as measured
    seconds make it in a run.
    """
    method, curve, acceptance = chosen.method, case.curve, case.acceptance(chosen)
    inner = 1 if method.inner_draft_tokens == AUTO else int(method.inner_draft_tokens)
    inner = inner if method.has_drafter else 0
    per_step, proposing = drafter.expected(curve.inner, inner), drafter.seconds(inner)

    def seconds(rows: int, drafted: int) -> float:
        """Seconds of a step over `rows` paths, without the drafter's."""
        cached = fitting_budget(chosen.budget, case.chunk_tokens, case.context) + drafted // 2
        # N-gram lookup mostly finds nothing; the step then runs over no proposed token.
        proposed = 1.0 if case.draft_config else NGRAM_PROPOSED
        step = proposed * case.draft_forward(rows + inner, cached, chosen) + case.costs.round
        return step + (1 - proposed) * case.draft_forward(rows, cached, chosen)

    if method.draft_tokens != AUTO:
        drafted = int(method.draft_tokens)
        step = seconds(1, drafted)
        drafting = drafted / per_step * (step + proposing)
        return drafted, expected_tokens(acceptance, drafted), drafting, step
    nodes = memory.requirements.max_draft_tokens
    rows = case.sequences * (nodes + 1)
    whole = RoundCost(case.costs, memory, case.length, rows, scored=True).least_seconds

    def tree(deepest: int) -> tuple[float, float, float]:
        steps = deepest / per_step
        # Branches grow beside the longest path, behind which the drafter proposes.
        step = seconds(max(1, round(nodes / steps)), nodes)
        return expected_tree(acceptance, nodes, deepest), steps * (step + proposing), step

    depths = map(tree, range(4, nodes + 1, 4))
    return nodes, *min(depths, key=lambda it: (whole + case.sequences * it[1]) / it[0])


def _tree(case: Case, chosen: Plan, memory: MemoryPlan, nodes: int) -> tuple[float, float]:
    """Return how many tokens a pass over a head's tree yields, and the seconds of the draft, at the
    depth that is fastest.
    """
    rows = case.sequences * (nodes + 1)
    whole = RoundCost(case.costs, memory, case.length, rows).least_seconds

    def tree(deepest: int) -> tuple[float, float]:
        drafter = drafter_cost(case, chosen, memory, max(1, nodes // deepest))
        return expected_tree(case.curve.inner, nodes, deepest), drafter.seconds(deepest)

    longest = drafter_cost(case, chosen, memory).longest
    trees = map(tree, range(1, min(_DEEPEST, nodes, longest) + 1))
    return min(trees, key=lambda found: (whole + case.sequences * found[1]) / found[0])


def _fit(case: Case, method: MethodSettings) -> Resolved:
    """Return the placement that the engine would choose, with the user's choices applied.

    Raises DoesNotFitError or UsageError.
    """
    sizes, room = case.sizes(method), case.room
    if "resident_kv_blocks" in case.fixed:
        # Keep the block size for streaming, even if all blocks would fit.
        sizes = replace(sizes, block_tokens=sizes.requirements(0).kv.block_tokens)
    fitted = fit_device(sizes, room.device_bytes)
    fixed = {n: case.fixed[n] for n in Placement.__dataclass_fields__ if n in case.fixed}
    memory, blocks = fitted.memory, fitted.memory.kv.blocks
    if fixed:
        if "resident_kv_blocks" in fixed:
            fixed["resident_kv_blocks"] = min(fixed["resident_kv_blocks"], blocks)
            fixed.setdefault("reclaimed_kv_blocks", 0)
        placement = replace(memory.placement, **fixed)
        if placement.resident_kv_blocks < blocks:
            placement = placement.with_slots()
        memory = replace(memory, placement=placement)
    return replace(fitted, memory=room.with_files(memory))


def _refresh_seconds(case: Case, chosen: Plan, memory: MemoryPlan) -> float:
    """Return the seconds of a refresh: choosing chunks and copying those that changed."""
    costs, hardware = case.costs, case.hardware
    shape = kv_shape(case.rank, 1, case.dtype)
    cache = (
        fitting_budget(chosen.budget, case.chunk_tokens, case.context)
        * shape.token_bytes
        * shape.layers
    )
    kept = memory.kv.resident + memory.kv.reclaimed
    away = 1 - min(1.0, kept / max(1, memory.kv.blocks))
    moved = case.curve.churn * cache * away
    launches = 20 if hardware.asynchronous else 40 + 20 * shape.layers
    if hardware.asynchronous and case.rounds_kv(chosen):
        # Chunks are gathered and then rounded for a few layers at a time.
        launches += 2 * shape.layers
    chunks = case.length // case.chunk_tokens * shape.layers * shape.kv_heads
    seconds = costs.piece(chunks * 40.0 + moved, 0, launches)
    seconds += moved / hardware.stream_bytes_per_second
    return seconds if hardware.asynchronous else seconds + moved / GATHER_BYTES_PER_SECOND
