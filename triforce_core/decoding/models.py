"""The models of one engine: the target, and what drafts for it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from offload.graphs import Recorder
from offload.kv.shape import KVShape
from offload.runtime import Runtime
from offload.weights import WeightStore
from triforce_core.model.llama import Model
from triforce_core.settings import MethodSettings


@dataclass(frozen=True)
class SmallModel:
    """A drafter's weights, all on the device, and the shape of its KV.

    capacity: tokens of its window
    """

    model: Model
    store: WeightStore
    shape: KVShape
    capacity: int


@dataclass(frozen=True)
class Models:
    """What loading gives: everything that outlives texts and requests.

    target: the full model, whose weights are the runtime's
    budget: tokens of the retrieval cache, 0 if there is no such level
    small: the model that drafts, if one does
    recorder: records forwards of what drafts as graphs, if given
    resources: closes all of it
    """

    target: Model
    runtime: Runtime
    method: MethodSettings
    budget: int
    small: SmallModel | None = None
    recorder: Recorder | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Releases everything that loading took."""
        self.resources.close()

    @property
    def levels(self) -> list[str]:
        """From the cheapest to the one that has the last word."""
        names = ["target"]
        if self.budget:
            names.insert(0, "retrieval")
        if self.method.drafts and self.method.has_drafter:
            names.insert(0, "model" if self.small else "ngram")
        return names
