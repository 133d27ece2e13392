"""Plans that may be chosen: where one puts things, and what it would give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from triforce_core.model.tensors import (
    kv_shape,
)
from triforce_core.planner.acceptance_curve import NGRAM_PROPOSED, expected_tokens
from triforce_core.planner.case import Case
from triforce_core.planner.costs import Costs, prefill_flops
from triforce_core.planner.plan import Plan
from triforce_core.planner.round_cost import RoundCost
from triforce_core.settings import AUTO, MethodSettings
from triforce_core.sizing.demand import PREFILL_CHUNK, Wanted
from triforce_core.sizing.drafting import WINDOW, fitting_budget
from triforce_core.sizing.fitting import Fitted, fit
from triforce_kernels.limits import MOST_SPLITS
from triforce_offload.errors import DoesNotFitError
from triforce_offload.placement import Placement
from triforce_offload.placing import place_on_host
from triforce_offload.plan import MemoryPlan

# One thread of the host puts chunks together at this rate before they cross an emulated link
# (`kv/gather`). A GPU reads them where they lie (`kv/direct`).
GATHER_BYTES_PER_SECOND = 4e9
_MORE_HOST = "use more of it"


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and what a round by it is.

    step_seconds, drafter_seconds: of a step of the retrieval model, and of a token of the drafter
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
        """Seconds per token: no simulation gives less."""
        return self.round.least_seconds / self.tokens_per_pass

    @property
    def seconds_per_token(self) -> float:
        """On the virtual clock."""
        return self.round.seconds / self.tokens_per_pass

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU that the plan takes."""
        return self.memory.device_bytes + self.case.library_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that the plan takes for all GPUs."""
        return self.memory.host_bytes * self.case.hardware.gpus

    @property
    def prefill_seconds(self) -> float:
        """What reading a prompt that leaves room for the new tokens takes: compute, or what crosses
        meanwhile.
        """
        case, rank = self.case, self.case.rank
        prompt = case.context - case.new_tokens
        hardware, matrices = case.hardware, self.memory.weights_link_bytes
        flops = prefill_flops(rank, prompt)
        compute = flops / hardware.flops_per_second + case.costs.head(1)
        compute += (2 * len(rank.layers) + 1) * case.costs.all_reduce(prompt)
        if not hardware.asynchronous:
            chunks = -(-prompt // PREFILL_CHUNK)
            launches = len(rank.layers) * chunks * case.costs.launches.layer
            compute += launches * hardware.launch_seconds
        rate = hardware.stream_bytes_per_second
        crossing = matrices / rate + self.round.disk_seconds
        outwards = max(0, self.memory.host_bytes - matrices)
        first = self.memory.slot_bytes / rate
        return first + max(compute, crossing, outwards / rate)


def candidates(
    case: Case,
    budget: int,
    draft_tokens: int,
    inners: Iterable[int],
    draft_weights: str | None = None,
    draft_kv: str | None = None,
) -> list[Candidate]:
    """Plans placed by the rule that the engine places by, one for each of some inner lengths.

    budget: 0 for no retrieval model, draft_tokens: 0 for no drafts. Raises DoesNotFitError or
    UsageError.
    """
    method = replace(
        case.method,
        draft_weights=draft_weights or case.method.draft_weights,
        draft_kv=(draft_kv or case.method.draft_kv) if budget else AUTO,
        method="triforce" if budget else "speculative" if draft_tokens else "autoregressive",
        draft=case.draft,
        draft_tokens=draft_tokens or AUTO,
        inner_draft_tokens=AUTO,
        budget=budget or None,
    )
    fitted = _fit(case, method)
    memory = _placed_on_host(case, fitted.memory)
    chosen = Plan.of(method, memory, fitted.budget)
    chosen = replace(chosen, gpus=case.hardware.gpus, weights=case.weights, kv=case.kv)
    return [
        evaluate(
            case,
            replace(chosen, method=replace(chosen.method, inner_draft_tokens=inner or AUTO)),
            memory,
        )
        for inner in inners
    ]


def evaluate(case: Case, chosen: Plan, memory: MemoryPlan) -> Candidate:
    """What a plan gives: its round, and the tokens of one."""
    costs, curve, method = case.costs, case.curve, chosen.method
    drafted = int(method.draft_tokens) if method.drafts else 0
    drafter = _drafter_seconds(case)
    step = refresh = 0.0
    if chosen.budget:
        inner = 1 if method.inner_draft_tokens == AUTO else int(method.inner_draft_tokens)
        if not method.has_drafter:
            inner = 0
        cached = fitting_budget(chosen.budget, case.chunk_tokens, case.context) + drafted // 2
        # N-gram lookup mostly finds nothing, and the step is then over one token.
        proposed = 1.0 if case.draft_config else NGRAM_PROPOSED
        step = proposed * case.draft_forward(1 + inner, cached, chosen) + costs.round
        step += (1 - proposed) * case.draft_forward(1, cached, chosen)
        drafting = drafted / expected_tokens(curve.inner, inner) * (step + inner * drafter)
        tokens = expected_tokens(case.acceptance(chosen), drafted)
        refresh = _refresh_seconds(case, chosen, memory)
    else:
        drafting = drafted * drafter
        tokens = expected_tokens(curve.inner, drafted)
    cost = RoundCost(
        costs,
        memory,
        case.length,
        drafted + 1,
        scored=bool(chosen.budget),
        draft_seconds=drafting,
        refresh_seconds=refresh,
        early_head=not method.drafts,
    )
    return Candidate(case, chosen, memory, tokens, step, drafter, cost)


def _fit(case: Case, method: MethodSettings) -> Fitted:
    """Where everything goes, as the engine would have it or as the user fixed it."""
    hardware = case.hardware
    wanted = Wanted(
        case.rank,
        case.dtype,
        case.context,
        method,
        case.fixed.get("block_tokens"),
        case.draft_config,
        block_bytes=case.block_bytes,
        graphs=hardware.asynchronous,
        splits=MOST_SPLITS if hardware.asynchronous else 1,
        gathers_through_host=not hardware.asynchronous,
        layouts=case.layouts,
        kv_split=case.split_kv,
        rounds_kv=method.rounds_kv(on_gpu=hardware.asynchronous),
        kernels_on_gpu=hardware.asynchronous,
    )
    available = hardware.memory_bytes - case.library_bytes
    if "resident_kv_blocks" in case.fixed:
        # Blocks of which some may stream, even where all would fit.
        wanted = replace(wanted, block_tokens=wanted.demand(0).kv.block_tokens)
    fitted = fit(wanted, available)
    fixed = {n: case.fixed[n] for n in Placement.__dataclass_fields__ if n in case.fixed}
    if not fixed:
        return fitted
    placement, blocks = fitted.memory.placement, fitted.memory.kv.blocks
    if "resident_kv_blocks" in fixed:
        fixed["resident_kv_blocks"] = min(fixed["resident_kv_blocks"], blocks)
        fixed.setdefault("reclaimed_kv_blocks", 0)
    placement = replace(placement, **fixed)
    if placement.resident_kv_blocks < blocks:
        placement = placement.with_slots()
    memory = replace(fitted.memory, placement=placement)
    memory.check(available)
    return replace(fitted, memory=memory)


def _placed_on_host(case: Case, plan: MemoryPlan) -> MemoryPlan:
    """With layers in their files that the host has no room for, if they may be read from there.

    Raises DoesNotFitError.
    """
    hardware = case.hardware
    have = hardware.host_memory_bytes
    if have is None:
        return plan
    if hardware.emulated:
        # The device takes host memory too.
        taken = plan.device_bytes * hardware.gpus
        if taken > have:
            raise DoesNotFitError("host memory for the emulated device", taken, have, _MORE_HOST)
        have -= taken
    each = have // hardware.gpus
    if hardware.disk_bytes_per_second is not None:
        plan = place_on_host(plan, each)
    if plan.host_bytes > each:
        raise DoesNotFitError(
            f"host memory for {case.context} tokens of context",
            plan.host_bytes * hardware.gpus,
            each * hardware.gpus,
            _MORE_HOST,
        )
    return plan


def _drafter_seconds(case: Case) -> float:
    """What one token of the lowest level takes. N-gram lookup takes nothing to speak of."""
    if case.draft_config is None:
        return 0.0
    costs = Costs(case.draft_config, case.dtype, replace(case.hardware, gpus=1))
    return costs.resident_forward(1, WINDOW)


def _refresh_seconds(case: Case, chosen: Plan, memory: MemoryPlan) -> float:
    """Choosing chunks anew, and bringing those that changed."""
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
        # A layer or a few are gathered at a time, and then rounded.
        launches += 2 * shape.layers
    chunks = case.length // case.chunk_tokens * shape.layers * shape.kv_heads
    seconds = costs.piece(chunks * 40.0 + moved, 0, launches)
    seconds += moved / hardware.stream_bytes_per_second
    return seconds if hardware.asynchronous else seconds + moved / GATHER_BYTES_PER_SECOND
