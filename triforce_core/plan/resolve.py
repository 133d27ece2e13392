"""From settings, a model and a machine to the plan that loading executes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from triforce_core.plan.fitting import Fitted, fit, with_what_fits
from triforce_core.plan.formats import with_split_unasked
from triforce_core.plan.machine import Room
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import DENSE, SPLIT, STORED, EngineConfig
from triforce_offload.errors import DoesNotFitError
from triforce_offload.plan.memory_plan import MemoryPlan


@dataclass(frozen=True)
class Resolved:
    """A plan with nothing left to choose.

    sizes: of the model in the formats it is kept in; memory: where everything goes
    budget: tokens of the retrieval cache, 0 for none
    """

    sizes: ModelSizes
    memory: MemoryPlan
    budget: int

    @property
    def weights(self) -> str:
        """How the weights are kept, as EngineConfig has it."""
        layouts = self.sizes.weights
        return STORED if layouts.block_types else SPLIT if layouts.split else DENSE


def resolve(
    sizes: ModelSizes,
    config: EngineConfig,
    room: Room,
    unsplit: Collection[str] = (),
    *,
    alone: bool = True,
    agreed: Callable[[int], int] = lambda budget: budget,
) -> Resolved:
    """Choose what the settings leave open, within the memory that there is.

    sizes: in the formats that were asked for (`formats.as_asked`)
    unsplit: matrices that cannot be split. alone: whether one rank has the whole model
    agreed: of a budget, the least that any rank has room for

    Raises UsageError or DoesNotFitError, which says what would fit.
    """
    asked = sizes
    sizes = with_split_unasked(sizes, config, room.device_bytes, unsplit, alone=alone)
    fitted = _fitting(sizes, config, room)
    if fitted.memory.weights_file_bytes and sizes is not asked:
        # Layers that passes read from files would be split in each pass.
        sizes = replace(sizes, layouts=asked.layouts)
        fitted = _fitting(sizes, config, room)
    if (budget := agreed(fitted.budget)) != fitted.budget:
        fitted = _fitting(sizes, config, room, budget)
    return Resolved(sizes, fitted.memory, fitted.budget)


def placed(
    sizes: ModelSizes, config: EngineConfig, room: Room, most_budget: int | None = None
) -> Fitted:
    """Place sizes within the room. most_budget: tokens that the retrieval cache may have.

    Raises UsageError or DoesNotFitError.
    """
    fitted = fit(sizes, room.device_bytes, config.placement, most_budget)
    return replace(fitted, memory=room.with_files(fitted.memory))


def _fitting(
    sizes: ModelSizes, config: EngineConfig, room: Room, most_budget: int | None = None
) -> Fitted:
    """`placed`, with what would fit in the error if nothing does."""
    try:
        return placed(sizes, config, room, most_budget)
    except DoesNotFitError as error:
        if config.placement is not None:
            raise
        without_budget = replace(sizes.method, budget=None)

        def refusal(context: int) -> DoesNotFitError | None:
            shorter = replace(sizes, max_context=context, method=without_budget)
            try:
                placed(shorter, config, room)
            except DoesNotFitError as error:
                return error
            return None

        budget = sizes.method.budget
        raise with_what_fits(error, sizes.max_context, refusal, budget) from error
