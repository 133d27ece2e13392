"""Seconds of the lowest level: of a draft model, a head, or another drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from triforce_core.model.config import ModelConfig
from triforce_core.model.tensors import Layouts, drafter_layouts
from triforce_core.plan.levels import WINDOW
from triforce_core.plan.plan import Plan
from triforce_core.plan.simulation.acceptance_curve import expected_tokens
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.costs.forward import Costs
from triforce_core.plan.simulation.costs.launches import (
    ASSISTANT_LAUNCHES,
    ASSISTANT_LAYER_LAUNCHES,
    CONVOLUTION_LAUNCHES,
    COPY_LAUNCHES,
    KEYS_LAUNCHES,
    POSITION_LAUNCHES,
    STATES_LAUNCHES,
)
from triforce_core.settings import MOST_DRAFT_TOKENS
from triforce_offload.plan.memory_plan import MemoryPlan


@dataclass(frozen=True)
class DrafterCost:
    """Seconds of the lowest level. N-gram lookup is counted as 0.

    token: of each token of a chain, or each level of a tree
    draft: of a draft, however long it is
    longest: number of tokens of its longest chain or path
    """

    token: float = 0.0
    draft: float = 0.0
    longest: int = MOST_DRAFT_TOKENS

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a chain of tokens, or of a tree with as many levels."""
        return self.draft + min(tokens, self.longest) * self.token if tokens else 0.0

    def expected(self, acceptance: float, tokens: int) -> float:
        """Return how many tokens a chain yields, with the verifier's own."""
        return expected_tokens(acceptance, min(tokens, self.longest))


def drafter_cost(case: Case, chosen: Plan, memory: MemoryPlan, rows: int = 1) -> DrafterCost:
    """Return the seconds of the lowest level. rows: tokens of a level of a tree"""
    config = case.drafter
    if config is None:
        return DrafterCost()
    joins, layouts = config.joins, drafter_layouts(config, case.dtype, case.drafter_pieces)
    costs = _costs(case, config, layouts)
    # Heads are recorded beside other forwards alone (`draft_levels`).
    recorded = not joins or bool(chosen.budget) or memory.requirements.records_passes
    if joins and joins.block:
        block = costs.resident_forward(joins.block, joins.context, recorded=recorded)
        if joins.convolutions:
            block += len(config.layers) * costs.small(CONVOLUTION_LAUNCHES, recorded=recorded)
        block += _states_seconds(config, costs, layouts)
        return DrafterCost(costs.small(POSITION_LAUNCHES), block, joins.block - 1)
    seen = (joins and joins.context) or WINDOW
    token = costs.resident_forward(rows, seen, recorded=recorded)
    if not joins or not joins.copies_keys:
        return DrafterCost(token)
    launches = ASSISTANT_LAUNCHES + ASSISTANT_LAYER_LAUNCHES * len(config.layers)
    token += _products(("join", "state"), rows, config, costs, layouts)
    token += costs.small(launches, recorded=recorded)
    return DrafterCost(token, costs.small(COPY_LAUNCHES))


def _costs(case: Case, config: ModelConfig, layouts: Layouts) -> Costs:
    """Return the costs of a drafter's forwards: of all GPUs if they divide it, else of the first;
    by its own output matrix, or by the model's.
    """
    joins = config.joins
    hardware = case.hardware if joins and joins.divided else replace(case.hardware, gpus=1)
    costs = Costs(config, case.dtype, hardware)
    matrices = costs.matrices
    if case.drafter_pieces:
        matrices = matrices.with_layers(layouts.layers)
        if not joins or joins.owns_ends:
            own = layouts.head.formats["head"]
            matrices = replace(matrices, head=own.nbytes, head_read=own.read)
    if joins and not joins.owns_ends:
        ends = case.costs.matrices
        matrices = replace(matrices, head=ends.head, head_read=ends.head_read)
    return replace(costs, stored=matrices)


def _states_seconds(config: ModelConfig, costs: Costs, layouts: Layouts) -> float:
    """Return the seconds in which a drafter of blocks computes keys and values of new tokens, at
    most a block: products that read matrices once more.
    """
    rows = config.joins.block
    work = _products(("fc",), rows, config, costs, layouts)
    for layer, spec in zip(layouts.layers, config.layers, strict=True):
        stored, shape = layer.formats["qkv"], spec.shapes(config.hidden)["qkv"]
        work += costs.product(rows, prod(shape), stored.nbytes, stored.read)
    return costs.launched(work, STATES_LAUNCHES + KEYS_LAUNCHES * len(config.layers))


def _products(
    names: tuple[str, ...], rows: int, config: ModelConfig, costs: Costs, layouts: Layouts
) -> float:
    """Return the seconds of products with matrices outside the layers, without their launches."""
    shapes = config.own_ends
    stored = {name: layouts.head.formats[name] for name in names}
    return sum(
        costs.product(rows, prod(shapes[name]), each.nbytes, each.read)
        for name, each in stored.items()
    )
