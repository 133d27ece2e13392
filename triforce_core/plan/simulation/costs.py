"""What the forwards of one GPU cost in seconds, by the rates of its hardware.

A piece takes max(bytes / memory rate, flops / matrix rate), and launching its kernels: on a GPU the
host launches ahead, so an eager piece takes the longer of the two, and a recorded one adds the gap
between kernels; on a CPU what is launched is computed in between, so they add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import LayerSpec, Shapes
from triforce_core.model.tensors import MatrixBytes, dense_layouts, kv_shape
from triforce_kernels.limits import FEW_ROWS
from triforce_offload.kv.shape import KVShape
from triforce_offload.machine.profiles import Hardware
from triforce_offload.weights.formats import ElementType, Read


@dataclass(frozen=True)
class Launches:
    """Kernels that are launched, counted in the code.

    before, after: of a layer, up to its attention and from it on (`model`)
    attend, score: of each piece of keys, and besides if its chunks are scored; merge: of a layer
        when its keys have been seen (`attend`)
    distribution: from logits to distributions (`sampling`)
    small_before, small_after: of those before and after, such as compute next to nothing: all but
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
        """Kernels of a layer over one piece of keys."""
        return self.before + self.attend + self.merge + self.after


# PyTorch's operations, views among them: what computes on a CPU.
PLAIN = Launches(before=21, attend=12, score=8, merge=12, after=15, distribution=20)
# Triton's kernels: norm, product, rotation; one for blocks, one for the tail and one for scores;
# a copy that puts heads side by side, product, norm with residual, product, SwiGLU, product, sum.
FUSED = Launches(
    before=3, attend=1, score=0, merge=2, after=7, distribution=1, small_before=2, small_after=4
)
# On a GPU a kernel that computes next to nothing takes so long from beginning to end: 2.9 us, in
# "Getting Started with CUDA Graphs" (NVIDIA technical blog).
SMALL_KERNEL_SECONDS = 2.9e-6
# The distribution of a row is one program on a GPU, which goes through its vocabulary in steps of
# so many numbers: four times, and top-p through a short list once for each of 32 bits, and twice
# (`distribution_triton`). A step is what waits for the one before: a read of the L2 cache, about
# 270 cycles (Luo et al., arXiv 2402.13499), 8 numbers a thread, and a sum over 16 warps. Assumed,
# about 2,500 cycles.
LAW_STEP_NUMBERS, LAW_PASSES, LAW_SEARCH_STEPS, LAW_STEP_SECONDS = 4096, 4, 34, 1e-6
# Instructions of the pipe for whole numbers for each number of a matrix, by the rows it is
# multiplied with, at most: counted in the loops that Triton 3.9 compiles for compute capabilities
# 8.0 and 8.9. With more than 16 rows several warps of a program decode the same numbers.
OPERATIONS = {
    Read.SPLIT_BF16: ((16, 13.0), (FEW_ROWS, 50.0)),
    Read.HIGH: ((16, 12.0), (FEW_ROWS, 23.0)),
    # Conversions to floats included.
    Read.GROUPS: ((16, 4.0), (FEW_ROWS, 15.0)),
}
# The same of what is decoded to memory: of a matrix, before it is multiplied with more rows, and of
# a block of KV.
DECODE_OPERATIONS = 15.0
# Keys of a chunk that is scored, as a rule (`settings.chunk_size`).
SCORED_KEYS = 8
# A distribution and its rule read and write so many bytes for each token of the vocabulary: about
# 70 the distribution (its scores, softmax, shortlist, mask and sums), 50 the rule (the residual,
# and sums of it in float64).
DISTRIBUTION_BYTES = 120.0
# A norm reads or writes its token so often, a rotation its heads, silu and product their row.
NORM_TOUCHES, ROTATE_TOUCHES, MLP_TOUCHES = 18, 12, 5
# A round of `levels.speculate` launches so many kernels outside its forward: the rule, one wait,
# what is put back.
ROUND_LAUNCHES = 30
NORM_PARTS = ("input_norm", "qkv")


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """What the matrix products of the layers take, and causal attention, which sees half on
    average.
    """
    numbers = 0.0
    for spec in config.layers:
        shapes = spec.shapes(config.hidden).values()
        numbers += sum(prod(shape) for shape in shapes if len(shape) == 2)
        numbers += 2 * spec.mixer.queries * (tokens / 2)
    return 2.0 * tokens * numbers


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a forward. config: of one GPU's share (`model/share`).

    stored: bytes of its matrices as they lie in memory, dense in `dtype` if None
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
        """The layer that is counted: all layers of a model that is planned for are alike."""
        return self.config.layers[0]

    @property
    def launches(self) -> Launches:
        return FUSED if self.hardware.asynchronous else PLAIN

    def piece(self, nbytes: float, flops: float, launches: int, *, recorded: bool = False) -> float:
        """Seconds of one piece of compute."""
        hardware = self.hardware
        work = max(nbytes / hardware.memory_bytes_per_second, flops / hardware.flops_per_second)
        return self._launched(work, launches, recorded)

    def before(self, tokens: int, *, recorded: bool = False) -> float:
        """A layer up to its attention."""
        mixer, matrices, launches = self._layer.mixer, self.matrices, self.launches
        rotated = mixer.queries + mixer.keys
        touched = NORM_TOUCHES * self.config.hidden + ROTATE_TOUCHES * rotated
        elements = self._elements(*NORM_PARTS)
        work = self._product(tokens, elements, matrices.qkv, matrices.layer_read)
        work += self._touch(tokens, touched, launches.small_before)
        return self._launched(work, launches.before, recorded)

    def after(self, tokens: int, *, recorded: bool = False) -> float:
        """A layer from its attention on, with the sums over GPUs that it and attention end in."""
        parts = [part for part in self._shapes if part not in NORM_PARTS]
        touched = (NORM_TOUCHES + 6) * self.config.hidden + MLP_TOUCHES * self._layer.mlp.width
        matrices, launches = self.matrices, self.launches
        work = self._product(tokens, self._elements(*parts), matrices.rest, matrices.layer_read)
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
        """Attention of `tokens` queries to one piece of keys. scored: chunks get their mass.

        rounded: keys and values are in 8 bits, which on a CPU are made `dtype` first
        """
        mixer, hardware = self._layer.mixer, self.hardware
        shape = kv_shape(self.config, 1, self.dtype)
        flops = 4.0 * tokens * mixer.queries * keys
        if rounded and hardware.asynchronous:
            # One kernel multiplies what comes of it by a scale.
            nbytes = keys * shape.token_bytes / shape.dtype.itemsize
            scaling = self.small(1, recorded=recorded)
            return scaling + self.piece(nbytes, flops, self.launches.attend, recorded=recorded)
        nbytes = keys * shape.token_bytes
        if scored and hardware.asynchronous:
            # A score of each chunk for every row, in float32: written, and read when all are known.
            nbytes += 2 * 4 * tokens * mixer.heads * keys / SCORED_KEYS
        elif scored:
            # Scores of every row in float32: written, turned to weights, read and averaged.
            nbytes += 4 * 4 * tokens * mixer.heads * keys
        launches = self.launches.attend + (self.launches.score if scored else 0)
        if not hardware.attend_bytes_per_second:
            return self.piece(nbytes, flops, launches, recorded=recorded)
        products = max(
            keys * shape.token_bytes / hardware.attend_bytes_per_second,
            flops / (hardware.attend_flops_per_second or hardware.flops_per_second),
        )
        scores = (nbytes - keys * shape.token_bytes) / hardware.memory_bytes_per_second
        return self._launched(products + scores, launches, recorded)

    def decode_block(self, shape: KVShape) -> float:
        """What a block of KV takes to become the numbers that are attended to."""
        if not shape.split:
            return 0.0
        hardware = self.hardware
        decoding = shape.numbers * hardware.decode_seconds_per_number
        decoding += self._integers(shape.numbers * DECODE_OPERATIONS)
        # The numbers, and their exceptions.
        piece = self.piece(shape.block_bytes + shape.dense_block_bytes, 0, 2)
        return max(decoding, piece) if hardware.asynchronous else decoding + piece

    def merge(self, tokens: int, parts: int) -> float:
        rows = tokens * self._layer.mixer.queries
        merged = self.piece(3.0 * parts * rows * self.dtype.itemsize, 0, self.launches.merge)
        return max(merged, self.small(self.launches.merge))

    def small(self, kernels: int, *, recorded: bool = False) -> float:
        """So many kernels that compute next to nothing."""
        each = SMALL_KERNEL_SECONDS if self.hardware.asynchronous else 0.0
        return self._launched(kernels * each, kernels, recorded)

    def head(self, tokens: int, *, recorded: bool = False) -> float:
        """Final norm, output matrix and distributions."""
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
        """Seconds of the program that makes a row's distribution; those of other rows run beside
        it.
        """
        if not self.hardware.asynchronous:
            return 0.0
        steps = LAW_PASSES * -(-self.config.vocab // LAW_STEP_NUMBERS) + LAW_SEARCH_STEPS
        return steps * LAW_STEP_SECONDS

    def resident_layer(
        self, tokens: int, keys: int, *, recorded: bool = True, rounded: bool = False
    ) -> float:
        """A layer of a forward over weights and KV that are all on the device."""
        # The parts into which attention divides the keys are merged by a kernel of its own.
        merged = self.small(1, recorded=recorded) if self.hardware.asynchronous else 0.0
        return (
            self.before(tokens, recorded=recorded)
            + self.attend(tokens, keys, recorded=recorded, rounded=rounded)
            + merged
            + self.after(tokens, recorded=recorded)
        )

    def resident_forward(self, tokens: int, keys: int, *, recorded: bool = True) -> float:
        """A forward over weights and KV that are all on the device, distributions included."""
        layers = len(self.config.layers) * self.resident_layer(tokens, keys, recorded=recorded)
        return layers + self.head(tokens, recorded=recorded)

    @property
    def round(self) -> float:
        """Seconds of a round of proposing and verifying, besides its forward."""
        return ROUND_LAUNCHES * self.hardware.launch_seconds

    @cached_property
    def _shapes(self) -> Shapes:
        return self._layer.shapes(self.config.hidden)

    def _elements(self, *parts: str) -> int:
        return sum(prod(self._shapes[part]) for part in parts)

    def _touch(self, tokens: int, touched: int, kernels: int) -> float:
        """Seconds of what is done to each token besides: `touched` elements, by small kernels."""
        nbytes = tokens * touched * self.dtype.itemsize
        work = nbytes / self.hardware.memory_bytes_per_second
        return max(work, kernels * SMALL_KERNEL_SECONDS) if self.hardware.asynchronous else work

    def _integers(self, operations: float) -> float:
        """Seconds of operations on whole numbers, where their rate is known."""
        rate = self.hardware.integer_ops_per_second
        return operations / rate if rate else 0.0

    def _product(self, tokens: int, elements: int, nbytes: float, read: Read) -> float:
        """Seconds of a product of a matrix of so many elements and bytes with `tokens` rows."""
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
        """A sum over GPUs of [tokens, hidden]."""
        return self._told(tokens * self.config.hidden * self.dtype.itemsize)

    def _ends(self, tokens: int) -> float:
        """A sum of what each GPU has of the input embedding; gathering logits on the first GPU."""
        others = self.hardware.gpus - 1
        return self.all_reduce(tokens) + self._told(4 * tokens * self.config.vocab_rows * others)

    def _told(self, nbytes: float) -> float:
        """Seconds in which GPUs tell each other so much. Where the rate was not measured: through
        host memory, there and back, at half the link's.
        """
        hardware = self.hardware
        if hardware.gpus == 1:
            return 0.0
        rate = hardware.all_reduce_bytes_per_second or hardware.link_bytes_per_second / 2
        return hardware.all_reduce_seconds + nbytes / rate


def _between(measured: Sequence[tuple[int, float]], rows: int) -> float:
    """Linear between what was measured, and in proportion beyond it."""
    for (low, before), (high, after) in pairwise(measured):
        if rows <= high:
            return before + (after - before) * (max(rows, low) - low) / (high - low)
    most, last = measured[-1]
    return last * rows / most
