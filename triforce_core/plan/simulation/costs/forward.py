"""Cost of the forwards of one GPU in seconds, from the rates of its hardware.

A piece of work takes max(bytes / memory rate, flops / matrix rate), plus the time to launch its
kernels. On a GPU, the host launches ahead, so an eager piece takes the longer of work and launches;
a recorded piece takes its work plus the gaps between kernels. On a CPU, work and launches add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import EXPERT_PARTS, Experts
from triforce_core.model.layers import Attention, LayerSpec, Mixer, Recurrent
from triforce_core.model.parts.kept import state_shape
from triforce_core.model.parts.recurrent import LinearAttention, Mamba2
from triforce_core.model.parts.specs import Keeps
from triforce_core.model.tensors import MatrixBytes, dense_layouts
from triforce_core.plan.simulation.costs.launches import (
    CONVOLVE_LAUNCHES,
    DECODE_OPERATIONS,
    DISTRIBUTION_BYTES,
    EXPERT_LAUNCHES,
    FUSED,
    HEAD_LAUNCHES,
    LAW_PASSES,
    LAW_SEARCH_STEPS,
    LAW_STEP_NUMBERS,
    LAW_STEP_SECONDS,
    MLP_TOUCHES,
    NORM_PARTS,
    NORM_TOUCHES,
    PLAIN,
    RECUR_LAUNCHES,
    ROTATE_TOUCHES,
    ROUND_LAUNCHES,
    SCORED_KEYS,
    SELECTION_LAUNCHES,
    SMALL_KERNEL_SECONDS,
    Launches,
    further_launches,
    selection_work,
)
from triforce_core.plan.simulation.costs.once import once_for_each
from triforce_core.plan.simulation.costs.products import Product, integer_seconds
from triforce_kernels.limits import (
    FEW_ROWS,
    expert_tile,
    most_tile_rows,
    rows_in_tiles,
)
from triforce_offload.kv.shape import KVShape
from triforce_offload.kv.states.shape import FOLD_TOKENS
from triforce_offload.machine.profiles import Hardware
from triforce_offload.weights.formats import ElementType, Read


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a forward.

    config: config of one GPU's share (`model/sharing`)
    stored: bytes of its matrices in memory; None for dense in `dtype`
    """

    config: ModelConfig
    dtype: ElementType
    hardware: Hardware
    stored: MatrixBytes | None = None

    @cached_property
    def matrices(self) -> MatrixBytes:
        return self.stored or MatrixBytes.of(dense_layouts(self.config, self.dtype))

    @property
    def _layer(self) -> LayerSpec:
        """The layer whose small kernels stand for those of all: the first with attention."""
        layers = self.config.layers
        return next(spec for spec in layers if isinstance(spec.mixer, Attention))

    @property
    def launches(self) -> Launches:
        return FUSED if self.hardware.asynchronous else PLAIN

    def piece(self, nbytes: float, flops: float, launches: int, *, recorded: bool = False) -> float:
        """Return the seconds of one piece of work."""
        hardware = self.hardware
        work = max(nbytes / hardware.memory_bytes_per_second, flops / hardware.flops_per_second)
        return self.launched(work, launches, recorded)

    @once_for_each
    def before(self, tokens: int, *, recorded: bool = False) -> float:
        """Return the seconds of a layer before its attention."""
        mixer, matrices, launches = self._layer.mixer, self.matrices, self.launches
        rotated = mixer.queries + mixer.keys
        touched = NORM_TOUCHES * self.config.width + ROTATE_TOUCHES * rotated
        work = self.product(tokens, self.elements[0], matrices.qkv, matrices.layer_read)
        more, _ = further_launches(self._layer, on_gpu=self.hardware.asynchronous)
        work += self._touch(tokens, touched, launches.small_before + more)
        layer = self.launched(work, launches.before + more, recorded)
        if mixer.norm_over_heads:
            # GPUs sum the squares of queries and of keys.
            layer += self._told(4 * 2 * (tokens + 1))
        if isinstance(mixer := self.config.recurrent, Mamba2) and mixer.divided_group:
            # Likewise, those of the only group of a Mamba-2 layer.
            share = len(self.config.recurrent_layers) / len(self.config.layers)
            layer += share * self._told(4 * (tokens + 1))
        return layer

    @once_for_each
    def after(self, tokens: int, *, recorded: bool = False) -> float:
        """Return the seconds of a layer after its attention, with its two sums over GPUs."""
        layers = self.config.layers
        columns = sum(spec.mlp.columns for spec in layers) / len(layers)
        touched = (NORM_TOUCHES + 6) * self.config.width + MLP_TOUCHES * columns
        matrices, launches = self.matrices, self.launches
        work = self.product(tokens, self.elements[1], matrices.rest, matrices.layer_read)
        if matrices.experts:
            work += self.experts(tokens)
        _, more = further_launches(self._layer, on_gpu=self.hardware.asynchronous)
        work += self._touch(tokens, touched, launches.small_after + more)
        count = launches.after + more + self.expert_launches(tokens)
        layer = self.launched(work, count, recorded)
        return layer + 2 * self.all_reduce(tokens)

    @once_for_each
    def experts(self, tokens: int) -> float:
        """Return the seconds of the products with the experts of an average layer: those that the
        tokens choose are read once, and a kernel decodes them for each tile of the rows that chose
        them. Tiles of an expert run together, so all but one find it in the L2 cache.
        """
        mlp = next(spec.mlp for spec in self.config.layers if isinstance(spec.mlp, Experts))
        share, matrices = mlp.distinct(tokens) / mlp.count, self.matrices
        rows = tokens * mlp.active / mlp.distinct(tokens)
        elements, nbytes = self.elements[2] * share, matrices.experts * share
        if self._in_tiles(mlp, tokens) and tokens > FEW_ROWS:
            tile = min(self._most_tile, expert_tile(ceil(tokens * mlp.active / mlp.count)))
            # On average half of the last tile of each expert has no rows.
            elements *= rows / tile + 0.5
            rows = tile
        return self.product(rows, elements, nbytes, matrices.experts_read)

    def expert_launches(self, tokens: int) -> int:
        """Return the launches of a layer's experts, the average of all layers."""
        sparse = [spec.mlp for spec in self.config.layers if spec.mlp.active]
        if not sparse:
            return 0
        plain, fused, sorting = EXPERT_LAUNCHES
        share = len(sparse) / len(self.config.layers)
        if self._in_tiles(sparse[0], tokens):
            # Two products, instead of those of a dense MLP and its activation if there is none.
            around = fused if tokens <= FEW_ROWS else fused + sorting
            return round(share * (around + 2 - (0 if sparse[0].shared else 3)))
        return round(share * plain * sparse[0].distinct(tokens))

    def _in_tiles(self, mlp: Experts, tokens: int) -> bool:
        """Return whether a kernel multiplies by all experts at once. Joined blocks have none."""
        joined = tokens > FEW_ROWS and self.matrices.experts_read is Read.SPLIT_BLOCKS
        tiled = tokens <= rows_in_tiles(mlp.active, mlp.count, self._most_tile)
        return self.hardware.asynchronous and tiled and not joined

    @property
    def _most_tile(self) -> int:
        """Rows that a program multiplies by an expert at a time, at most."""
        split = self.matrices.experts_read is Read.SPLIT_BF16
        return most_tile_rows(self.dtype.itemsize, split=split)

    @once_for_each
    def attend(
        self,
        tokens: int,
        keys: int,
        *,
        scored: bool = False,
        recorded: bool = False,
        rounded: bool = False,
    ) -> float:
        """Return the seconds of attention of `tokens` queries to one piece of keys.

        scored: whether chunks are scored
        rounded: whether keys and values are in 8 bits; a CPU converts them to `dtype` first
        """
        mixer, hardware = self.config.attention, self.hardware
        if mixer.index:
            work = selection_work(mixer, mixer.index, tokens, keys, self.dtype.itemsize)
            return self.piece(*work, SELECTION_LAUNCHES, recorded=recorded)
        token_bytes = _token_bytes(mixer, self.dtype)
        flops = 4.0 * tokens * mixer.queries * keys
        if rounded and hardware.asynchronous:
            # One kernel multiplies the result by the scales.
            nbytes = keys * token_bytes / self.dtype.itemsize
            scaling = self.small(1, recorded=recorded)
            return scaling + self.piece(nbytes, flops, self.launches.attend, recorded=recorded)
        nbytes = keys * token_bytes
        if scored and hardware.asynchronous:
            # A float32 score of each chunk for every row: written once, and read once at the end.
            nbytes += 2 * 4 * tokens * mixer.heads * keys / SCORED_KEYS
        elif scored:
            # A float32 score of each key for every row: written, turned into weights, and averaged.
            nbytes += 4 * 4 * tokens * mixer.heads * keys
        launches = self.launches.attend + (self.launches.score if scored else 0)
        return self._attended(keys * token_bytes, nbytes, flops, launches, recorded=recorded)

    def recent(self, mixer: Mixer, tokens: int, keys: int, *, recorded: bool = False) -> float:
        """Return the seconds of `tokens` rows of a mixer that keeps recent tokens or a state,
        without its projections.

        keys: number of keys of the context
        """
        if mixer.keeps is Keeps.STATE:
            return self._recur(mixer, tokens, recorded=recorded)
        seen = min(keys, mixer.window - 1 + tokens)
        nbytes = seen * _token_bytes(mixer, self.dtype)
        flops = 4.0 * tokens * mixer.queries * seen
        return self._attended(nbytes, nbytes, flops, self.launches.attend, recorded=recorded)

    def _recur(self, mixer: Recurrent, tokens: int, *, recorded: bool) -> float:
        """Return the seconds of a convolution, and of a recurrence if the mixer has one: its state
        is read, and the rows that are not folded yet.
        """
        shape, launches = state_shape(self.config, self.dtype), RECUR_LAUNCHES
        rows = (FOLD_TOKENS * 3 // 2 + 3 * tokens) * shape.row_bytes
        nbytes = (shape.state_bytes + rows) / shape.layers
        numbers = 0
        if isinstance(mixer, LinearAttention):
            numbers = 2 * mixer.value_heads * mixer.key_dim * mixer.value_dim
        else:
            launches = CONVOLVE_LAUNCHES
        count = launches[self.hardware.asynchronous]
        return self.piece(nbytes, 2.0 * tokens * numbers, count, recorded=recorded)

    def _attended(
        self, kv: float, nbytes: float, flops: float, launches: int, *, recorded: bool
    ) -> float:
        """kv: bytes of keys and values; nbytes: these and those of scores"""
        hardware = self.hardware
        if not hardware.attend_bytes_per_second:
            return self.piece(nbytes, flops, launches, recorded=recorded)
        products = max(
            kv / hardware.attend_bytes_per_second,
            flops / (hardware.attend_flops_per_second or hardware.flops_per_second),
        )
        scores = (nbytes - kv) / hardware.memory_bytes_per_second
        return self.launched(products + scores, launches, recorded)

    @once_for_each
    def decode_block(self, shape: KVShape, *, recorded: bool = False) -> float:
        """Return the seconds of decoding a block of KV."""
        if not shape.split:
            return 0.0
        hardware = self.hardware
        decoding = shape.numbers * hardware.decode_seconds_per_number
        decoding += integer_seconds(hardware, shape.numbers * DECODE_OPERATIONS)
        piece = self.piece(shape.block_bytes + shape.dense_block_bytes, 0, 1, recorded=recorded)
        return max(decoding, piece) if hardware.asynchronous else decoding + piece

    @once_for_each
    def merge(self, tokens: int, parts: int, *, recorded: bool = False) -> float:
        rows, launches = tokens * self.config.attention.queries, self.launches.merge
        nbytes = 3.0 * parts * rows * self.dtype.itemsize
        merged = self.piece(nbytes, 0, launches, recorded=recorded)
        return max(merged, self.small(launches, recorded=recorded))

    def small(self, kernels: int, *, recorded: bool = False) -> float:
        """Return the seconds of kernels that compute almost nothing."""
        each = SMALL_KERNEL_SECONDS if self.hardware.asynchronous else 0.0
        return self.launched(kernels * each, kernels, recorded)

    @once_for_each
    def head(self, tokens: int, *, recorded: bool = False) -> float:
        """Return the seconds of the final norm, the output matrix and the distributions."""
        config = self.config
        matrix = config.vocab_rows * config.hidden
        distributions = self.piece(
            DISTRIBUTION_BYTES * tokens * config.vocab,
            0,
            self.launches.distribution,
            recorded=recorded,
        )
        distributions = max(distributions, self._distribution_steps())
        work = self.product(tokens, matrix, self.matrices.head, self.matrices.head_read)
        return self.launched(work, HEAD_LAUNCHES, recorded) + distributions + self._ends(tokens)

    def _distribution_steps(self) -> float:
        """Return the seconds of the program for one row's distribution. The programs of other rows
        run in parallel.
        """
        if not self.hardware.asynchronous:
            return 0.0
        steps = LAW_PASSES * -(-self.config.vocab // LAW_STEP_NUMBERS) + LAW_SEARCH_STEPS
        return steps * LAW_STEP_SECONDS

    @once_for_each
    def resident_layer(
        self, tokens: int, keys: int, *, recorded: bool = True, rounded: bool = False
    ) -> float:
        """Return the seconds of a layer whose weights and KV are all on the device, the average of
        all layers if they differ.
        """
        # A separate kernel merges the parts into which attention divides the keys.
        merged = self.small(1, recorded=recorded) if self.hardware.asynchronous else 0.0
        config, attended = (
            self.config,
            self.attend(tokens, keys, recorded=recorded, rounded=rounded),
        )
        if len(config.kv_layers) < len(config.layers):
            attended *= len(config.kv_layers)
            for layers in filter(None, (config.window_layers, config.recurrent_layers)):
                mixer = config.layers[layers[0]].mixer
                attended += len(layers) * self.recent(mixer, tokens, keys, recorded=recorded)
            attended /= len(config.layers)
        return (
            self.before(tokens, recorded=recorded)
            + attended
            + merged
            + self.after(tokens, recorded=recorded)
        )

    def resident_forward(self, tokens: int, keys: int, *, recorded: bool = True) -> float:
        """Return the seconds of a forward with all weights and KV on the device, distributions
        included.
        """
        layers = len(self.config.layers) * self.resident_layer(tokens, keys, recorded=recorded)
        return layers + self.head(tokens, recorded=recorded)

    @property
    def round(self) -> float:
        """Seconds of a round of proposing and verifying, without its forward."""
        return ROUND_LAUNCHES * self.hardware.launch_seconds

    @cached_property
    def elements(self) -> tuple[float, float, float]:
        """Elements of an average layer's tensors before its attention, after it, and of experts."""
        before = after = experts = 0
        for spec in self.config.layers:
            for part, shape in spec.shapes(self.config.hidden).items():
                if part in NORM_PARTS:
                    before += prod(shape)
                elif part in EXPERT_PARTS:
                    experts += prod(shape)
                else:
                    after += prod(shape)
        count = len(self.config.layers)
        return before / count, after / count, experts / count

    def _touch(self, tokens: int, touched: int, kernels: int) -> float:
        """Return the seconds of small kernels that access `touched` elements of each token."""
        nbytes = tokens * touched * self.dtype.itemsize
        work = nbytes / self.hardware.memory_bytes_per_second
        return max(work, kernels * SMALL_KERNEL_SECONDS) if self.hardware.asynchronous else work

    def product(self, tokens: float, elements: float, nbytes: float, read: Read) -> float:
        """Return the seconds of a product of a matrix with `tokens` rows.

        elements, nbytes: size of the matrix
        """
        decodes = self.matrices.decoded and not self.hardware.multiplies_stored
        work = Product(elements, nbytes, self.dtype.itemsize, read, decodes)
        return work.seconds(self.hardware, tokens)

    def launched(self, work: float, launches: int, recorded: bool = False) -> float:
        """Return the seconds of work in a number of launches, given those of the work."""
        hardware = self.hardware
        if not hardware.asynchronous:
            return work + launches * hardware.launch_seconds
        if recorded:
            return work + launches * hardware.graph_launch_seconds
        return max(work, launches * hardware.launch_seconds)

    def all_reduce(self, tokens: int) -> float:
        """Return the seconds of a sum of [tokens, hidden] over GPUs."""
        return self._told(tokens * self.config.hidden * self.dtype.itemsize)

    def _ends(self, tokens: int) -> float:
        """Return the seconds of summing the input embeddings over GPUs and of gathering the logits
        on the first GPU.
        """
        others = self.hardware.gpus - 1
        return self.all_reduce(tokens) + self._told(4 * tokens * self.config.vocab_rows * others)

    def _told(self, nbytes: float) -> float:
        """Return the seconds in which GPUs exchange `nbytes`. If the rate was not measured, the
        exchange goes through host memory and back, at half the link's rate.
        """
        hardware = self.hardware
        if hardware.gpus == 1:
            return 0.0
        rate = hardware.all_reduce_bytes_per_second or hardware.link_bytes_per_second / 2
        return hardware.all_reduce_seconds + nbytes / rate


def _token_bytes(mixer: Attention, dtype: ElementType) -> int:
    """Return the bytes of one token's keys and values in a layer."""
    return mixer.kept * dtype.itemsize
