"""Input of the planner: a model, hardware, a context, and the formats of weights and KV."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

from triforce_core.model.checkpoints.drafters.eagle3 import on_ranks
from triforce_core.model.checkpoints.drafters.files import share_of
from triforce_core.model.checkpoints.mtp import mtp_config, planned_pieces, shared_pieces
from triforce_core.model.config import ModelConfig
from triforce_core.model.sharing.share import Pieces, Share, mlp_unit
from triforce_core.model.tensors import (
    Layouts,
    MatrixBytes,
    copy_layouts,
    dense_layouts,
    stored_layouts,
)
from triforce_core.params import SamplingParams
from triforce_core.plan.formats import split_weights, storable_pieces, usable_pieces
from triforce_core.plan.levels import fitting_budget
from triforce_core.plan.machine import Device, Room
from triforce_core.plan.plan import Plan
from triforce_core.plan.simulation.acceptance_curve import (
    HEAD_ACCEPTANCE,
    NGRAM_ACCEPTANCE,
    AcceptanceCurve,
)
from triforce_core.plan.simulation.costs.forward import Costs
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import AUTO, DENSE, NGRAM, SPLIT, STORED, MethodSettings
from triforce_kernels.weights.block_types import NARROW, BlockType
from triforce_offload.errors import UsageError
from triforce_offload.machine.profiles import Hardware
from triforce_offload.memory.available import LIBRARY_BYTES
from triforce_offload.weights.formats import DTYPES, Dtype

# Approximate size of a KV block on a GPU: copies of this size come within 3 % of a link's peak
# (`link/cuda`).
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Case:
    """The input of the planner.

    context: number of tokens of the context, new tokens included
    new_tokens: number of new tokens
    curve: acceptance rates
    draft, draft_config: what drafts, and the config of the draft model, None for n-grams
    pieces: pieces of the matrices if they are kept quantised, else None
    stored_drafter: pieces of the matrices of the whole draft model or head, if they are known; None
        if those of an MTP head are taken to be quantised as the model's are
    split: SPLIT if all weights are split, SPLIT_EXPERTS if experts are, else None
    split_kv: whether KV is split
    auto: which of "weights" and "kv" may have another format if that is faster; "draft" if n-grams
        draft where an MTP head does not fit
    method: settings that the planner does not change: how chunks are chosen and drafts accepted,
        and what drafts with, if not "auto"
    host_compute: see EngineConfig
    sequences: number of sequences in a pass, of `context` tokens each, which draft one after
        another; seconds of a token are those of one sequence
    fixed: choices that the user made: "method", "budget", "draft_tokens", "inner_draft_tokens",
        "resident_kv_blocks", "block_tokens", or other fields of Placement from a plan file
    """

    config: ModelConfig
    hardware: Hardware
    context: int
    new_tokens: int = SamplingParams.max_new_tokens
    dtype: Dtype = DTYPES["float16"]
    curve: AcceptanceCurve = field(default_factory=AcceptanceCurve)
    draft: str = AUTO
    draft_config: ModelConfig | None = None
    pieces: Pieces | None = None
    stored_drafter: Pieces | None = None
    split: str | None = None
    split_kv: bool = False
    auto: frozenset[str] = frozenset()
    block_bytes: int = BLOCK_BYTES
    method: MethodSettings = field(default_factory=MethodSettings)
    host_compute: float | str = AUTO
    sequences: int = 1
    fixed: dict[str, object] = field(default_factory=dict)
    device: Device | None = None

    @cached_property
    def stored(self) -> Pieces | None:
        """Pieces of the matrices as a device stores them, None if no matrix is quantised."""
        return self.pieces and self._storable(self.pieces)

    @cached_property
    def share(self) -> Share:
        """Share of the first GPU, the largest. Raises UsageError if the model does not divide."""
        unit = {} if self.stored is None else {"unit": mlp_unit(self.config, self.stored)}
        return Share.of(self.config, 0, self.hardware.gpus, **unit)

    @cached_property
    def rank(self) -> ModelConfig:
        return self.share.config

    @property
    def drafter(self) -> ModelConfig | None:
        """Config of what the first GPU has of the draft model: all of it, or its share of a head
        that GPUs divide.
        """
        joins = self.draft_config and self.draft_config.joins
        if not joins:
            return self.draft_config
        if joins.divided and joins.in_own_files:
            return self._drafter_share.config
        if joins.divided:
            return mtp_config(self.rank)
        return on_ranks(self.draft_config, self.hardware.gpus, self.config.vocab)

    @property
    def drafter_pieces(self) -> Pieces | None:
        """Pieces of what the first GPU has of a drafter, if one drafts and is quantised."""
        if self.draft_config is None:
            return None
        joins = self.draft_config.joins
        own = self.stored_drafter and self._storable(self.stored_drafter)
        if not joins:
            device = self.device or self._device
            return own and usable_pieces(own, self.draft_config, self.dtype, device)
        if joins.divided and joins.in_own_files:
            return own and self._drafter_share.pieces(own)
        if not joins.divided:
            return own
        if self.stored is None:
            return None
        if own is None:
            return planned_pieces(self.config, self.share.pieces(self.stored))
        return shared_pieces(own, self.share)

    @cached_property
    def _drafter_share(self) -> Share:
        """The first GPU's share of a drafter in files of its own."""
        pieces = self.stored_drafter or _dense_pieces
        return share_of(self.draft_config, 0, self.hardware.gpus, pieces)

    @cached_property
    def layouts(self) -> Layouts:
        """Layouts of one GPU's share of the weights."""
        pieces = self.stored and self.share.pieces(self.stored)
        if self.split:
            return split_weights(self.split, self.rank, self.dtype, pieces=pieces)
        if pieces is None:
            return dense_layouts(self.rank, self.dtype)
        return stored_layouts(self.rank, self.dtype, pieces)

    @property
    def without_head(self) -> Case:
        """The case in which n-grams draft instead of an MTP head."""
        curve = self.curve
        if curve.inner == HEAD_ACCEPTANCE:
            curve = replace(curve, inner=NGRAM_ACCEPTANCE)
        auto = self.auto - {"draft"}
        return replace(self, draft=NGRAM, draft_config=None, auto=auto, curve=curve)

    @cached_property
    def acceptance_of_high_bits(self) -> float:
        """Acceptance of drafts from the high bits of all layers."""
        parts = [part for layer in self.layouts.layers for part in layer.decoded()]
        numbers: Counter[BlockType | None] = Counter()
        for part in parts:
            numbers[part.block_type] += part.split * part.rows * part.columns
        whole = sum(part.rows * part.columns for part in parts)
        return self.curve.of_high_bits({kind: n / whole for kind, n in numbers.items() if n})

    @property
    def weights(self) -> str:
        """Format of the weights, see `EngineConfig.weights`."""
        return self.split or (STORED if self.pieces else DENSE)

    @property
    def kv(self) -> str:
        """Format of the KV, see `EngineConfig.kv`."""
        return SPLIT if self.split_kv else DENSE

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.rank, self.dtype, self.hardware, MatrixBytes.of(self.layouts))

    @cached_property
    def copy_costs(self) -> Costs:
        """Costs with draft copies of the layers."""
        layers = copy_layouts(self.rank, self.dtype, self.method.bits_of_copies)
        return replace(self.costs, stored=self.costs.matrices.with_layers(layers))

    @cached_property
    def high_costs(self) -> Costs:
        """Costs with only the high bits of the layers."""
        matrices = self.costs.matrices.with_high_bits(self.layouts.layers)
        return replace(self.costs, stored=matrices)

    def sizes(self, method: MethodSettings) -> ModelSizes:
        """Return the sizes of one GPU's share for a method."""
        return ModelSizes(
            self.rank,
            self.dtype,
            self.context,
            method,
            self.fixed.get("block_tokens"),
            self.drafter,
            self.drafter_pieces,
            self.device or self._device,
            self.layouts,
            self.split_kv,
            sequences=self.sequences,
        )

    @property
    def _device(self) -> Device:
        """How such hardware computes, with all that this program offers for it."""
        gpu = self.hardware.asynchronous
        return Device(
            gpu=gpu,
            kernels=gpu,
            copy_bytes=self.block_bytes,
            graphs=gpu,
            gathers_through_host=not gpu,
            has_kernel=lambda kind: not gpu or kind not in NARROW.values(),
        )

    def _storable(self, pieces: Pieces) -> Pieces:
        return storable_pieces(pieces, self.dtype, self.device or self._device)

    @property
    def room(self) -> Room:
        """Memory that the plan may take on one GPU."""
        hardware = self.hardware
        host = hardware.host_memory_bytes
        return Room(
            hardware.memory_bytes - self.library_bytes,
            None if host is None else host // hardware.gpus,
            emulated=hardware.emulated,
            reads_files=hardware.disk_bytes_per_second is not None,
            gpus=hardware.gpus,
        )

    @property
    def length(self) -> int:
        """Number of tokens in the KV cache halfway through decoding."""
        return self.context - self.new_tokens // 2

    @property
    def library_bytes(self) -> int:
        """Bytes of one GPU's memory that an engine leaves to libraries (`memory/device`)."""
        return LIBRARY_BYTES if self.hardware.asynchronous else 0

    @property
    def chunk_tokens(self) -> int:
        return self.method.chunk_size

    def acceptance(self, plan: Plan) -> float:
        """Return the share of the retrieval level's tokens that the target accepts. A budget beyond
        the context adds nothing.
        """
        copied = len(plan.placement.copied_layers) / len(self.config.layers)
        budget = fitting_budget(plan.budget, self.chunk_tokens, self.context)
        if not self.config.kv_layers:
            # Nothing is retrieved, and nothing left out.
            budget = self.context
        by_high_bits = self._high_layers(plan) / len(self.config.layers)
        return self.curve.at(
            budget,
            self.length,
            copied * (1 - self.curve.of_copies(plan.method.bits_of_copies)),
            by_high_bits * (1 - self.acceptance_of_high_bits),
            rounded=self.rounds_kv(plan),
        )

    def rounds_kv(self, plan: Plan) -> bool:
        """See MethodSettings.rounds_kv."""
        return plan.method.rounds_kv(on_gpu=self.hardware.asynchronous)

    def _reads_high_bits(self, plan: Plan) -> bool:
        return plan.method.reads_high_bits(self.weights, on_gpu=self.hardware.asynchronous)

    def _high_layers(self, plan: Plan) -> int:
        """Return the number of layers of which the retrieval level reads only the high bits."""
        placement = plan.placement
        if self._reads_high_bits(plan):
            return len(self.rank.layers) - len(placement.copied_layers)
        return len(placement.split_layers)

    def draft_forward(self, tokens: int, keys: int, plan: Plan) -> float:
        """Return the seconds of a forward of the retrieval level."""
        instead, high = len(plan.placement.copied_layers), self._high_layers(plan)
        kinds = [(len(self.rank.layers) - instead - high, self.costs)]
        if high:
            kinds.append((high, self.high_costs))
        if instead:
            kinds.append((instead, self.copy_costs))
        rounded = self.rounds_kv(plan)
        layers = sum(n * costs.resident_layer(tokens, keys, rounded=rounded) for n, costs in kinds)
        return layers + self.costs.head(tokens, recorded=True)

    def check(self) -> None:
        """Raise UsageError for a context or a format that the model does not support."""
        self.method.check_weights(self.weights)
        if self.split:
            split_weights(self.split, self.config, self.dtype, pieces=self.stored)
        if self.split_kv and self.dtype.name != "bfloat16":
            raise UsageError(f"only bfloat16 can be split, and KV is in {self.dtype.name} here")
        positions = self.config.positions
        if self.context > positions:
            raise UsageError(
                f"a context of {self.context} tokens is more than the {positions} positions the "
                "model has"
            )
        if self.sequences < 1:
            raise UsageError(f"sequences must be 1 or more, got {self.sequences}")
        if self.context < 2:
            raise UsageError(f"a context must have 2 tokens or more, got {self.context}")
        if not 0 < self.new_tokens < self.context:
            raise UsageError(
                f"new tokens must be 1 to {self.context - 1} in a context of {self.context}, got "
                f"{self.new_tokens}"
            )


def _dense_pieces(name: str) -> list[tuple[int, None]]:
    """The pieces of matrices of which none is quantised."""
    return []
