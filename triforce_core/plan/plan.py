"""Plans: the placement, the method and the lengths of drafts. `search` makes them for engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from triforce_core.model.config import ModelConfig
from triforce_core.settings import (
    AUTO,
    INT8,
    KV_FORMATS,
    SPLIT,
    SPLIT_EXPERTS,
    WEIGHTS,
    EngineConfig,
    MethodSettings,
)
from triforce_offload.errors import UsageError
from triforce_offload.files import Output
from triforce_offload.machine.profiles import same_card
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placement import LAYER_LISTS, Placement


@dataclass(frozen=True)
class Plan:
    """All choices that an engine takes from a plan. Several GPUs all follow the same plan.

    context_tokens: number of prompt and new tokens that the plan was made for
    block_tokens: number of tokens of a KV block
    method: how to decode; its budget is None if there is no retrieval cache
    placement: which weights and KV are resident and which stream
    weights, kv: formats, see EngineConfig
    gpus: number of GPUs that the plan was made for
    made_for: the model's name ("model"), its shape in words ("shape") and the device ("device"), as
        far as known; or None
    predicted: figures of the simulation that chose the plan; an engine ignores them
    """

    context_tokens: int
    block_tokens: int
    method: MethodSettings
    placement: Placement
    weights: str = AUTO
    kv: str = AUTO
    gpus: int = 1
    made_for: Mapping[str, str] | None = None
    predicted: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for values that no plan can have."""
        for name in ("context_tokens", "block_tokens", "gpus"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise UsageError(f"{name} of a plan cannot be {value!r}")
        if self.weights not in WEIGHTS:
            raise UsageError(f"weights of a plan cannot be {self.weights!r}")
        if self.kv not in KV_FORMATS:
            raise UsageError(f"kv of a plan cannot be {self.kv!r}")
        for name in ("made_for", "predicted"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise UsageError(f"{name} of a plan cannot be {value!r}")
        for name, value in (self.made_for or {}).items():
            if not isinstance(value, str):
                raise UsageError(f"what a plan was made for cannot have {name} {value!r}")
        seconds = (self.predicted or {}).get("seconds_per_token", 1.0)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise UsageError(f"seconds_per_token of a plan cannot be {seconds!r}")

    @classmethod
    def of(cls, method: MethodSettings, memory: MemoryPlan, budget: int) -> Plan:
        """Return the plan of an engine.

        budget: number of tokens of the retrieval cache; if 0, method "triforce" becomes
            "speculative"
        """
        name = method.method
        if name == "triforce" and not budget:
            name = "speculative"
        return cls(
            memory.requirements.context_tokens,
            memory.kv.shape.block_tokens,
            replace(method, method=name, draft=str(method.draft), budget=budget or None),
            replace(memory.placement, resident_kv_blocks=memory.kv.resident),
        )

    @property
    def budget(self) -> int:
        """Number of tokens of the retrieval cache, 0 for none."""
        return self.method.budget or 0

    def named(self, model: str, config: ModelConfig, device: str) -> Plan:
        """Return the plan with a record of the model and device that it was made for."""
        made_for = {"model": model, "shape": config.in_words, "device": device}
        return replace(self, made_for=made_for)

    def check(self, model: str, config: ModelConfig, device: str) -> None:
        """Raise UsageError if the plan was made for another model or another device."""
        made = self.made_for or {}
        if made.get("shape", config.in_words) != config.in_words:
            raise UsageError(
                f"the plan was made for {made.get('model')} ({made['shape']}), and this is {model} "
                f"({config.in_words})"
            )
        if not same_card(made.get("device", device), device):
            raise UsageError(f"the plan was made for {made['device']}, and this is {device}")

    def check_gpus(self, count: int) -> None:
        """Raise UsageError if `count` is not the plan's number of GPUs."""
        if count != self.gpus:
            raise UsageError(f"the plan is for {self.gpus} GPUs, and the run has {count}")

    def as_run(self, taken: Plan) -> Plan:
        """Return this plan with names, predictions and "auto" formats replaced by those of `taken`,
        the plan of a running engine.
        """
        return replace(
            self,
            made_for=taken.made_for,
            predicted=taken.predicted,
            weights=taken.weights if self.weights == AUTO else self.weights,
            kv=taken.kv if self.kv == AUTO else self.kv,
        )

    def config(self, like: EngineConfig) -> EngineConfig:
        """Return the config of an engine that follows this plan.

        like: settings for everything that the plan leaves open; a max_context of its own takes
            precedence
        Raises UsageError if an engine cannot follow the plan.
        """
        return replace(
            like,
            machine=replace(like.machine, gpus=self.gpus),
            method=self.method,
            max_context=like.max_context or self.context_tokens,
            weights=self.weights if like.weights == AUTO else like.weights,
            kv=self.kv if like.kv == AUTO else like.kv,
            block_tokens=self.block_tokens,
            placement=self.placement,
        )

    def line(self, layers: int, kv_blocks: int) -> str:
        """Return the plan on one line.

        layers: number of layers of the model
        kv_blocks: number of KV blocks of all layers with a full context
        """
        method, placement = self.method, self.placement
        resident = min(placement.resident_kv_blocks + placement.reclaimed_kv_blocks, kv_blocks)
        parts = [
            f"{layers - len(placement.streamed_layers)} of {layers} layers' weights resident"
            + "".join(
                f", {words.format(len(layers))}"
                for words, layers in (
                    ("{} on disk", placement.file_layers),
                    ("the high bits of {}", placement.split_layers),
                    ("{} without their experts", placement.expert_layers),
                    ("{} computed by the CPU", placement.processor_layers),
                )
                if layers
            ),
            f"{resident} of {kv_blocks} KV blocks of {self.block_tokens} tokens resident"
            if kv_blocks
            else "all KV resident",
        ]
        if placement.expert_slots:
            parts[0] += f", {placement.expert_slots} experts of each also on the device"
        if placement.processor_kv and resident < kv_blocks:
            parts[-1] += f" and {placement.processor_kv:.0%} of the others left to the CPU"
        named = _SPLIT_WEIGHTS.get(self.weights), "KV" if self.kv == SPLIT else None
        if split := " and ".join(filter(None, named)):
            parts.append(f"{split} split")
        if self.budget:
            drafting = f"retrieval budget {self.budget}"
            if method.draft_kv == INT8:
                drafting += " in 8 bits"
            if copied := len(placement.copied_layers):
                drafting += f" with {copied} layers in {method.bits_of_copies} bits"
            parts.append(drafting)
        if method.drafts and (self.budget or method.has_drafter):
            drafts = f"drafts of {_length(method.draft_tokens)}"
            if self.budget and method.has_drafter:
                inner = method.inner_draft_tokens
                both = inner == method.draft_tokens == AUTO
                drafts += "" if both else f" by steps of {_length(inner)}"
            parts.append(drafts)
        where = f"{self.gpus} GPUs, of each: " if self.gpus > 1 else ""
        return f"{method.method}, {where}{', '.join(parts)}"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as one flat dict, as stored in a file."""
        own = {name: getattr(self, name) for name in _OWN}
        parts = asdict(self.method) | asdict(self.placement)
        return own | parts | {"budget": self.budget}

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all. Raises OutputError."""
        Output(path, "plan").write(json.dumps(self.as_dict(), indent=2) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan from JSON. Raises UsageError, which names what is wrong."""
        try:
            raw = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read a plan from {path}: {reason}") from error
        if not isinstance(raw, dict):
            raise UsageError(f"{path} holds no plan, which is a JSON object")
        raw = {_OLD_NAMES.get(name, name): value for name, value in raw.items()}
        if raw.pop("retrieval", "mass") != "mass":
            raise UsageError(f"{path}: chunks are retrieved by attention mass alone now")
        for name in ("weights", "kv", "draft_weights"):
            if raw.get(name) == _OLD_SPLIT:
                raw[name] = SPLIT
        known = [*_OWN, *_METHOD, *_PLACEMENT]
        if unknown := sorted(raw.keys() - set(known)):
            raise UsageError(f"{path}: a plan has no {unknown[0]!r}; it has {', '.join(known)}")
        if missing := sorted(set(known) - raw.keys() - _OPTIONAL):
            raise UsageError(f"{path}: the plan lacks {missing[0]!r}")
        for name in LAYER_LISTS:
            if isinstance(raw.get(name), list):
                raw[name] = tuple(raw[name])
        if raw["budget"] == 0:
            raw["budget"] = None
        try:
            return cls(
                **{name: raw[name] for name in _OWN if name in raw},
                method=MethodSettings(**{name: raw[name] for name in _METHOD if name in raw}),
                placement=Placement(**{name: raw[name] for name in _PLACEMENT if name in raw}),
            )
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


def _length(tokens: int | str) -> str:
    return "learned length" if tokens == AUTO else str(tokens)


_METHOD = tuple(field.name for field in fields(MethodSettings))
_PLACEMENT = tuple(field.name for field in fields(Placement))
_OWN = tuple(f.name for f in fields(Plan) if f.name not in ("method", "placement"))
# Names of fields in plans from earlier versions.
_OLD_NAMES = {
    "substituted_layers": "copied_layers",
    "int4_layers": "copied_layers",
    "halved_layers": "split_layers",
    "lent_kv_blocks": "reclaimed_kv_blocks",
}
_OLD_SPLIT = "planes"
# What is split, by the format of weights.
_SPLIT_WEIGHTS = {SPLIT: "weights", SPLIT_EXPERTS: "experts"}
# Fields that a plan may lack, because earlier versions did not write them.
_OPTIONAL = {
    "gpus", "made_for", "predicted", "chunk_size", "accept", "tree", "draft_weights",
    "copy_bits", "draft_kv",
    "weights", "kv", "reclaimed_kv_blocks", "copied_layers",
    "file_layers", "split_layers", "processor_layers", "processor_kv", "expert_layers",
    "expert_slots",
}  # fmt: skip
