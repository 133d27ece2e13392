"""A plan: what lives where and how long drafts are. Made by `planner`, taken by the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from offload.errors import UsageError
from offload.files import write_whole
from offload.placement import Demand, Placement
from triforce_core.settings import AUTO, MethodSettings


@dataclass(frozen=True)
class Plan:
    """Every choice that a run takes from a plan. Of one GPU: each of two has the same.

    context_tokens: prompt and new tokens that it was made for
    budget: tokens of the retrieval cache, 0 for no such level
    block_tokens: of a KV block
    draft, draft_tokens, inner_draft_tokens: as MethodSettings has them
    streamed_layers: layers whose weights stream
    resident_kv_blocks: of all layers together
    gpus: how many it was made for
    predicted: figures of the simulation it was chosen by; of no use to a run
    """

    method: str
    context_tokens: int
    budget: int
    block_tokens: int
    draft: str
    draft_tokens: int | str
    inner_draft_tokens: int | str
    streamed_layers: tuple[int, ...]
    embedding_resident: bool
    resident_kv_blocks: int
    weight_slots: int
    kv_slots: int
    staging_slots: int
    gpus: int = 1
    predicted: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for what no plan can hold."""
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not _CHECKS.get(name, _whole)(value):
                raise UsageError(f"{name} of a plan cannot be {value!r}")
        self.settings()  # method and lengths are checked where they belong

    @classmethod
    def of(
        cls, settings: MethodSettings, demand: Demand, placement: Placement, budget: int
    ) -> Plan:
        """What an engine was made with."""
        return cls(
            method=settings.method,
            context_tokens=demand.context_tokens,
            budget=budget,
            block_tokens=demand.kv.block_tokens,
            draft=str(settings.draft),
            draft_tokens=settings.draft_tokens,
            inner_draft_tokens=settings.inner_draft_tokens,
            streamed_layers=placement.streamed_layers,
            embedding_resident=placement.embedding_resident,
            resident_kv_blocks=min(placement.resident_kv_blocks, demand.kv_blocks),
            weight_slots=placement.weight_slots,
            kv_slots=placement.kv_slots,
            staging_slots=placement.staging_slots,
        )

    @property
    def placement(self) -> Placement:
        return Placement(
            self.streamed_layers,
            self.embedding_resident,
            self.resident_kv_blocks,
            self.weight_slots,
            self.kv_slots,
            self.staging_slots,
        )

    def settings(self, like: MethodSettings | None = None) -> MethodSettings:
        """How a run decodes by it. like: whatever else was asked for. Raises UsageError."""
        return replace(
            like or MethodSettings(),
            method=self.method,
            draft=self.draft,
            draft_tokens=self.draft_tokens,
            inner_draft_tokens=self.inner_draft_tokens,
            budget=self.budget or None,
        )

    def check_runs(self) -> None:
        """Raises UsageError for a plan that an engine cannot take."""
        if self.gpus != 1:
            raise UsageError(f"the plan is for {self.gpus} GPUs, and an engine runs on one")
        if self.block_tokens & (self.block_tokens - 1) or not self.block_tokens:
            raise UsageError(f"block_tokens must be a power of two, got {self.block_tokens}")

    def line(self, layers: int, kv_blocks: int) -> str:
        """The plan on one line. kv_blocks: of all layers, when the context is full."""
        resident = min(self.resident_kv_blocks, kv_blocks)
        parts = [
            f"{layers - len(self.streamed_layers)} of {layers} layers' weights resident",
            f"{resident} of {kv_blocks} KV blocks of {self.block_tokens} tokens resident",
        ]
        if self.budget:
            parts.append(f"retrieval budget {self.budget}")
        if self.method != "autoregressive":
            drafts = f"drafts of {self.draft_tokens}"
            if self.budget and self.draft != "none":
                drafts += f" by steps of {self.inner_draft_tokens}"
            parts.append(drafts)
        return f"{self.method}, {', '.join(parts)}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, path: str | Path) -> None:
        """Writes the plan as JSON, whole or not at all. Raises UsageError."""
        write_whole(path, json.dumps(self.as_dict(), indent=2) + "\n", "plan")

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """A plan from JSON. Raises UsageError, naming what is wrong with it."""
        try:
            raw = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read a plan from {path}: {error}") from error
        if not isinstance(raw, dict):
            raise UsageError(f"{path} holds no plan, which is a JSON object")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(raw.keys() - known):
            raise UsageError(f"{path}: a plan has no {unknown[0]!r}; it has {', '.join(known)}")
        if missing := sorted(known - raw.keys() - {"gpus", "predicted"}):
            raise UsageError(f"{path}: the plan lacks {missing[0]!r}")
        layers = raw["streamed_layers"]
        raw["streamed_layers"] = tuple(layers) if isinstance(layers, list) else layers
        try:
            return cls(**raw)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _length(value: object) -> bool:
    return value == AUTO or _whole(value)


_CHECKS = {
    "method": lambda value: isinstance(value, str),
    "draft": lambda value: isinstance(value, str),
    "draft_tokens": _length,
    "inner_draft_tokens": _length,
    "streamed_layers": lambda value: isinstance(value, tuple) and all(map(_whole, value)),
    "embedding_resident": lambda value: isinstance(value, bool),
    "predicted": lambda value: value is None or isinstance(value, Mapping),
}
