"""The models of one engine: the target, and what drafts for it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from triforce_core.decoding.contexts.kv_parts import KVParts
from triforce_core.model.transformer import Model
from triforce_core.settings import DENSE, EXACT, NO_DRAFTER, SPLIT, STORED, MethodSettings
from triforce_offload.graphs import Recorder
from triforce_offload.kv.shape import KVShape
from triforce_offload.ranks import Ranks
from triforce_offload.runtime import Runtime
from triforce_offload.weights.int4_copies import Int4Copies
from triforce_offload.weights.store import WeightStore


@dataclass(frozen=True)
class SmallModel:
    """A drafter's weights, all on the device, and the shape of its KV.

    capacity: tokens of its window
    resources: closes its weights
    """

    model: Model
    store: WeightStore
    shape: KVShape
    capacity: int
    resources: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Gives its memory back; more than once is no harm."""
        self.resources.close()


@dataclass(frozen=True)
class Dropped:
    """A level that was dropped, and why.

    drafts, seconds, plain_seconds: how many drafts were counted, what they and their verification
        took, and what their tokens would have taken without
    nbytes: of device memory that KV may use instead
    """

    level: str
    drafts: int
    seconds: float
    plain_seconds: float
    nbytes: int


@dataclass
class Models:
    """What loading gives: everything that outlives texts and requests. A level that never pays is
    dropped from it, for good.

    target: the full model, whose weights are the runtime's
    method: as asked for, but for what was dropped
    budget: tokens of the retrieval cache, 0 if there is no such level
    small: the model that drafts, if one does
    int4_copies: of layers that the retrieval model does not take from the target, if it has any
    recorder: records forwards of what drafts as graphs, if given
    resources: closes all of it
    dropped: what drafted once, in the order in which it was dropped
    kv_parts: the key-value heads of each of the ranks that share the target
    freed_bytes: of device memory that dropped levels gave back
    weights: how the target's are kept, as EngineConfig has it
    """

    target: Model
    runtime: Runtime
    method: MethodSettings
    budget: int
    kv_parts: KVParts
    small: SmallModel | None = None
    int4_copies: Int4Copies | None = None
    recorder: Recorder | None = None
    resources: ExitStack = field(default_factory=ExitStack)
    dropped: list[Dropped] = field(default_factory=list)
    freed_bytes: int = 0
    weights: str = DENSE

    @property
    def ranks(self) -> Ranks:
        """That share the target."""
        return self.kv_parts.ranks

    @property
    def has_one_context(self) -> bool:
        """Whether there is only one context. Levels and memory that contexts share can be dropped
        then, while a request runs.
        """
        return self.runtime.plan.requirements.sequences == 1

    @property
    def whole_kv(self) -> KVShape:
        """Of all heads, whatever ranks share them."""
        return replace(self.runtime.plan.kv.shape, kv_heads=self.kv_parts.count)

    @property
    def reads_high_bits(self) -> bool:
        """See MethodSettings.reads_high_bits."""
        return self.method.reads_high_bits(self.weights, on_gpu=self.target.device.type == "cuda")

    @property
    def rounds_kv(self) -> bool:
        """See MethodSettings.rounds_kv."""
        return self.method.rounds_kv(on_gpu=self.target.device.type == "cuda")

    @property
    def why_no_retrieval(self) -> str:
        """What a person is told where triforce has no retrieval model."""
        if any(dropped.level == "retrieval" for dropped in self.dropped):
            return "it never paid"
        if not self.runtime.streams:
            return "nothing streams"
        if not self.runtime.plan.placement.streamed_layers:
            return "there is no room for it"
        if self.method.draft_weights == EXACT:
            return "weights stream"
        if self.method.draft_weights == SPLIT:
            return "the high bits of some layers stream"
        if self.weights == STORED:
            return "quantised weights stream, which nothing stands in for yet"
        return "weights stream and no copies of them in 4 bits are on the device"

    def close(self) -> None:
        """Releases everything that loading took."""
        self.resources.close()

    def drop_drafter(self) -> None:
        """Does without the drafter. Whoever uses it has let go of it."""
        self.method = replace(self.method, draft=NO_DRAFTER)
        if self.small is not None:
            self.small.close()
            self.small = None

    def drop_retrieval(self) -> None:
        """Does without the retrieval model: the drafter proposes to the target directly. Whoever
        uses it has let go of it.
        """
        self.budget = 0
        if self.int4_copies is not None:
            self.int4_copies.close()
            self.int4_copies = None

    @property
    def levels(self) -> list[str]:
        """From the cheapest to the one that has the last word."""
        names = ["target"]
        if self.budget:
            names.insert(0, "retrieval")
        if self.method.drafts and self.method.has_drafter:
            names.insert(0, "model" if self.small else "ngram")
        return names
