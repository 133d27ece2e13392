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

from offload.formats import ElementType
from offload.kv.shape import KVShape
from offload.machine.profiles import Hardware
from triforce_core.model.config import ModelConfig
from triforce_core.model.tensors import MatrixBytes, dense_layouts, kv_shape, layer_shapes


@dataclass(frozen=True)
class Launches:
    """Kernels that are launched, counted in the code.

    before, after: of a layer, up to its attention and from it on (`model`)
    attend, score: of each piece of keys, and besides if its chunks are scored; merge: of a layer
        when its keys have been seen (`attend`)
    law: from logits to laws (`sampling`)
    """

    before: int
    attend: int
    score: int
    merge: int
    after: int
    law: int

    @property
    def layer(self) -> int:
        """Kernels of a layer over one piece of keys."""
        return self.before + self.attend + self.merge + self.after


# PyTorch's operations, views among them: what computes on a CPU.
PLAIN = Launches(before=21, attend=12, score=8, merge=12, after=15, law=20)
# Triton's kernels: norm, product, rotation; one for blocks, one for the tail and one for scores;
# product, norm with residual, product, SwiGLU, product and sum.
FUSED = Launches(before=3, attend=1, score=0, merge=2, after=6, law=1)
# A law and its rule read and write so many bytes for each token of the vocabulary: about 70 the law
# (its scores, softmax, shortlist, mask and sums), 50 the rule (the residual, and sums of it in
# float64).
LAW_BYTES = 120.0
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
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matrices = config.hidden * (2 * queries + 2 * keys + 3 * config.mlp)
    attention = 2 * queries * (tokens / 2)
    return 2.0 * tokens * config.layers * (matrices + attention)


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
    def launches(self) -> Launches:
        return FUSED if self.hardware.asynchronous else PLAIN

    def piece(self, nbytes: float, flops: float, launches: int, *, recorded: bool = False) -> float:
        """Seconds of one piece of compute."""
        hardware = self.hardware
        work = max(nbytes / hardware.memory_bytes_per_second, flops / hardware.flops_per_second)
        return self._launched(work, launches, recorded)

    def before(self, tokens: int, *, recorded: bool = False) -> float:
        """A layer up to its attention."""
        config = self.config
        heads = (config.heads + config.kv_heads) * config.head_dim
        touched = NORM_TOUCHES * config.hidden + ROTATE_TOUCHES * heads
        work = self._product(tokens, self._elements(*NORM_PARTS), self.matrices.qkv)
        return self._launched(work + self._touch(tokens, touched), self.launches.before, recorded)

    def after(self, tokens: int, *, recorded: bool = False) -> float:
        """A layer from its attention on, with the sums over GPUs that it and attention end in."""
        parts = [part for part in layer_shapes(self.config) if part not in NORM_PARTS]
        touched = (NORM_TOUCHES + 6) * self.config.hidden + MLP_TOUCHES * self.config.mlp
        work = self._product(tokens, self._elements(*parts), self.matrices.rest)
        layer = self._launched(work + self._touch(tokens, touched), self.launches.after, recorded)
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
        config = self.config
        shape = kv_shape(config, 1, self.dtype)
        hardware = self.hardware
        flops = 4.0 * tokens * config.heads * config.head_dim * keys
        if rounded and hardware.asynchronous:
            # One kernel multiplies what comes of it by a scale.
            nbytes = keys * shape.token_bytes / shape.dtype.itemsize
            return self.piece(nbytes, flops, self.launches.attend + 1, recorded=recorded)
        nbytes = keys * shape.token_bytes
        if scored and not hardware.asynchronous:
            # Scores of every row in float32: written, turned to weights, read and averaged.
            nbytes += 4 * 4 * tokens * config.heads * keys
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
        if not shape.in_planes:
            return 0.0
        decoding = shape.numbers * self.hardware.decode_seconds_per_number
        # The numbers, and their exceptions.
        return decoding + self.piece(shape.block_bytes + shape.dense_block_bytes, 0, 2)

    def merge(self, tokens: int, parts: int) -> float:
        rows = tokens * self.config.heads * self.config.head_dim
        return self.piece(3.0 * parts * rows * self.dtype.itemsize, 0, self.launches.merge)

    def head(self, tokens: int, *, recorded: bool = False) -> float:
        """Final norm, output matrix and laws."""
        config = self.config
        matrix = config.vocab_rows * config.hidden
        laws = self.piece(
            LAW_BYTES * tokens * config.vocab, 0, self.launches.law, recorded=recorded
        )
        work = self._product(tokens, matrix, self.matrices.head)
        return self._launched(work, 9, recorded) + laws + self._ends(tokens)

    def resident_layer(
        self, tokens: int, keys: int, *, recorded: bool = True, rounded: bool = False
    ) -> float:
        """A layer of a forward over weights and KV that are all on the device."""
        return (
            self.before(tokens, recorded=recorded)
            + self.attend(tokens, keys, recorded=recorded, rounded=rounded)
            + self.after(tokens, recorded=recorded)
        )

    def resident_forward(self, tokens: int, keys: int, *, recorded: bool = True) -> float:
        """A forward over weights and KV that are all on the device, laws included."""
        layers = self.config.layers * self.resident_layer(tokens, keys, recorded=recorded)
        return layers + self.head(tokens, recorded=recorded)

    @property
    def round(self) -> float:
        """Seconds of a round of proposing and verifying, besides its forward."""
        return ROUND_LAUNCHES * self.hardware.launch_seconds

    def _elements(self, *parts: str) -> int:
        shapes = layer_shapes(self.config)
        return sum(prod(shapes[part]) for part in parts)

    def _touch(self, tokens: int, touched: int) -> float:
        """Seconds of what is done to each token besides: `touched` elements."""
        nbytes = tokens * touched * self.dtype.itemsize
        return nbytes / self.hardware.memory_bytes_per_second

    def _product(self, tokens: int, elements: int, nbytes: float) -> float:
        """Seconds of a product of a matrix of so many elements and bytes with `tokens` rows."""
        hardware = self.hardware
        decoding = elements * hardware.decode_seconds_per_number if self.matrices.decoded else 0.0
        if hardware.product_seconds_per_byte:
            dense = elements * self.dtype.itemsize
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
