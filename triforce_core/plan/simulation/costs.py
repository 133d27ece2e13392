"""Cost of the forwards of one GPU in seconds, from the rates of its hardware.

A piece of work takes max(bytes / memory rate, flops / matrix rate), plus the time to launch its
kernels. On a GPU, the host launches ahead, so an eager piece takes the longer of work and launches;
a recorded piece takes its work plus the gaps between kernels. On a CPU, work and launches add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import Attention, LayerSpec
from triforce_core.model.tensors import MatrixBytes, dense_layouts
from triforce_kernels.limits import FEW_ROWS
from triforce_offload.kv.shape import KVShape
from triforce_offload.machine.profiles import Hardware
from triforce_offload.weights.formats import ElementType, Read


@dataclass(frozen=True)
class Launches:
    """Numbers of kernel launches, counted in the code.

    before, after: launches of a layer before its attention and after it (`model`)
    attend: launches for each piece of keys (`attend`)
    score: additional launches for each piece of keys whose chunks are scored
    merge: launches of a layer after all its keys
    distribution: launches from logits to distributions (`sampling`)
    small_before, small_after: those of `before` and `after` that compute almost nothing: all except
        the products with weights
    """

    before: int
    attend: int
    score: int
    merge: int
    after: int
    distribution: int
    small_before: int = 0
    small_after: int = 0

    @property
    def layer(self) -> int:
        """Number of launches of a layer with one piece of keys."""
        return self.before + self.attend + self.merge + self.after


# PyTorch's operations, views included, which compute on a CPU.
PLAIN = Launches(before=21, attend=12, score=8, merge=12, after=15, distribution=20)
# Triton's kernels: norm, product, rotation; one for blocks, one for the tail and one for scores;
# a copy that puts heads side by side, product, norm with residual, product, SwiGLU, product, sum.
FUSED = Launches(
    before=3, attend=1, score=0, merge=2, after=7, distribution=1, small_before=2, small_after=4
)
# Duration of a GPU kernel that computes almost nothing: 2.9 us, from "Getting Started with CUDA
# Graphs" (NVIDIA technical blog).
SMALL_KERNEL_SECONDS = 2.9e-6
# On a GPU, one program computes the distribution of a row. It goes through the vocabulary four
# times, in steps of 4096 numbers; then top-p goes through a short list once for each of 32 bits,
# and twice more (`distribution_triton`). Each step waits for the one before: a read of the L2
# cache, about 270 cycles (Luo et al., arXiv 2402.13499), 8 numbers a thread, and a sum over 16
# warps. Assumed to take about 2,500 cycles.
LAW_STEP_NUMBERS, LAW_PASSES, LAW_SEARCH_STEPS, LAW_STEP_SECONDS = 4096, 4, 34, 1e-6
# Integer instructions for each element of a matrix, as pairs (most rows of the product,
# instructions): counted in the loops that Triton 3.9 compiles for compute capabilities 8.0 and 8.9.
# With more than 16 rows, several warps of a program decode the same elements.
OPERATIONS = {
    Read.SPLIT_BF16: ((16, 13.0), (FEW_ROWS, 50.0)),
    Read.HIGH: ((16, 12.0), (FEW_ROWS, 23.0)),
    # Conversions to floats included.
    Read.GROUPS: ((16, 4.0), (FEW_ROWS, 15.0)),
}
# Integer instructions for each element that is decoded to memory: of a matrix before a product with
# more rows, or of a block of KV.
DECODE_OPERATIONS = 15.0
# Default number of keys of a chunk that is scored (`settings.chunk_size`).
SCORED_KEYS = 8
# Bytes that a distribution and its acceptance rule read and write for each token of the vocabulary:
# about 70 for the distribution (scores, softmax, shortlist, mask and sums), 50 for the rule (the
# residual and its sums in float64).
DISTRIBUTION_BYTES = 120.0
# How often a norm reads or writes its row, a rotation its heads, and SwiGLU its row.
NORM_TOUCHES, ROTATE_TOUCHES, MLP_TOUCHES = 18, 12, 5
# Launches of a round of `levels.speculate` outside its forward: the rule, one wait, and the copies
# back to the device.
ROUND_LAUNCHES = 30
NORM_PARTS = ("input_norm", "qkv")


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Return the flops of the layers' matrix products and of causal attention, which covers half of
    the keys on average, or a window.
    """
    numbers = 0.0
    for spec in config.layers:
        shapes = spec.shapes(config.hidden).values()
        numbers += sum(prod(shape) for shape in shapes if len(shape) == 2)
        window = spec.mixer.window
        numbers += 2 * spec.mixer.queries * min(tokens / 2, window or tokens)
    return 2.0 * tokens * numbers


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a forward.

    config: config of one GPU's share (`model/share`)
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
        """The layer whose small kernels stand for those of all."""
        return self.config.layers[0]

    @property
    def launches(self) -> Launches:
        return FUSED if self.hardware.asynchronous else PLAIN

    def piece(self, nbytes: float, flops: float, launches: int, *, recorded: bool = False) -> float:
        """Return the seconds of one piece of work."""
        hardware = self.hardware
        work = max(nbytes / hardware.memory_bytes_per_second, flops / hardware.flops_per_second)
        return self._launched(work, launches, recorded)

    def before(self, tokens: int, *, recorded: bool = False) -> float:
        """Return the seconds of a layer before its attention."""
        mixer, matrices, launches = self._layer.mixer, self.matrices, self.launches
        rotated = mixer.queries + mixer.keys
        touched = NORM_TOUCHES * self.config.hidden + ROTATE_TOUCHES * rotated
        work = self._product(tokens, self._elements[0], matrices.qkv, matrices.layer_read)
        work += self._touch(tokens, touched, launches.small_before)
        layer = self._launched(work, launches.before, recorded)
        if mixer.norm_over_heads:
            # GPUs sum the squares of queries and of keys.
            layer += self._told(4 * 2 * (tokens + 1))
        return layer

    def after(self, tokens: int, *, recorded: bool = False) -> float:
        """Return the seconds of a layer after its attention, with its two sums over GPUs."""
        touched = (NORM_TOUCHES + 6) * self.config.hidden + MLP_TOUCHES * self._layer.mlp.width
        matrices, launches = self.matrices, self.launches
        work = self._product(tokens, self._elements[1], matrices.rest, matrices.layer_read)
        work += self._touch(tokens, touched, launches.small_after)
        layer = self._launched(work, launches.after, recorded)
        return layer + 2 * self.all_reduce(tokens)

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

    def attend_window(self, tokens: int, keys: int, *, recorded: bool = False) -> float:
        """Return the seconds of attention of `tokens` queries in a layer with a window.

        keys: number of keys of the context
        """
        mixer = self.config.windowed
        seen = min(keys, mixer.window - 1 + tokens)
        nbytes = seen * _token_bytes(mixer, self.dtype)
        flops = 4.0 * tokens * mixer.queries * seen
        return self._attended(nbytes, nbytes, flops, self.launches.attend, recorded=recorded)

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
        return self._launched(products + scores, launches, recorded)

    def decode_block(self, shape: KVShape) -> float:
        """Return the seconds of decoding a block of KV."""
        if not shape.split:
            return 0.0
        hardware = self.hardware
        decoding = shape.numbers * hardware.decode_seconds_per_number
        decoding += self._integers(shape.numbers * DECODE_OPERATIONS)
        # Two kernels: one for the numbers and one for their exceptions.
        piece = self.piece(shape.block_bytes + shape.dense_block_bytes, 0, 2)
        return max(decoding, piece) if hardware.asynchronous else decoding + piece

    def merge(self, tokens: int, parts: int) -> float:
        rows = tokens * self.config.attention.queries
        merged = self.piece(3.0 * parts * rows * self.dtype.itemsize, 0, self.launches.merge)
        return max(merged, self.small(self.launches.merge))

    def small(self, kernels: int, *, recorded: bool = False) -> float:
        """Return the seconds of kernels that compute almost nothing."""
        each = SMALL_KERNEL_SECONDS if self.hardware.asynchronous else 0.0
        return self._launched(kernels * each, kernels, recorded)

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
        work = self._product(tokens, matrix, self.matrices.head, self.matrices.head_read)
        return self._launched(work, 9, recorded) + distributions + self._ends(tokens)

    def _distribution_steps(self) -> float:
        """Return the seconds of the program for one row's distribution. The programs of other rows
        run in parallel.
        """
        if not self.hardware.asynchronous:
            return 0.0
        steps = LAW_PASSES * -(-self.config.vocab // LAW_STEP_NUMBERS) + LAW_SEARCH_STEPS
        return steps * LAW_STEP_SECONDS

    def resident_layer(
        self, tokens: int, keys: int, *, recorded: bool = True, rounded: bool = False
    ) -> float:
        """Return the seconds of a layer whose weights and KV are all on the device, the average of
        all layers if some have a window.
        """
        # A separate kernel merges the parts into which attention divides the keys.
        merged = self.small(1, recorded=recorded) if self.hardware.asynchronous else 0.0
        share = len(self.config.window_layers) / len(self.config.layers)
        attended = self.attend(tokens, keys, recorded=recorded, rounded=rounded)
        if share:
            attended *= 1 - share
            attended += share * self.attend_window(tokens, keys, recorded=recorded)
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
    def _elements(self) -> tuple[float, float]:
        """Elements of an average layer's tensors before its attention, and after it."""
        before = after = 0
        for spec in self.config.layers:
            for part, shape in spec.shapes(self.config.hidden).items():
                if part in NORM_PARTS:
                    before += prod(shape)
                else:
                    after += prod(shape)
        return before / len(self.config.layers), after / len(self.config.layers)

    def _touch(self, tokens: int, touched: int, kernels: int) -> float:
        """Return the seconds of small kernels that access `touched` elements of each token."""
        nbytes = tokens * touched * self.dtype.itemsize
        work = nbytes / self.hardware.memory_bytes_per_second
        return max(work, kernels * SMALL_KERNEL_SECONDS) if self.hardware.asynchronous else work

    def _integers(self, operations: float) -> float:
        """Return the seconds of integer operations, or 0 if their rate is unknown."""
        rate = self.hardware.integer_ops_per_second
        return operations / rate if rate else 0.0

    def _product(self, tokens: int, elements: float, nbytes: float, read: Read) -> float:
        """Return the seconds of a product of a matrix with `tokens` rows.

        elements, nbytes: size of the matrix
        """
        hardware, dense = self.hardware, elements * self.dtype.itemsize
        joins = read is Read.SPLIT_FP16 or (read is Read.SPLIT_BF16 and tokens > FEW_ROWS)
        if hardware.asynchronous and joins:
            decoding = (nbytes + dense) / hardware.memory_bytes_per_second
            if read is Read.SPLIT_BF16:
                decoding = max(decoding, self._integers(elements * DECODE_OPERATIONS))
            return decoding + self._product(tokens, elements, dense, Read.AS_STORED)
        if hardware.asynchronous and (counted := OPERATIONS.get(read)):
            each = next((most for rows, most in counted if tokens <= rows), counted[-1][1])
            decoding = self._integers(each * elements)
            return max(decoding, self._product(tokens, elements, nbytes, Read.AS_STORED))
        decoding = elements * hardware.decode_seconds_per_number if self.matrices.decoded else 0.0
        if hardware.product_seconds_per_byte:
            return decoding + dense * _between(hardware.product_seconds_per_byte, tokens)
        return decoding + max(
            nbytes / hardware.memory_bytes_per_second,
            2.0 * tokens * elements / hardware.flops_per_second,
        )

    def _launched(self, work: float, launches: int, recorded: bool) -> float:
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
    return 2 * mixer.keys * dtype.itemsize


def _between(measured: Sequence[tuple[int, float]], rows: int) -> float:
    """Interpolate measurements linearly; beyond the last one, extrapolate in proportion to rows."""
    for (low, before), (high, after) in pairwise(measured):
        if rows <= high:
            return before + (after - before) * (max(rows, low) - low) / (high - low)
    most, last = measured[-1]
    return last * rows / most
