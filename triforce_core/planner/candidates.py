"""Plans that may be chosen: what is planned for, where a plan puts things, what it would give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from triforce_kernels.limits import MOST_SPLITS

from offload.errors import DoesNotFitError, UsageError
from offload.formats import DTYPES, Dtype
from offload.machine.profiles import Hardware
from offload.memory.available import LIBRARY_BYTES
from offload.placement import (
    Demand,
    Placement,
    check_placement,
    device_bytes,
    host_bytes,
    place_on_host,
)
from triforce_core.model.config import ModelConfig
from triforce_core.model.share import Pieces, Share, mlp_unit
from triforce_core.model.tensors import (
    Layouts,
    MatrixBytes,
    dense_layouts,
    kv_shape,
    plane_layouts,
    stored_layouts,
    substitute_layout,
)
from triforce_core.params import SamplingParams
from triforce_core.planner.acceptance_curve import NGRAM_PROPOSED, AcceptanceCurve, expected_tokens
from triforce_core.planner.costs import Costs, prefill_flops
from triforce_core.planner.plan import Plan
from triforce_core.planner.round_cost import RoundCost
from triforce_core.settings import AUTO, DENSE, PLANES, STORED, MethodSettings
from triforce_core.sizing.demand import PREFILL_CHUNK, Wanted
from triforce_core.sizing.drafting import WINDOW, fitting_budget
from triforce_core.sizing.fitting import Fitted, fit

# A KV block has about so many bytes on a GPU: copies of that size come within 3 % of a link's peak
# (`link/cuda`).
BLOCK_BYTES = 16 << 20
# One thread of the host puts chunks together at this rate before they cross an emulated link
# (`kv/gather`). A GPU reads them where they lie (`kv/direct`).
GATHER_BYTES_PER_SECOND = 4e9
_MORE_HOST = "use more of it"


@dataclass(frozen=True)
class Case:
    """What is planned for. draft_config: of a small model that drafts, None for n-grams.

    pieces: of its matrices, if they are kept as they are quantised; planes: whether they are kept
        in such; kv_planes: whether KV is
    auto: which of "weights" and "kv" may also be kept otherwise, if that is faster
    method: what a plan leaves as it is: how chunks are chosen, how drafts are accepted; and what
        drafts, if that is not `auto`
    fixed: what the user set of a plan: "method", "budget", "draft_tokens", "inner_draft_tokens",
        "resident_kv_blocks", "block_tokens", or more fields of Placement by a plan that was read
    """

    config: ModelConfig
    hardware: Hardware
    context: int
    new_tokens: int = SamplingParams.max_new_tokens
    dtype: Dtype = DTYPES["float16"]
    curve: AcceptanceCurve = field(default_factory=AcceptanceCurve)
    draft: str = AUTO
    draft_config: ModelConfig | None = None
    pieces: Pieces | None = None
    planes: bool = False
    kv_planes: bool = False
    auto: frozenset[str] = frozenset()
    block_bytes: int = BLOCK_BYTES
    method: MethodSettings = field(default_factory=MethodSettings)
    fixed: dict[str, object] = field(default_factory=dict)

    @cached_property
    def share(self) -> Share:
        """Of the first GPU, which has the most. Raises UsageError if the model does not spread."""
        unit = {} if self.pieces is None else {"unit": mlp_unit(self.config, self.pieces)}
        return Share.of(self.config, 0, self.hardware.gpus, **unit)

    @cached_property
    def rank(self) -> ModelConfig:
        return self.share.config

    @cached_property
    def layouts(self) -> Layouts:
        """Of one GPU's share of the weights."""
        if self.planes:
            return plane_layouts(self.rank, self.dtype)
        if self.pieces is None:
            return dense_layouts(self.rank, self.dtype)
        return stored_layouts(self.rank, self.dtype, self.share.pieces(self.pieces))

    @property
    def weights(self) -> str:
        """As EngineConfig has it."""
        return PLANES if self.planes else STORED if self.pieces else DENSE

    @property
    def kv(self) -> str:
        """As EngineConfig has it."""
        return PLANES if self.kv_planes else DENSE

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.rank, self.dtype, self.hardware, MatrixBytes.of(self.layouts))

    @cached_property
    def substitute_costs(self) -> Costs:
        """Of a model whose layers are in 4 bits."""
        layer = substitute_layout(self.rank, self.dtype)
        return replace(self.costs, stored=self.costs.matrices.with_layer(layer))

    @cached_property
    def upper_costs(self) -> Costs:
        """Of a model whose layers are read by their upper planes."""
        return replace(self.costs, stored=self.costs.matrices.with_upper(self.layouts.layers[0]))

    @property
    def length(self) -> int:
        """Tokens in the cache half way through decoding."""
        return self.context - self.new_tokens // 2

    @property
    def gathers_through_host(self) -> bool:
        """Whether the host puts retrieved chunks together, as it does where they are in planes."""
        return self.kv_planes or not self.hardware.asynchronous

    @property
    def library_bytes(self) -> int:
        """What an engine leaves to libraries of one GPU's memory (`memory/device`)."""
        return LIBRARY_BYTES if self.hardware.asynchronous else 0

    @property
    def chunk_tokens(self) -> int:
        return self.method.chunk_size

    def acceptance(self, plan: Plan) -> float:
        """The share of the retrieval model's tokens that holds. What the context cannot fill adds
        nothing.
        """
        substituted = len(plan.placement.substituted_layers) / self.config.layers
        budget = fitting_budget(plan.budget, self.chunk_tokens, self.context)
        by_planes = self._upper_layers(plan) / self.config.layers
        return self.curve.at(budget, self.length, substituted, by_planes)

    def _upper_layers(self, plan: Plan) -> int:
        """Layers that the retrieval model reads by their upper planes."""
        placement = plan.placement
        if plan.method.reads_upper(self.weights, on_gpu=self.hardware.asynchronous):
            return self.rank.layers - len(placement.substituted_layers)
        return len(placement.halved_layers)

    def draft_forward(self, tokens: int, keys: int, plan: Plan) -> float:
        """Seconds of a forward of the retrieval model."""
        instead, upper = len(plan.placement.substituted_layers), self._upper_layers(plan)
        layers = (self.rank.layers - instead - upper) * self.costs.resident_layer(tokens, keys)
        layers += upper * self.upper_costs.resident_layer(tokens, keys) if upper else 0.0
        layers += instead * self.substitute_costs.resident_layer(tokens, keys) if instead else 0.0
        return layers + self.costs.head(tokens, recorded=True)

    def check(self) -> None:
        """Raises UsageError for a context that the model cannot have, or planes that it has not."""
        self.method.check_weights(self.weights)
        if (self.planes or self.kv_planes) and self.dtype.name != "bfloat16":
            what = "weights are" if self.planes else "KV is"
            raise UsageError(f"planes hold bfloat16, and {what} in {self.dtype.name} here")
        positions = self.config.positions
        if self.context > positions:
            raise UsageError(
                f"a context of {self.context} tokens is more than the {positions} positions the "
                "model has"
            )
        if self.context < 2:
            raise UsageError(f"a context must have 2 tokens or more, got {self.context}")
        if not 0 < self.new_tokens < self.context:
            raise UsageError(
                f"new tokens must be 1 to {self.context - 1} in a context of {self.context}, got "
                f"{self.new_tokens}"
            )


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and what a round by it is.

    step_seconds, drafter_seconds: of a step of the retrieval model, and of a token of the drafter
    """

    case: Case
    plan: Plan
    demand: Demand
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
        return device_bytes(self.demand, self.plan.placement) + self.case.library_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that the plan takes for all GPUs."""
        return host_bytes(self.demand, self.plan.placement) * self.case.hardware.gpus

    @property
    def prefill_seconds(self) -> float:
        """What reading a prompt that leaves room for the new tokens takes: compute, or what crosses
        meanwhile.
        """
        case, rank = self.case, self.case.rank
        prompt = case.context - case.new_tokens
        hardware, placement = case.hardware, self.plan.placement
        matrices = self.demand.streamed_bytes(placement)
        flops = prefill_flops(rank, prompt)
        compute = flops / hardware.flops_per_second + case.costs.head(1)
        compute += (2 * rank.layers + 1) * case.costs.all_reduce(prompt)
        if not hardware.asynchronous:
            chunks = -(-prompt // PREFILL_CHUNK)
            compute += rank.layers * chunks * case.costs.launches.layer * hardware.launch_seconds
        rate = hardware.stream_bytes_per_second
        crossing = matrices / rate + self.round.disk_seconds
        outwards = max(0, host_bytes(self.demand, placement) - matrices)
        first = self.demand.slot_bytes(placement) / rate if placement.streamed_layers else 0.0
        return first + max(compute, crossing, outwards / rate)


def candidates(
    case: Case, budget: int, draft_tokens: int, inners: Iterable[int], draft_weights: str = AUTO
) -> list[Candidate]:
    """Plans placed by the rule that the engine places by, one for each of some inner lengths.

    budget: 0 for no retrieval model, draft_tokens: 0 for no drafts. Raises DoesNotFitError or
    UsageError.
    """
    method = replace(
        case.method,
        draft_weights=draft_weights,
        method="triforce" if budget else "speculative" if draft_tokens else "autoregressive",
        draft=case.draft,
        draft_tokens=draft_tokens or AUTO,
        inner_draft_tokens=AUTO,
        budget=budget or None,
    )
    fitted = _fit(case, method)
    placement = _placed_on_host(case, fitted.demand, fitted.placement)
    chosen = Plan.of(method, fitted.demand, placement, fitted.budget)
    chosen = replace(chosen, gpus=case.hardware.gpus, weights=case.weights, kv=case.kv)
    return [
        evaluate(
            case,
            replace(chosen, method=replace(chosen.method, inner_draft_tokens=inner or AUTO)),
            fitted.demand,
        )
        for inner in inners
    ]


def evaluate(case: Case, chosen: Plan, demand: Demand) -> Candidate:
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
        refresh = _refresh_seconds(case, chosen, demand)
    else:
        drafting = drafted * drafter
        tokens = expected_tokens(curve.inner, drafted)
    cost = RoundCost(
        costs,
        demand,
        chosen.placement,
        case.length,
        drafted + 1,
        scored=bool(chosen.budget),
        draft_seconds=drafting,
        refresh_seconds=refresh,
        early_head=not method.drafts,
    )
    return Candidate(case, chosen, demand, tokens, step, drafter, cost)


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
        gathers_through_host=case.gathers_through_host,
        layouts=case.layouts,
        kv_in_planes=case.kv_planes,
    )
    available = hardware.memory_bytes - case.library_bytes
    if "resident_kv_blocks" in case.fixed:
        # Blocks of which some may stream, even where all would fit.
        wanted = replace(wanted, block_tokens=wanted.demand(0).kv.block_tokens)
    fitted = fit(wanted, available)
    fixed = {n: case.fixed[n] for n in Placement.__dataclass_fields__ if n in case.fixed}
    if not fixed:
        return fitted
    placement, blocks = fitted.placement, fitted.demand.kv_blocks
    if "resident_kv_blocks" in fixed:
        fixed["resident_kv_blocks"] = min(fixed["resident_kv_blocks"], blocks)
        fixed.setdefault("lent_kv_blocks", 0)
    placement = replace(placement, **fixed)
    if placement.resident_kv_blocks < blocks:
        placement = placement.with_slots()
    check_placement(fitted.demand, placement, available)
    return replace(fitted, placement=placement)


def _placed_on_host(case: Case, demand: Demand, placement: Placement) -> Placement:
    """With layers in their files that the host has no room for, if they may be read from there.

    Raises DoesNotFitError.
    """
    hardware = case.hardware
    have = hardware.host_memory_bytes
    if have is None:
        return placement
    if hardware.emulated:
        # The device takes host memory too.
        taken = device_bytes(demand, placement) * hardware.gpus
        if taken > have:
            raise DoesNotFitError("host memory for the emulated device", taken, have, _MORE_HOST)
        have -= taken
    each = have // hardware.gpus
    if hardware.disk_bytes_per_second is not None:
        placement = place_on_host(demand, placement, each)
    if host_bytes(demand, placement) > each:
        raise DoesNotFitError(
            f"host memory for {case.context} tokens of context",
            host_bytes(demand, placement) * hardware.gpus,
            each * hardware.gpus,
            _MORE_HOST,
        )
    return placement


def _drafter_seconds(case: Case) -> float:
    """What one token of the lowest level takes. N-gram lookup takes nothing to speak of."""
    if case.draft_config is None:
        return 0.0
    costs = Costs(case.draft_config, case.dtype, replace(case.hardware, gpus=1))
    return costs.resident_forward(1, WINDOW)


def _refresh_seconds(case: Case, chosen: Plan, demand: Demand) -> float:
    """Choosing chunks anew, and bringing those that changed."""
    costs, hardware = case.costs, case.hardware
    shape = kv_shape(case.rank, 1, case.dtype)
    cache = (
        fitting_budget(chosen.budget, case.chunk_tokens, case.context)
        * shape.token_bytes
        * shape.layers
    )
    kept = chosen.placement.resident_kv_blocks + chosen.placement.lent_kv_blocks
    away = 1 - min(1.0, kept / max(1, demand.kv_blocks))
    moved = case.curve.churn * cache * away
    launches = 20 if hardware.asynchronous else 40 + 20 * shape.layers
    chunks = case.length // case.chunk_tokens * shape.layers * shape.kv_heads
    seconds = costs.piece(chunks * 40.0 + moved, 0, launches)
    seconds += moved / hardware.stream_bytes_per_second
    return seconds + moved / GATHER_BYTES_PER_SECOND if case.gathers_through_host else seconds
