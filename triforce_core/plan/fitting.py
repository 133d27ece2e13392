"""Fitting a model, its context and its retrieval cache into a device. No tensors are created."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from triforce_core.model.tensors import Layouts
from triforce_core.plan.machine import Room
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import DENSE, INT4, SPLIT, SPLIT_EXPERTS, STORED
from triforce_kernels.weights.block_types import WITHOUT_KERNELS
from triforce_offload.errors import DoesNotFitError, UsageError, in_units
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import (
    for_processor,
    least_to_draft,
    place,
    place_on_processor,
    with_expert_pools,
    with_kv_instead,
)
from triforce_offload.plan.requirements import Requirements

# If nothing streams, a retrieval level saves only reads of KV. Unless requested, it is created only
# if the target reads at least this many times as much, weights included. Measured on 2 CPU cores
# (SmolLM2-135M, 7,000 of 8,192 tokens, medians of three seeds): a level that read 1.7 times less
# gave .0187 s/token, n-grams alone .0131, plain decoding .0213.
_LEAST_SAVING = 2.0
# Ratio of a card's memory bandwidth to that of its link: 1008 to 25 GB/s on an RTX 4090.
_MEMORY_TO_LINK = 40
# Number of tokens of the shortest context that an error message considers.
_SHORTEST_CONTEXT = 16


@dataclass(frozen=True)
class Resolved:
    """A plan with nothing left to choose.

    sizes: sizes of the model in its final formats
    memory: where everything goes
    budget: number of tokens of the retrieval cache, 0 for none
    seconds_per_token: as simulated, if the plan was chosen by time
    leaves_head_out: whether the model's MTP head could draft, and the plan is faster without it
    """

    sizes: ModelSizes
    memory: MemoryPlan
    budget: int
    seconds_per_token: float | None = None
    leaves_head_out: bool = False

    @property
    def weights(self) -> str:
        """How the weights are kept, see `EngineConfig.weights`."""
        layouts = self.sizes.weights
        if layouts.split:
            return SPLIT_EXPERTS if layouts.experts_apart else SPLIT
        return STORED if layouts.block_types else DENSE


def fit_device(
    sizes: ModelSizes,
    available_bytes: int,
    placement: Placement | None = None,
    most_budget: int | None = None,
) -> Resolved:
    """Return the best placement and retrieval budget within `available_bytes` of the device.

    The retrieval level computes with the target's layers, and for streamed layers with their high
    bits or draft copies. It exists only if one of these is on the device for each layer. Its cache
    is the largest with which no layer streams, or else the largest that fits. There is no retrieval
    level if nothing streams and a pass reads little more than the level would; the drafter then
    proposes to the target directly. A budget that the user set is never reduced: it fits or raises
    an error. If nothing streams and there is no retrieval cache, all KV is one block.

    placement: a placement to use instead of the choice of `place`
    most_budget: the largest budget that other ranks have room for
    Raises DoesNotFitError or UsageError.
    """
    method = sizes.method
    drafts = method.method == "triforce" and most_budget != 0
    if sizes.config.chooses_keys:
        if method.budget is not None:
            raise needs_keys(method.budget, sizes.config.family)
        drafts = False
    if drafts and method.budget is not None:
        _check_cache(sizes, method.budget, available_bytes)
    if placement is not None:
        return _under(sizes, placement, most_budget if drafts else 0)
    if drafts and method.budget is not None:
        return _with_cache(sizes, method.budget, available_bytes)
    plain = _planned(sizes, lambda needs: place(needs, available_bytes))
    sizes = plain.sizes
    found = _with_largest_cache(plain, available_bytes, most_budget) if drafts else plain
    if found.budget or found.memory.streams or sizes.block_tokens:
        return found
    return _in_one_block(sizes, available_bytes) or found


def _planned(sizes: ModelSizes, placed: Callable[[Requirements], MemoryPlan]) -> Resolved:
    """Return a plan without a retrieval level. If something streams, it keeps no memory for
    recorded passes.

    placed: places what is required
    Raises whatever `placed` raises.
    """
    needs = sizes.requirements(0)
    if needs.records_passes:
        with suppress(DoesNotFitError):
            if not (memory := placed(needs)).streams:
                return Resolved(sizes, memory, 0)
        sizes = replace(sizes, records_passes=False)
        needs = sizes.requirements(0)
    return Resolved(sizes, placed(needs), 0)


class ProcessorShares(NamedTuple):
    """What the processor computes in passes: shares of the layers that it may compute, and of the
    KV blocks that would cross the link.

    streamed: number of layers that stream at least, so that KV has more room on the device
    pools: a placement whose pools of experts, KV and slots the plan is to have
    """

    layers: float
    kv: float
    streamed: int = 0
    pools: Placement | None = None

    @classmethod
    def asked(cls, share: float, layouts: Layouts) -> ProcessorShares:
        """Return the shares for a setting. layouts: of the weights

        Raises UsageError if the processor computes no layers in them.
        """
        if share and (names := without_kernels(layouts)):
            raise UsageError(
                f"host_compute {share:g}: the CPU computes no layers in {', '.join(names)}"
            )
        return cls(share, share)

    @classmethod
    def of(cls, memory: MemoryPlan) -> ProcessorShares:
        """Return the shares of a plan."""
        placement, may = memory.placement, len(for_processor(memory))
        layers, streamed = len(placement.processor_layers), len(placement.streamed_layers)
        if placement.expert_slots:
            return cls(1.0, placement.processor_kv, pools=placement)
        share = layers / may if may else 0.0
        return cls(share, placement.processor_kv, streamed if layers else 0)

    def with_streamed_layers(self, memory: MemoryPlan) -> MemoryPlan:
        """Return the plan with at least `streamed` streamed layers."""
        return with_kv_instead(memory, max(0, self.streamed - len(memory.streamed_layers)))

    def placed_on_processor(self, memory: MemoryPlan, room: Room) -> MemoryPlan:
        """Return the plan with these shares. Raises DoesNotFitError."""
        if self.pools:
            memory = with_expert_pools(memory, room.device_bytes, self.pools)
            kv = self.kv if memory.kv.away else 0.0
            return room.with_files(memory.placed(processor_kv=kv))
        kv = self.kv if memory.kv.away else 0.0
        count = round(self.layers * len(for_processor(memory)))
        return place_on_processor(memory, count).placed(processor_kv=kv)


def without_kernels(layouts: Layouts) -> list[str]:
    """Return the formats of weights in which a processor computes no layers."""
    if layouts.joins_blocks:
        return ["split blocks"]
    return sorted(kind.name for kind in layouts.block_types if kind.name in WITHOUT_KERNELS)


def _under(sizes: ModelSizes, placement: Placement, most_budget: int | None) -> Resolved:
    """Return a user's placement, with the largest retrieval cache that it is made for.

    most_budget: 0 for none, None for any. Raises UsageError.
    """
    method = sizes.method
    drafts = most_budget != 0
    if drafts and not _can_draft(sizes, placement):
        if method.budget is not None:
            raise needs_weights(method.budget, len(placement.streamed_layers))
        drafts = False
    elif drafts and method.draft_weights == INT4:
        placement = replace(placement, copied_layers=tuple(range(len(sizes.weights.layers))))
    plain = _planned(sizes, lambda needs: MemoryPlan(needs, placement))
    if not drafts or (method.budget is None and not may_save(plain.memory, method.budgets[0])):
        return plain
    for budget in method.budgets:
        if most_budget is None or budget <= most_budget:
            return Resolved(sizes, MemoryPlan(sizes.requirements(budget), placement), budget)
    return plain


def _with_cache(sizes: ModelSizes, budget: int, available_bytes: int) -> Resolved:
    """Return a placement with the budget that the user set. Raises DoesNotFitError."""
    needs = sizes.requirements(budget)
    try:
        memory = place(needs, available_bytes)
    except DoesNotFitError as error:
        raise _refused("with", budget, least_to_draft(needs), available_bytes) from error
    if not memory.can_draft:
        raise _refused("with", budget, least_to_draft(needs), available_bytes)
    return Resolved(sizes, memory, budget)


def _with_largest_cache(plain: Resolved, available_bytes: int, most_budget: int | None) -> Resolved:
    """Return the placement with the largest cache with which no layer streams, or the largest that
    fits, or none.

    plain: the placement without a cache
    """
    sizes, streams = plain.sizes, plain.memory.streams
    budgets = sizes.method.budgets
    if not may_save(plain.memory, budgets[0]):
        return plain
    largest = None
    for budget in budgets:
        if most_budget is not None and budget > most_budget:
            continue
        try:
            memory = place(sizes.requirements(budget), available_bytes)
        except DoesNotFitError:
            continue
        if not memory.can_draft:
            continue
        found = Resolved(sizes, memory, budget)
        # An unrequested cache must not make passes wait for the link.
        waits = memory.weights_link_bytes > 0 if streams else not _is_hidden(memory)
        if not waits:
            return found
        if streams:
            # With a smaller cache all layers may fit, and only KV streams.
            largest = largest or found
    return largest or plain


def _in_one_block(sizes: ModelSizes, available_bytes: int) -> Resolved | None:
    """Return the placement with all KV of a layer in one block, None if that would stream."""
    block = max(sizes.method.chunk_size, 1 << sizes.max_context.bit_length())
    try:
        memory = place(replace(sizes, block_tokens=block).requirements(0), available_bytes)
    except DoesNotFitError:
        return None
    return None if memory.streams else Resolved(sizes, memory, 0)


def _check_cache(sizes: ModelSizes, budget: int, available_bytes: int) -> None:
    """Raise DoesNotFitError for a cache that is larger than the device by itself."""
    token_bytes = sizes.requirements(0).kv.token_bytes
    if sizes.rounds_kv:
        token_bytes //= sizes.dtype.itemsize
    cache = budget * token_bytes * len(sizes.config.kv_layers) * sizes.sequences
    if cache > available_bytes:
        needed = max(cache, least_to_draft(sizes.requirements(budget)))
        raise _refused("for", budget, needed, available_bytes)


def with_what_fits(
    refused: DoesNotFitError,
    context: int,
    refusal: Callable[[int], DoesNotFitError | None],
    budget: int | None,
) -> DoesNotFitError:
    """Return the error extended by a suggestion of what would fit.

    context: number of tokens that did not fit
    refusal: returns the error for a context of some number of tokens without a retrieval budget, or
        None if it fits
    budget: retrieval budget that the user set, or None
    """
    without = "" if budget is None else f" without the budget of {budget} tokens"
    least = min(_SHORTEST_CONTEXT, context)
    if budget is not None and refusal(context) is None:
        remedy = f"it fits{without}"
    elif (shortest := refusal(least)) is not None:
        remedy = "no context fits"
        if shortest.needed_bytes != refused.needed_bytes:
            remedy += (
                f": {least} tokens{without} need {in_units(shortest.needed_bytes)} of "
                f"{'host' if 'host memory' in shortest.what else 'device'} memory"
            )
    else:
        low, high = least, context
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if refusal(middle) else (middle, high)
        remedy = f"up to {low} tokens of context fit{without}"
    return DoesNotFitError(refused.what, refused.needed_bytes, refused.available_bytes, remedy)


def needs_weights(budget: int, streamed: int) -> UsageError:
    """Return the error for a retrieval budget if `streamed` layers stream without a copy on the
    device.
    """
    return UsageError(
        f"a retrieval budget of {budget} tokens needs all weights on the device, themselves, their "
        f"high bits or copies, and the placement streams {streamed} layers"
    )


def needs_keys(budget: int, family: str) -> UsageError:
    """Return the error for a retrieval budget where tokens choose the keys that they attend to."""
    return UsageError(
        f"a retrieval budget of {budget} tokens is of no use to a {family} model, whose tokens "
        "choose the keys that they attend to by themselves; leave --budget out"
    )


def _can_draft(wanted: ModelSizes, placement: Placement) -> bool:
    """Whether every layer, or a copy of it, is on the device with a user's placement."""
    if not wanted.copy_layouts:
        placement = replace(placement, copied_layers=())
    return placement.can_draft


def _is_hidden(plan: MemoryPlan) -> bool:
    """Whether the streams of a pass are hidden behind its reads of device memory."""
    needs = plan.requirements
    return plan.link_bytes * _MEMORY_TO_LINK <= _read_bytes(needs, needs.context_tokens)


def may_save(plan: MemoryPlan, budget: int) -> bool:
    """Whether a retrieval level with this budget could save time. plan: the plan without one"""
    if plan.streams:
        return True
    return saves_reads(plan.requirements, plan.requirements.context_tokens, budget)


def saves_reads(needs: Requirements, tokens: int, budget: int) -> bool:
    """Whether a retrieval level reads so much less than a pass over a text that it may pay where
    nothing streams. tokens: length of the text
    """
    kept = _read_bytes(needs, min(budget, tokens))
    return _read_bytes(needs, tokens) >= _LEAST_SAVING * kept


def _read_bytes(demand: Requirements, tokens: int) -> int:
    """Return the bytes of weights and KV that a forward reads.

    tokens: number of context tokens that it attends to
    """
    kv = tokens * demand.kv.token_bytes * demand.kv.layers
    return demand.weights_bytes + demand.head_bytes + kv


def _refused(how: str, budget: int, needed: int, available_bytes: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"device memory {how} a retrieval budget of {budget} tokens",
        needed,
        available_bytes,
        "use a smaller budget or none, or more device memory",
    )
