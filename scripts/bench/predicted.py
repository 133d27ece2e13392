"""The planner's predictions of an engine's runs over an emulated link, beside their times.

The rates come from the probe of `triforce plan`, measured for two seconds in the same process;
bytes, slots and placement are those of the engine. The numbers of drafted and accepted tokens are
those of the run: the planner predicts seconds, not texts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from triforce_core import Engine
from triforce_core.model.known.shapes import read_shape
from triforce_core.model.tensors import matrices
from triforce_core.plan.simulation.acceptance_curve import AcceptanceCurve
from triforce_core.plan.simulation.candidates import evaluate
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.costs.round import RoundCost
from triforce_offload.machine.probe import Rates, emulated, measure_cpu
from triforce_offload.weights.formats import DTYPES


@dataclass(frozen=True)
class Predicted:
    """Predictions for one model file. rates: the current rates of this machine"""

    model: str
    rates: Rates

    @classmethod
    def now(cls, model: str) -> Predicted:
        return cls(model, measure_cpu(matrices(read_shape(model))))

    def a_pass(
        self,
        engine: Engine,
        bandwidth: float,
        length: int,
        tokens: int,
        *,
        early_head: bool = False,
        **hardware: Any,
    ) -> float:
        """Return the seconds of a pass over `tokens` tokens after `length`, in a sequence of
        passes.

        early_head: whether the head is computed after the next pass's copies have begun
        hardware: differences from one device on an emulated link
        """
        case = self._case(engine, bandwidth, **hardware)
        cost = RoundCost(case.costs, engine.memory_plan, length, tokens)
        return replace(cost, early_head=early_head).seconds

    def run(self, engine: Engine, bandwidth: float, stats: dict[str, Any]) -> dict[str, float]:
        """Return the predicted seconds per pass and per token of a run with these statistics."""
        case = self._case(engine, bandwidth)
        drafted = stats["draft_tokens"]["mean"] or 0.0
        plan = engine.plan
        plan = replace(plan, method=replace(plan.method, draft_tokens=max(1, round(drafted))))
        cache = stats["retrieval"]
        if cache:
            case = replace(case, curve=AcceptanceCurve(churn=cache["churn"] or 0.0))
        evaluated = evaluate(case, plan, engine.memory_plan)
        drafting = 0.0
        if cache:
            fed = 1 + (stats["draft_tokens"]["inner_mean"] or 0.0)
            keys = cache["budget_tokens"] + round(drafted) // 2
            step = case.costs.resident_forward(fed, keys, recorded=False) + case.costs.round
            drafting = cache["steps"] / stats["passes"] * step
        cost = replace(
            evaluated.round,
            length=stats["prompt_tokens"] + stats["new_tokens"] // 2,
            draft_seconds=drafting,
        )
        return {
            "seconds_per_pass": cost.pass_seconds,
            "seconds_per_token": cost.seconds / stats["tokens_per_pass"],
        }

    def _case(self, engine: Engine, bandwidth: float, **hardware: Any) -> Case:
        machine = replace(emulated(self.rates, bandwidth), **hardware)
        context = engine.memory_plan.requirements.context_tokens
        return Case(engine.config, machine, context, 1, dtype=DTYPES["float32"])


def compare(predicted: float, measured: float) -> dict[str, float]:
    """Return both figures and their ratio, in the format of records."""
    return {"predicted": predicted, "measured": measured, "ratio": predicted / measured}
