"""Start of an engine: settings, plan, files and ranks, up to loaded models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triforce_core.decoding.contexts.models import Models
from triforce_core.loading.devices import open_device
from triforce_core.loading.load import Progress, load
from triforce_core.loading.open_model import OpenModel
from triforce_core.model.config import ModelConfig
from triforce_core.model.tokenizing.tokenizer import Tokenizer
from triforce_core.parallel.start import start_ranks
from triforce_core.plan.plan import Plan
from triforce_core.plan.reasons import HEAD_LEFT_OUT, no_retrieval
from triforce_core.saved import digest
from triforce_core.settings import DENSE, SPLIT, EngineConfig
from triforce_offload.errors import UsageError
from triforce_offload.files import Output
from triforce_offload.memory.device import device_name


@dataclass(frozen=True)
class Loaded:
    """Everything that an engine consists of.

    name: name of the model
    seconds: time that loading took
    whole: config of the whole model; `models` may have only a rank's share
    digest: identifies the model in saved contexts
    trace: file for the timeline of each request, or None
    """

    models: Models
    tokenizer: Tokenizer | None
    name: str
    seconds: float
    whole: ModelConfig
    digest: str
    trace: Path | None

    @property
    def about(self) -> tuple[str, float]:
        """Name and seconds, for the stats."""
        return self.name, self.seconds

    @property
    def plan(self) -> Plan:
        """The placement, the method and the lengths of drafts."""
        models, runtime = self.models, self.models.runtime
        plan = Plan.of(models.method, runtime.plan, models.budget)
        kv = SPLIT if runtime.plan.kv.shape.split else DENSE
        plan = replace(plan, weights=models.weights, kv=kv, gpus=models.ranks.count)
        return plan.named(self.name, self.whole, device_name(runtime.memory.device))

    @property
    def plan_line(self) -> str:
        """The plan on one line."""
        models, plan = self.models, self.models.runtime.plan
        line = self.plan.line(len(plan.layers), plan.kv.blocks)
        if models.method.method == "triforce" and not models.budget:
            line += f"; {no_retrieval(models.method, plan)}"
        if models.leaves_head_out:
            line += f"; {HEAD_LEFT_OUT}"
        sequences = plan.requirements.sequences
        return line + (f"; {sequences} sequences at once" if sequences > 1 else "")


@dataclass(frozen=True)
class Settled:
    """Final settings, and the plan that they come from, if there is one."""

    config: EngineConfig
    plan: Plan | None


def settled(
    config: EngineConfig | None, plan: Plan | str | Path | None, fields: Mapping[str, Any]
) -> Settled:
    """Combine a config, a plan that overrides it, and fields that override both.

    Raises UsageError.
    """
    config = config or EngineConfig()
    if plan is not None:
        if not isinstance(plan, (Plan, str, Path)):
            raise UsageError(f"a plan is a Plan or a path, and this is {type(plan).__name__}")
        plan = plan if isinstance(plan, Plan) else Plan.read(plan)
        config = plan.config(config)
    config = config.changed(**fields)
    if plan is not None:
        plan.check_gpus(config.machine.gpus)
        if config.sequences > 1:
            raise UsageError(
                f"a plan is for one text at a time, and the run has {config.sequences} sequences"
            )
    if config.trace is not None:
        Output(config.trace, "trace").check()
    return Settled(config, plan)


def start(
    model: str | Path | OpenModel,
    settings: Settled,
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> Loaded:
    """Load a model and its draft model on all ranks. See `Engine.from_pretrained`."""
    began = time.perf_counter()
    config, plan = settings.config, settings.plan
    with ExitStack() as files:
        if isinstance(model, OpenModel):
            began -= model.seconds
            model = replace(model, tokenizer=tokenizer or model.tokenizer)
        else:
            model = files.enter_context(OpenModel.at(model, tokenizer))
        checkpoint = model.checkpoint
        context = config.max_context or checkpoint.config.positions
        if context > checkpoint.config.positions:
            raise UsageError(
                f"max_context {context} is more than the {checkpoint.config.positions} positions "
                "the model has"
            )
        drafter = None
        if config.method.drafts and config.method.draft_model is not None:
            drafter = model.drafter(config.method.draft_model)
            files.callback(drafter.close)
        if plan is not None:
            device = device_name(open_device(config.machine.device))
            plan.check(model.name, checkpoint.config, device)
        ranks = start_ranks(checkpoint, config, context, drafter)
        try:
            models = load(checkpoint, config, context, drafter, progress, ranks)
        except BaseException:
            ranks.abandon()
            raise
        models.resources.callback(ranks.close)
        return Loaded(
            models,
            model.tokenizer,
            model.name,
            time.perf_counter() - began,
            checkpoint.config,
            digest(checkpoint.fingerprint + checkpoint.config.rope.variant(context)),
            config.trace,
        )
