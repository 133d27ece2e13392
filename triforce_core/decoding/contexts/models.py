"""The models of an engine: the target and the levels that draft for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count

from triforce_core.decoding.contexts.kv_parts import KVParts, StoreParts
from triforce_core.model.heads.joins import Join
from triforce_core.model.transformer import Model
from triforce_core.plan.fitting import saves_reads
from triforce_core.settings import DENSE, NO_DRAFTER, MethodSettings
from triforce_offload.graphs import Recorder
from triforce_offload.kv.recent.shapes import RecentShape
from triforce_offload.kv.shape import KVShape
from triforce_offload.ranks import Ranks
from triforce_offload.runtime import Runtime
from triforce_offload.weights.draft_copies import DraftCopies
from triforce_offload.weights.store import WeightStore


@dataclass(frozen=True)
class SmallModel:
    """A draft model or a head: its weights, all on the device, and the shape of its KV.

    capacity: number of tokens of its window
    resources: closes its weights
    """

    model: Model
    store: WeightStore
    shape: KVShape
    capacity: int
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def kind(self) -> str:
        """Its name as a level: that of a kind of head, else "model"."""
        joins = self.joins
        return joins.name if joins else "model"

    @property
    def joins(self) -> Join | None:
        """What kind of head it is, if it is one."""
        return self.model.config.joins

    def close(self) -> None:
        """Release its memory. May be called more than once."""
        self.resources.close()


@dataclass
class Models:
    """The result of loading: everything that outlives sequences and requests.

    target: the full model; the runtime has its weights
    method: the settings asked for, without a draft model that was given up
    budget: number of tokens of the retrieval cache, 0 if there is no retrieval level
    kv_parts: the key-value heads of each rank that shares the target, in full-attention layers
    recent_parts: the heads of each rank in each recent store
    small: the draft model, if there is one
    draft_copies: draft copies of the layers that the retrieval level does not take from the
        target, if it has any
    recorder: records forwards as graphs, if given
    resources: closes everything
    weights: how the target's weights are kept, see `EngineConfig.weights`
    same_bits: whether the target gives a row the same bits in every forward
    leaves_head_out: see Resolved
    records_passes: whether passes are recorded, by all ranks; none of them streams anything
    numbers: numbers for contexts
    """

    target: Model
    runtime: Runtime
    method: MethodSettings
    budget: int
    kv_parts: KVParts
    recent_parts: tuple[StoreParts, ...]
    small: SmallModel | None = None
    draft_copies: DraftCopies | None = None
    recorder: Recorder | None = None
    resources: ExitStack = field(default_factory=ExitStack)
    weights: str = DENSE
    same_bits: bool = False
    leaves_head_out: bool = False
    records_passes: bool = False
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the target."""
        return self.kv_parts.ranks

    @property
    def has_one_context(self) -> bool:
        """Whether there is only one context. Only then can shared levels and memory be dropped
        while a request runs.
        """
        return self.runtime.plan.requirements.sequences == 1

    @property
    def whole_kv(self) -> KVShape:
        """Shape of the KV of all heads, over all ranks."""
        return replace(self.runtime.plan.kv.shape, kv_heads=self.kv_parts.count)

    @property
    def whole_recent(self) -> list[RecentShape]:
        """Likewise, the shape of each recent store."""
        shapes = zip(self.runtime.plan.requirements.recent, self.recent_parts, strict=True)
        return [shape.whole(parts.keys.count, parts.values.count) for shape, parts in shapes]

    @property
    def reads_high_bits(self) -> bool:
        """See MethodSettings.reads_high_bits."""
        return self.method.reads_high_bits(self.weights, on_gpu=self.target.device.type == "cuda")

    @property
    def rounds_kv(self) -> bool:
        """See MethodSettings.rounds_kv."""
        return self.method.rounds_kv(on_gpu=self.target.device.type == "cuda")

    def retrieval_pays(self, tokens: int) -> bool:
        """Whether the retrieval level may draft a text of this length faster than passes would make
        it. Where nothing streams it reads the same weights as a pass, unless it reads their high
        bits, and the same KV while its cache holds the whole text. A level with a budget that the
        user set always drafts, and so does one above a draft model.
        """
        if self.runtime.streams or self.reads_high_bits or self.method.budget is not None:
            return True
        needs = self.runtime.plan.requirements
        return self.small is not None or saves_reads(needs, tokens, self.budget)

    def close(self) -> None:
        """Release everything that loading took."""
        self.resources.close()

    def give_up_levels(self) -> None:
        """Release the retrieval level's draft copies and the draft model, for good. The caller must
        have released every user of them.
        """
        self.budget = 0
        if self.draft_copies is not None:
            self.draft_copies.close()
            self.draft_copies = None
        if self.small is not None:
            self.method = replace(self.method, draft=NO_DRAFTER)
            self.small.close()
            self.small = None

    @property
    def held_levels(self) -> list[str]:
        """Names of the levels below the target that take device memory."""
        small = [self.small.kind] if self.small else []
        return ["retrieval", *small] if self.budget else small

    @property
    def levels(self) -> list[str]:
        """Names of the levels, from the cheapest to the target."""
        names = ["target"]
        if self.budget:
            names.insert(0, "retrieval")
        if self.method.drafts and self.method.has_drafter:
            names.insert(0, self.small.kind if self.small else "ngram")
        return names
