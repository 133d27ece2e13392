"""Numbers of kernel launches and of what kernels read and compute, counted in the code."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import EXPERT_PARTS
from triforce_core.model.layers import Attention, LatentAttention, LayerSpec, Mixer
from triforce_core.model.parts.recurrent import LinearAttention
from triforce_core.model.parts.specs import Indexer
from triforce_kernels.limits import FEW_ROWS
from triforce_offload.kv.states.shape import FOLD_TOKENS
from triforce_offload.weights.formats import Read


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
# instructions). Up to 16 rows, and for HIGH and GROUPS up to 32: the seconds of products on an H200
# (benchmarks/results/gpu_h200_products.json) times its integer rate. Otherwise as many times more
# as the loops have that Triton 3.6 compiles for compute capability 8.9: with 33 to 64 rows an H200
# uses instructions that other GPUs lack.
OPERATIONS = {
    Read.SPLIT_BF16: ((16, 21.0), (32, 23.0), (FEW_ROWS, 46.0)),
    Read.HIGH: ((16, 14.5), (32, 16.0), (FEW_ROWS, 29.0)),
    # Conversions to floats included.
    Read.GROUPS: ((16, 12.5), (32, 17.0), (FEW_ROWS, 36.0)),
    # As many times more as loops of Triton 3.6 have, none measured; with 64 rows they have fewer.
    Read.SMALL_GROUPS: ((16, 17.5), (32, 22.0), (FEW_ROWS, 36.0)),
    # Of Q4_K, which takes longest for its bytes.
    Read.BLOCKS: ((16, 15.5), (32, 18.0), (FEW_ROWS, 24.0)),
    # As many times more as loops of IQ2 and IQ3 have on average, none measured.
    Read.TABLES: ((16, 56.0), (32, 63.0), (FEW_ROWS, 75.0)),
}
# Integer instructions for each element that is decoded to memory: of a matrix before a product with
# more rows, or of a block of KV. Assumed for blocks that are joined.
DECODE_OPERATIONS = 15.0
# Likewise, of matrices that a product with more than FEW_ROWS rows decodes first. Those of tables
# as in a product with few rows.
DECODED_FIRST = {
    Read.SPLIT_BF16: DECODE_OPERATIONS,
    Read.BLOCKS: DECODE_OPERATIONS,
    Read.TABLES: 56.0,
}
# Default number of keys of a chunk that is scored (`settings.chunk_size`).
SCORED_KEYS = 8
# Bytes that a distribution and its acceptance rule read and write for each token of the vocabulary:
# about 70 for the distribution (scores, softmax, shortlist, mask and sums), 50 for the rule (the
# residual and its sums in float64).
DISTRIBUTION_BYTES = 120.0
# Launches of a drafter of blocks (`heads.dflash`): of convolutions in a layer; of the states of new
# tokens, and of their keys and values in a layer; and from what a block predicts to the logits of
# one of its positions.
CONVOLUTION_LAUNCHES, POSITION_LAUNCHES = 16, 7
STATES_LAUNCHES, KEYS_LAUNCHES = 15, 5
# Launches of an assistant (`heads.assistant`) with the usual two kinds of layers: of a step beside
# those of a model's layers and of its output matrix; in each of its layers, beside those of a
# model; and of copying what a pass showed of new tokens.
ASSISTANT_LAUNCHES, ASSISTANT_LAYER_LAUNCHES, COPY_LAUNCHES = 18, 8, 37
# Launches from the last layer to logits, with those of the embedding.
HEAD_LAUNCHES = 9
# How often a norm reads or writes its row, a rotation its heads, and SwiGLU its row.
NORM_TOUCHES, ROTATE_TOUCHES, MLP_TOUCHES = 18, 12, 5
# Launches of a round of `levels.speculate` outside its forward: the rule, one wait, and the copies
# back to the device.
ROUND_LAUNCHES = 30
# Launches of a convolution, and of one with a recurrence, in PyTorch and in Triton: there,
# a kernel for the convolution, one for gates, one for 16 rows of the rule and one for its norm, and
# sums of decays; around a convolution alone, two products.
CONVOLVE_LAUNCHES, RECUR_LAUNCHES = (12, 3), (75, 5)
# Launches around the products with experts, in PyTorch for each expert that is chosen, and in
# Triton: a copy of the rows in float32, their product with the router, three kernels that choose
# experts, divide rows into tiles and sum, and the activation (`experts.grouped`). Then those of
# many rows that are sorted instead.
EXPERT_LAUNCHES = (11, 6, 42)
# Further launches of latent attention, in PyTorch, views included, and in Triton: copies and norms
# of parts of what is projected, two products by heads, one of queries, and what puts vectors
# together (`model/mixers.LatentMixer`, `experts/heads`).
LATENT_LAUNCHES = (65, 17)
# Further launches of residual streams before attention and after it, in PyTorch and in Triton: two
# products around SiLU, a gated mean, and the product that weighs what is added (`kernels/streams`);
# and what adds the mixer's output, which norms of other models add.
STREAM_LAUNCHES = ((20, 26), (5, 6))
# Operations of attention to chosen keys in a layer that decodes, about 80 on average over lengths
# (`attention/selection`), and how often these touch the score of a block, sorting included.
SELECTION_LAUNCHES, SCORE_TOUCHES = 80, 16
NORM_PARTS = ("input_norm", "qkv")


def further_launches(spec: LayerSpec, *, on_gpu: bool) -> tuple[int, int]:
    """Return the launches beyond `Launches` of a layer, before its attention and after it."""
    latent = LATENT_LAUNCHES[on_gpu] if isinstance(spec.mixer, LatentAttention) else 0
    before, after = STREAM_LAUNCHES[on_gpu] if spec.streams else (0, 0)
    return latent + before, after


def selection_work(
    mixer: Attention, index: Indexer, tokens: int, keys: int, itemsize: int
) -> tuple[float, float]:
    """Return the bytes and flops of the attention of `tokens` rows to the keys that they choose: of
    the vectors of all blocks, their scores, and the chosen keys and values, copied for each row.
    """
    blocks, chosen = keys // index.block, min(keys, index.all_seen)
    vectors = blocks * index.dim * (itemsize + 2 * 4)
    scores = 4 * tokens * blocks * (SCORE_TOUCHES + index.heads)
    nbytes = vectors + scores + 3 * tokens * chosen * mixer.kept * itemsize
    flops = 2.0 * tokens * (index.heads * index.dim * blocks + 2 * mixer.queries * chosen)
    return nbytes, flops


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Return the flops of the layers' matrix products and of causal attention, which covers half of
    the keys on average, or a window.
    """
    numbers = 0.0
    for spec in config.layers:
        for part, shape in spec.products(config.hidden).items():
            numbers += prod(shape) * (spec.mlp.active if part in EXPERT_PARTS else 1)
    return 2.0 * tokens * numbers + mixing_flops(config, tokens)


def mixing_flops(config: ModelConfig, tokens: int) -> float:
    """Return the flops of `prefill_flops` between the projections."""
    return 2.0 * tokens * sum(_mixed_numbers(spec.mixer, tokens) for spec in config.layers)


def _mixed_numbers(mixer: Mixer, tokens: int) -> float:
    """Return the multiplications of a mixer between its projections, for each token of a prompt."""
    match mixer:
        case Attention():
            return 2 * mixer.queries * min(tokens / 2, mixer.window or tokens)
        case LinearAttention():
            # By key, by query and in the fold with the state; the same with the rows of a chunk.
            states = 3 * mixer.key_dim * mixer.value_dim
            rows = 2 * FOLD_TOKENS * (mixer.key_dim + mixer.value_dim)
            return mixer.value_heads * (states + rows) + mixer.channels * mixer.taps
        case _:
            return mixer.channels * mixer.taps
