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

    sizes: sizes of the model in its final formats
    memory: where everything goes
    budget: number of tokens of the retrieval cache, 0 for none
    """

    sizes: ModelSizes
    memory: MemoryPlan
    budget: int

    @property
    def weights(self) -> str:
        """How the weights are kept, see `EngineConfig.weights`."""
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
    """Choose what the settings leave open, within the available memory.

    sizes: sizes in the formats that the settings ask for (`formats.as_asked`)
    unsplit: matrices that cannot be split
    alone: whether one rank has the whole model
    agreed: returns the least budget that any rank has room for, given this rank's

    Raises UsageError, or DoesNotFitError, which says what would fit.
    """
    asked = sizes
    sizes = with_split_unasked(sizes, config, room.device_bytes, unsplit, alone=alone)
    fitted = _fitting(sizes, config, room)
    if fitted.memory.weights_file_bytes and sizes is not asked:
        # Layers in files would have to be split again in every pass, so do not split weights.
        sizes = replace(sizes, layouts=asked.layouts)
        fitted = _fitting(sizes, config, room)
    if (budget := agreed(fitted.budget)) != fitted.budget:
        fitted = _fitting(sizes, config, room, budget)
    return Resolved(sizes, fitted.memory, fitted.budget)


def placed(
    sizes: ModelSizes, config: EngineConfig, room: Room, most_budget: int | None = None
) -> Fitted:
    """Place a model within the room.

    most_budget: the most tokens that the retrieval cache may have
    Raises UsageError or DoesNotFitError.
    """
    fitted = fit(sizes, room.device_bytes, config.placement, most_budget)
    return replace(fitted, memory=room.with_files(fitted.memory))


def _fitting(
    sizes: ModelSizes, config: EngineConfig, room: Room, most_budget: int | None = None
) -> Fitted:
    """Return what `placed` does. If the model does not fit, the error says what would."""
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
