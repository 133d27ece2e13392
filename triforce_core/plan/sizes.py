"""Memory that a model, its context and its draft levels take. No tensors are created here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod

from triforce_core.model.config import ModelConfig
from triforce_core.model.parts.kept import (
    index_shape,
    kv_shape,
    ngram_shape,
    state_shape,
    window_shape,
)
from triforce_core.model.sharing.share import Pieces
from triforce_core.model.tensors import (
    Layouts,
    copy_layouts,
    dense_layouts,
    drafter_layouts,
    matrices,
)
from triforce_core.plan.levels import (
    LONGEST_RECORDED,
    fitting_budget,
    retrieval_bytes,
    small_model_parts_bytes,
)
from triforce_core.plan.machine import Device
from triforce_core.plan.temporaries.drafter_bytes import drafter_bytes
from triforce_core.plan.temporaries.parts_bytes import looked_up_bytes
from triforce_core.plan.temporaries.product_bytes import Products, groups_bytes
from triforce_core.plan.temporaries.workspace import (
    GRAPH_LIBRARY_BYTES,
    distribution_bytes,
    graph_bytes,
    graph_logits_bytes,
    pass_workspace_bytes,
    prefill_workspace_bytes,
    running_bytes,
)
from triforce_core.settings import EXACT, INT4, OFF, SPLIT, MethodSettings
from triforce_kernels.limits import (
    ALIGNED_KEYS,
    FEW_ROWS,
    PARTS_BYTES,
    WHOLE_ROWS,
    most_tile_rows,
)
from triforce_offload.errors import UsageError
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.sizes import coding_bytes, reader_bytes, rounding_bytes
from triforce_offload.plan.requirements import Requirements
from triforce_offload.units import format_bytes
from triforce_offload.weights.formats import ElementType
from triforce_offload.weights.layouts import FlatLayout

# Number of prompt tokens for which a layer is computed at a time.
PREFILL_CHUNK = 1024
# Unless copies of all layers are requested, those of quantised layers are made only if they take at
# most this share of the layers' bytes: in 4 bits those of 6-bit layers and larger, in 3 bits those
# of Q4_0 and larger.
_LARGEST_COPIES = 0.8
# Least and greatest number of tokens of a KV block. Smaller ones would cut the groups of keys whose
# sums are taken together, and results would depend on the size of blocks.
_BLOCK_TOKENS = (ALIGNED_KEYS, 4096)


def choose_block_tokens(token_bytes: int, max_context: int, block_bytes: int) -> int:
    """Return the number of tokens of a KV block: a power of two of about `block_bytes`, and at most
    an eighth of the context.
    """
    least, most = _BLOCK_TOKENS
    tokens = max(1, min(block_bytes // token_bytes, max_context // 8, most))
    return max(least, 1 << tokens.bit_length() - 1)


@dataclass(frozen=True)
class ModelSizes:
    """The memory that a model, its context and its draft levels take on a device of any size.

    max_context: number of tokens of the longest sequence
    block_tokens: number of tokens of a KV block; None for about `device.copy_bytes` of KV
    drafter: config of the draft model, if there is one
    drafter_pieces: pieces of its matrices, which are kept as stored; of a head in the model's own
        files only if the model's are
    layouts: layouts of the weights; None for dense in `dtype`
    kv_split: whether blocks of KV are split
    sequences: number of sequences that a pass may run over at once
    same_bits: whether a row has the same bits in every forward
    records_passes: whether passes may be recorded
    """

    config: ModelConfig
    dtype: ElementType
    max_context: int
    method: MethodSettings
    block_tokens: int | None = None
    drafter: ModelConfig | None = None
    drafter_pieces: Pieces | None = None
    device: Device = field(default_factory=Device)
    layouts: Layouts | None = None
    kv_split: bool = False
    sequences: int = 1
    same_bits: bool = False
    records_passes: bool = True

    @property
    def weights(self) -> Layouts:
        return self.layouts or dense_layouts(self.config, self.dtype)

    @property
    def drafter_layouts(self) -> Layouts:
        """Layouts of the draft model."""
        joins = self.drafter.joins
        own_files = joins is None or joins.in_own_files
        pieces = self.drafter_pieces if self.weights.block_types or own_files else None
        return drafter_layouts(self.drafter, self.dtype, pieces)

    @property
    def rounds_kv(self) -> bool:
        """Whether the retrieval cache keeps its tokens in 8 bits."""
        return self.method.rounds_kv(on_gpu=self.device.gpu)

    @property
    def graphs(self) -> bool:
        """Whether forwards that wait for nothing are recorded. Decoding without a kernel copies
        small tables from the host, and without one for experts the host chooses them, neither of
        which a graph can contain.
        """
        weights, device = self.weights, self.device
        fused = device.kernels or not (weights.split or weights.experts)
        fused &= all(each.multiplies_experts for each in weights.experts)
        return device.graphs and fused and all(map(device.has_kernel, weights.block_types))

    @property
    def copy_layouts(self) -> tuple[FlatLayout, ...]:
        """Layout of each layer's draft copy; empty if the retrieval level does not use such copies.

        Raises UsageError if it has to use them and they are no smaller than quantised layers.
        """
        asked = self.method.draft_weights
        if asked in (EXACT, SPLIT) or self.method.method != "triforce":
            return ()
        copies = copy_layouts(self.config, self.dtype, self.method.bits_of_copies)
        if not self.weights.block_types:
            return copies
        size, exact = sum(layer.nbytes for layer in copies), self.weights.layers_bytes
        if asked == INT4 and size >= exact:
            raise UsageError(
                f"draft copies take {format_bytes(size)}, and the layers as they are stored "
                f"only {format_bytes(exact)}"
            )
        return copies if asked == INT4 or size <= _LARGEST_COPIES * exact else ()

    def requirements(self, budget: int) -> Requirements:
        """Return the memory requirements. budget: number of tokens of the retrieval cache, or 0

        Raises UsageError.
        """
        config, method, itemsize = self.config, self.method, self.dtype.itemsize
        shape, verified = self._kv_shape(), self.max_draft_tokens(budget) + 1
        scored = method.chunk_size if budget else 0
        weights, copies = self.weights, self.copy_layouts if budget else ()
        prefill_rows = min(PREFILL_CHUNK, self.max_context)
        return Requirements(
            layer_bytes=tuple(layer.nbytes for layer in weights.layers),
            low_bytes=_unless_zero(layer.low_bytes for layer in weights.layers),
            expert_bytes=_unless_zero(layer.expert_bytes for layer in weights.layers),
            experts=tuple(
                layout.experts(spec.mlp.count) if spec.mlp.active else None
                for spec, layout in zip(config.layers, weights.layers, strict=True)
            ),
            head_bytes=weights.head.nbytes,
            embedding_bytes=weights.embedding.nbytes if weights.embedding else 0,
            prefill_workspace_bytes=prefill_workspace_bytes(
                *(config, self.max_context, PREFILL_CHUNK, shape.block_tokens, scored, itemsize),
                by_host=self._by_host(PREFILL_CHUNK),
                tile=self._tile,
            )
            + self._product_bytes(prefill_rows)
            + self._divided_bytes(prefill_rows)
            + (0 if self.device.gpu else self._looked_up_bytes)
            + coding_bytes(shape),
            pass_workspace_bytes=pass_workspace_bytes(
                *(config, self.max_context, verified, shape.block_tokens, scored, itemsize),
                self.device.splits(config.attention.kv_heads),
                self._rounding_bytes(shape, budget),
                by_host=self.device.host_kernels,
                tile=self._tile,
            )
            + self._product_bytes(verified)
            + self._divided_bytes(0)
            + coding_bytes(shape),
            kv=shape,
            kv_layers=config.kv_layers,
            windows=window_shape(config, self.max_context, self.dtype),
            states=state_shape(config, self.dtype),
            ngrams=ngram_shape(config, self.dtype),
            index=index_shape(config, self.max_context, self.dtype),
            context_tokens=self.max_context,
            max_pass_tokens=verified,
            drafting_bytes=self._drafting_bytes(shape, budget),
            gather_bytes=self._gather_bytes(shape, budget),
            copy_bytes=tuple(layer.nbytes for layer in copies),
            copies_all=method.draft_weights == INT4,
            decoding_bytes=groups_bytes(config, verified, self._largest, itemsize) if copies else 0,
            records_passes=self._records_passes(budget),
            sequences=self.sequences,
            looked_up_bytes=self._looked_up_bytes if self.device.gpu else 0,
        )

    def max_draft_tokens(self, budget: int) -> int:
        """Return the number of tokens of the longest draft. budget: as for `requirements`"""
        return self.method.max_draft_tokens(retrieval_trees=budget > 0 and self.grows_trees)

    @property
    def grows_trees(self) -> bool:
        """Whether a retrieval level may grow trees. A recurrent state has no place for the rows of
        a tree that earlier forwards ran, and an MTP head drafts chains.
        """
        head = self.drafter is not None and self.drafter.joins
        return not (self.config.recurrent_layers or head)

    @property
    def drafting_chains(self) -> ModelSizes | None:
        """These sizes if the retrieval level drafts chains, for which there may be room; None if it
        drafts no trees, or if they were asked for.
        """
        method = self.method
        trees = method.method == "triforce" and method.grows_trees and self.grows_trees
        if not trees or method.fixed_tree is not None:
            return None
        return replace(self, method=replace(method, tree=OFF))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all layers and of the KV of full contexts, wherever they are placed.

        Raises UsageError.
        """
        shape = self._kv_shape()
        blocks = self.sequences * (self.max_context // shape.block_tokens) * shape.layers
        return sum(layer.nbytes for layer in self.weights.layers) + blocks * shape.block_bytes

    def _records_passes(self, budget: int) -> bool:
        """Whether passes without a retrieval level are recorded. They are not if rows are to keep
        their bits: attention in recorded forwards was not shown to keep them. Nor are they without
        a kernel that ends where the keys do: others read all that there is room for, and those that
        rows choose are found by the host too.
        """
        may = self.records_passes and self.graphs and self.device.kernels
        chooses = self.config.chooses_keys
        plain = not (self.same_bits or chooses) and self.config.attention.score_cap is None
        return may and plain and not budget

    def _product_bytes(self, tokens: int) -> int:
        """Return the bytes of temporaries of products with weights, without their results."""
        products = Products(self.config, self.weights, self.device, self.dtype.itemsize)
        few = tokens * self.sequences <= FEW_ROWS
        return products.nbytes(tokens, few=few, by_host=self._by_host(tokens))

    def _divided_bytes(self, tokens: int) -> int:
        """Return what kernels of a GPU take to give rows the same bits: sums of the parts of dense
        products, and the splits of the attention of `tokens` tokens of a prompt.
        """
        if not self.same_bits or self.device.host_kernels:
            return 0
        attention = self.config.attention
        whole = min(tokens, WHOLE_ROWS * attention.kv_heads // attention.heads)
        splits = self.device.splits(attention.kv_heads)
        return PARTS_BYTES + running_bytes(self.config, whole, splits)

    @property
    def _looked_up_bytes(self) -> int:
        """Host bytes of the per-layer embeddings of a prompt."""
        return looked_up_bytes(self.config, self.max_context, self.dtype.itemsize)

    def _by_host(self, rows: int) -> bool:
        """Whether compiled kernels multiply so many rows by weights in any format."""
        return self.device.host_kernels and (self.same_bits or rows * self.sequences <= FEW_ROWS)

    @property
    def _tile(self) -> int:
        """Most rows of a tile of products with experts by a GPU's kernels; 0 without such kernels.
        If rows are to keep their bits, any number of rows is multiplied in tiles.
        """
        kernels = self.device.gpu and self.device.kernels
        if not (kernels and all(each.multiplies_experts for each in self.weights.experts)):
            return 0
        if self.same_bits:
            return self.max_context
        return most_tile_rows(self.dtype.itemsize, split=self.weights.split)

    @property
    def _largest(self) -> int:
        """Number of elements of the largest matrix of any layer."""
        return max(map(prod, matrices(self.config)))

    def _kv_shape(self) -> KVShape:
        shape, chunk = kv_shape(self.config, 1, self.dtype), self.method.chunk_size
        if self.config.chooses_keys:
            # All KV is on the device in one piece, from which rows take what they choose.
            whole = self.max_context + 1
            return replace(shape, block_tokens=whole, text_tokens=self.max_context)
        tokens = self.block_tokens or max(
            chunk, choose_block_tokens(shape.token_bytes, self.max_context, self.device.copy_bytes)
        )
        if chunk > tokens:
            raise UsageError(f"chunk_size {chunk} is more than the {tokens} tokens of a block")
        return replace(
            shape,
            block_tokens=tokens,
            text_tokens=self.max_context,
            # Blocks are split when they are full, so a block that never fills is not split.
            split=self.kv_split and tokens <= self.max_context,
        )

    def _rounding_bytes(self, shape: KVShape, budget: int) -> int:
        if not budget or not self.rounds_kv:
            return 0
        return rounding_bytes(shape, self._fitting_budget(budget))

    def _gather_bytes(self, shape: KVShape, budget: int) -> int:
        if not budget or not self.device.gathers_through_host:
            return 0
        return self.sequences * reader_bytes(shape, self._fitting_budget(budget))

    def _fitting_budget(self, budget: int) -> int:
        return fitting_budget(budget, self.method.chunk_size, self.max_context)

    def _drafting_bytes(self, shape: KVShape, budget: int) -> int:
        longest, total = self.max_draft_tokens(budget), 0
        if self.drafter:
            total += self.drafter_layouts.nbytes
            total += self.sequences * small_model_parts_bytes(self.drafter, shape, longest)
            total += distribution_bytes(self.drafter, 1)
            if (joins := self.drafter.joins) and joins.own_vocab:
                # The model's token of each token of the head.
                total += 8 * self.drafter.vocab
            numbers, itemsize = self._decoded_of_drafter, self.dtype.itemsize
            context = self.max_context
            total += drafter_bytes(self.drafter, numbers, itemsize, context, longest)
        if budget:
            chunk, context = self.method.chunk_size, self.max_context
            total += self.sequences * retrieval_bytes(
                shape, budget, chunk, longest, context, rounded=self.rounds_kv
            )
        recorded = self._recorded_bytes(budget)
        return total + (self.sequences * recorded + GRAPH_LIBRARY_BYTES if recorded else 0)

    @property
    def _decoded_of_drafter(self) -> int:
        """Elements of the largest matrix of a drafter that is decoded beside a dense model."""
        device, layouts = self.device, self.drafter_layouts
        by_kernel = device.host_kernels and all(map(device.has_kernel, layouts.block_types))
        return 0 if by_kernel or self.weights.decoded_numbers else layouts.decoded_numbers

    def _recorded_bytes(self, budget: int) -> int:
        """Return the bytes that the recorded forwards of one sequence keep."""
        if not self.graphs:
            return 0
        total, records_passes = 0, self._records_passes(budget)
        for config in (self.config if budget else None, self.drafter):
            is_head = config is not None and config.joins is not None
            # A head is recorded beside other forwards only: where passes stream, little is gained.
            if config and (budget or records_passes or not is_head):
                rows = config.joins.recorded_rows if is_head else LONGEST_RECORDED
                total += self._graph_bytes(config, rows)
                total += graph_logits_bytes(config, rows, self.dtype.itemsize)
                if is_head and config.joins.own_vocab:
                    # Its logits are of all tokens of the model.
                    total += 4 * rows * self.config.vocab * 4
        if records_passes:
            rows = min(LONGEST_RECORDED, self.max_draft_tokens(budget) + 1)
            total += self._graph_bytes(self.config, rows)
        return total

    def _graph_bytes(self, config: ModelConfig, rows: int) -> int:
        """Return the bytes of recorded forwards of up to `rows` rows, to hidden states."""
        splits, itemsize = self.device.splits(config.attention.kv_heads), self.dtype.itemsize
        return graph_bytes(config, rows, itemsize, splits, self.max_context)


def _unless_zero(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the numbers, or an empty tuple if all are 0."""
    found = tuple(numbers)
    return found if any(found) else ()
