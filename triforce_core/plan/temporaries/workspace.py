"""Upper bounds of the temporaries of a forward on the device, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import Attention, LatentAttention, Mixer, Recurrent
from triforce_core.model.parts.recurrent import LinearAttention, Mamba2
from triforce_core.plan.levels import DISTRIBUTION_ROWS
from triforce_core.plan.temporaries.mlp_bytes import mlp_bytes
from triforce_core.plan.temporaries.parts_bytes import (
    capped_bytes,
    carried_bytes,
    chosen_in_pass_bytes,
    chosen_in_prompt_bytes,
    looked_up_bytes,
    streams_bytes,
)
from triforce_kernels.counts import cdiv
from triforce_kernels.limits import (
    CAPPED_ROWS,
    DELTA_ROWS,
    EXPERT_TILE,
    FEW_ROWS,
    HOST_PARTS,
    WINDOW_ROWS,
)
from triforce_offload.kv.sizes import SCORED_TOKENS
from triforce_offload.kv.states.shape import FOLD_TOKENS, MOST_HELD
from triforce_offload.kv.windows.shape import held_tokens, window_capacity

# Temporaries of a distribution: scores, sorted values and order, softmax, cumulative sum and masks.
# See `sampling.distribution`.
_BYTES_PER_TOKEN_OF_VOCABULARY = 40
# A matrix library's workspace, which all recordings share, and the allocator's rounding.
GRAPH_LIBRARY_BYTES = 64 << 20


def prompt_bytes(
    config: ModelConfig,
    tokens: int,
    chunk: int,
    itemsize: int,
    *,
    by_host: bool = False,
    tile: int = 0,
) -> int:
    """Return the bytes of a prompt's hidden states, one layer's KV and one chunk's temporaries.

    by_host: whether a processor's compiled kernels compute
    tile: most rows of a tile in which a GPU's kernels multiply many rows by experts; 0 without
    """
    chunk = min(chunk, tokens)
    keys, sizes = config.attention.kept, [head_dim for _, head_dim in config.rotations]
    # Cosines and sines, of each kind.
    whole = tokens * (config.width + keys + 2 * sum(sizes)) * itemsize
    whole += carried_bytes(config, tokens, itemsize)
    if by_host:
        # Tokens and positions; elsewhere a layer's temporaries have room for them.
        whole += tokens * 8 * 2
    # Angles and their cosines and sines, in float32.
    rope = tokens * max(sizes) * 4 * 4
    mixed = partial(
        _mixer_prefill_bytes, rows=chunk, itemsize=itemsize, text_tokens=tokens, by_host=by_host
    )
    return whole + max(rope, _layers_bytes(config, chunk, itemsize, mixed, by_host, tile))


def forward_bytes(
    config: ModelConfig,
    tokens: int,
    itemsize: int,
    text_tokens: int,
    *,
    by_host: bool = False,
    tile: int = 0,
) -> int:
    """Return the bytes of temporaries of a forward over `tokens` tokens after the prefill: the
    maximum of mixer and MLP, without what attention keeps between blocks.

    text_tokens: number of tokens of the longest sequence
    by_host, tile: see `prompt_bytes`
    """
    mixed = partial(
        _mixer_pass_bytes,
        tokens=tokens,
        itemsize=itemsize,
        text_tokens=text_tokens,
        by_host=by_host,
    )
    carried = carried_bytes(config, tokens, itemsize) + looked_up_bytes(config, tokens, itemsize)
    return carried + _layers_bytes(config, tokens, itemsize, mixed, by_host, tile)


def _layers_bytes(
    config: ModelConfig,
    tokens: int,
    itemsize: int,
    mixed: Callable[[Mixer], int],
    by_host: bool,
    tile: int,
) -> int:
    """Return the bytes of the largest layer: the maximum of its mixer and its MLP.

    mixed: returns the bytes of a mixer's operation between its projections
    """
    hidden, largest = config.hidden, streams_bytes(config, tokens, itemsize)
    for spec in config.distinct_layers:
        if isinstance(spec.mixer, LatentAttention):
            mixer = _latent_bytes(spec.mixer, hidden, tokens, itemsize, by_host)
        elif isinstance(spec.mixer, Attention):
            mixer = _attention_bytes(spec.mixer, hidden, tokens, itemsize, by_host)
        else:
            mixer = _recurrent_bytes(spec.mixer, hidden, tokens, itemsize, by_host)
        mixer += mixed(spec.mixer)
        mlp = mlp_bytes(spec.mlp, hidden, tokens, itemsize, by_host, tile)
        largest = max(largest, mixer, mlp)
    return largest


def _attention_bytes(
    mixer: Attention, hidden: int, tokens: int, itemsize: int, by_host: bool
) -> int:
    """Return the bytes of attention without the operation between its projections: compiled kernels
    rotate without temporaries.
    """
    queries, keys = mixer.queries, mixer.keys
    temporaries = 3 if by_host else 7
    nbytes = tokens * (hidden + queries + 2 * keys + queries * temporaries) * itemsize
    # Copies of the heads are freed before rows are rotated.
    if not by_host and (not mixer.projects_values or mixer.output_gate):
        nbytes += tokens * (queries + keys) * itemsize
    if mixer.head_gate:
        nbytes += tokens * (queries + 2 * keys) * itemsize
    if mixer.output_gate:
        nbytes += tokens * 2 * queries * itemsize
    return nbytes


def _latent_bytes(
    mixer: LatentAttention, hidden: int, tokens: int, itemsize: int, by_host: bool
) -> int:
    """Return the bytes of latent attention without the operation between its projections: the first
    projection, and either what becomes of it until there are queries, or these while they are
    rotated, by compiled kernels without temporaries; and products of few rows by tiles, which have
    places without rows; those of more rows take less than what is counted beside.
    """
    queries, projected = mixer.queries, mixer.shapes(hidden)["qkv"][0]
    inner = mixer.heads * (mixer.key_dim + mixer.rope_dim) + 2 * mixer.query_rank
    rotated = (2 if by_host else 5) * queries
    each = hidden + projected + max(inner + 2 * queries, rotated) + 2 * mixer.head_dim
    nbytes = tokens * each * itemsize
    if tokens <= FEW_ROWS:
        places = mixer.heads * cdiv(tokens, EXPERT_TILE) * EXPERT_TILE
        nbytes += places * (max(mixer.latent, mixer.value_dim) * itemsize + 3 * 8)
    return nbytes


def _recurrent_bytes(
    mixer: Recurrent, hidden: int, tokens: int, itemsize: int, by_host: bool
) -> int:
    """Return the bytes of a recurrent mixer without the operation between its projections: these,
    the inputs of the convolution, those of the tokens before, and its results.
    """
    projected, mixed = mixer.shapes(hidden)["qkv"][0], mixer.shapes(hidden)["o"][1]
    channels = (2 if by_host else 3) * mixer.channels
    nbytes = tokens * (2 * hidden + projected + channels + 2 * mixed) * itemsize
    if isinstance(mixer, Mamba2) and itemsize < 4:
        # Results of the convolution in float32, outputs, and what gates them.
        nbytes += tokens * (mixer.channels + 2 * mixer.values) * 4
    return nbytes + 2 * (MOST_HELD + mixer.taps) * mixer.channels * itemsize


def _mixer_prefill_bytes(
    mixer: Mixer, rows: int, itemsize: int, text_tokens: int, by_host: bool
) -> int:
    """Return the bytes of the operation of a mixer over `rows` rows of a prefill.

    Recurrent: the sum of the convolution, or what the recurrence computes at once, in
    float32. Without a window: two parts that are merged in float32. With one: keys and values of
    the rows and of the tokens before them, and a copy of the last of these; those that some rows
    see at once, for each query head; and the mask of these. Compiled kernels take neither mask nor
    parts.
    """
    if not isinstance(mixer, Attention):
        at_once = min(rows, DELTA_ROWS)
        delta = _delta_bytes(mixer, at_once, FOLD_TOKENS, by_host)
        return max(rows * mixer.channels * 4 * 2, delta)
    attended = _wide_bytes(mixer, rows, itemsize) if by_host else _merged_bytes(mixer, rows)
    attended += capped_bytes(mixer, min(rows, CAPPED_ROWS), text_tokens)
    attended += chosen_in_prompt_bytes(mixer, rows, itemsize, text_tokens)
    if not mixer.window:
        return attended
    past = held_tokens(mixer.window, text_tokens)
    at_once = min(rows, max(mixer.window, WINDOW_ROWS))
    seen = past + at_once
    own = mixer.kept * (2 * past + rows) * itemsize
    if by_host:
        return own + attended
    return own + 2 * mixer.queries * seen * itemsize + _mask_bytes(at_once, seen, itemsize)


def _mixer_pass_bytes(
    mixer: Mixer, tokens: int, itemsize: int, text_tokens: int, by_host: bool
) -> int:
    """Return the bytes of the operation of a mixer over `tokens` tokens after the prefill.

    Recurrent: the inputs that each row of a tree sees, or what the recurrence computes; rows
    see all that are not folded yet, and those that were drafted before. Attention: parts that are
    merged, and in a layer with a window a mask. It has a row for each query head of a KV head, and
    may cover all keys that the layer has room for.
    """
    if not isinstance(mixer, Attention):
        seen = MOST_HELD + 2 * tokens
        convolution = tokens * mixer.channels * (mixer.taps * (itemsize + 4) + 4)
        return max(convolution, _delta_bytes(mixer, tokens, seen, by_host))
    merged = _merged_bytes(mixer, tokens) + capped_bytes(mixer, tokens, text_tokens)
    merged += chosen_in_pass_bytes(mixer, tokens, itemsize, text_tokens)
    if not mixer.window or by_host:
        return merged
    keys = window_capacity(mixer.window, text_tokens, tokens)
    return merged + _mask_bytes(tokens * mixer.heads // mixer.kv_heads, keys, itemsize)


def _delta_bytes(mixer: Recurrent, rows: int, seen: int, by_host: bool) -> int:
    """Return the bytes of what the recurrence computes for `rows` rows, in float32: heads as
    they are normed, for each value head, read by the state and as updates; and products with the
    `seen` rows that each row sees, by key and by query. Compiled kernels take none of these
    products.
    """
    if not isinstance(mixer, LinearAttention):
        return 0
    wide, heads = mixer.key_heads * mixer.key_dim, mixer.value_heads
    if by_host:
        return (rows * (2 * wide + 5 * heads * mixer.value_dim + 4 * heads)) * 4
    each = 6 * wide + heads * (4 * mixer.key_dim + 6 * mixer.value_dim + 7 * seen)
    return (rows * each + 2 * heads * mixer.key_dim * mixer.value_dim) * 4


def _merged_bytes(mixer: Attention, tokens: int) -> int:
    return tokens * mixer.queries * 4 * 2


def _wide_bytes(mixer: Attention, tokens: int, itemsize: int) -> int:
    """Return the bytes of half-precision queries and of their results in float32."""
    return tokens * mixer.queries * 4 * 2 if itemsize < 4 else 0


def _mask_bytes(rows: int, keys: int, itemsize: int) -> int:
    """Return the bytes of a mask as bool, in the dtype, without -inf, and with padded rows."""
    return rows * keys * (1 + 3 * itemsize)


def running_bytes(config: ModelConfig, tokens: int, splits: int) -> int:
    """Return the bytes that attention keeps between blocks, in float32, and the temporaries for
    adding a block.
    """
    mixers = (spec.mixer for spec in config.distinct_layers)
    widest = max(m.heads * (m.head_dim + 4) for m in mixers if isinstance(m, Attention))
    return tokens * widest * 4 * (splits + 2)


def score_bytes(config: ModelConfig, tokens: int, chunks: int) -> int:
    """Return the bytes of one layer's chunk scores for each query, in float32, three times: as
    attention writes them, as shares, and as averages.
    """
    return tokens * config.attention.heads * chunks * 4 * 3


def refresh_bytes(config: ModelConfig, chunks: int) -> int:
    """Return the bytes for choosing the chunks of all layers: scores, their order and masks."""
    return len(config.kv_layers) * config.attention.kv_heads * chunks * (4 * 2 + 8 * 2 + 4)


def distribution_bytes(config: ModelConfig, rows: int) -> int:
    """Return the bytes of the logits and distributions of `rows` positions, the distributions of
    their drafts, and the temporaries of computing a few distributions at a time and of acceptance.
    """
    at_once = min(rows, DISTRIBUTION_ROWS)
    whole = rows * (config.vocab * 4 * (2 if rows == 1 else 5) + config.hidden * 4 * 2)
    if config.vocab_rows < config.vocab:
        # Each rank's part, as received and side by side.
        whole += rows * (config.vocab + 2 * config.vocab_rows) * 4
    return whole + at_once * config.vocab * _BYTES_PER_TOKEN_OF_VOCABULARY


def graph_bytes(
    config: ModelConfig, tokens: int, itemsize: int, splits: int, text_tokens: int
) -> int:
    """Return the bytes that recorded forwards of up to `tokens` tokens keep: the temporaries of the
    largest, which the others share, and inputs and outputs of all sizes, as wide as hidden states.
    """
    temporaries = forward_bytes(config, tokens, itemsize, text_tokens)
    temporaries += running_bytes(config, tokens, splits)
    # Of each size, the per-layer embeddings of its tokens.
    inputs = 4 * tokens * config.per_layer_columns * itemsize
    return temporaries + 12 * tokens * config.width * itemsize + inputs


def graph_logits_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Return the additional bytes if the outputs are logits. Distributions are never part of the
    graphs.
    """
    logits = tokens * config.vocab_rows * itemsize
    if config.vocab_rows < config.vocab:
        # Each rank's part in float32, as received and side by side.
        logits += tokens * (config.vocab + 2 * config.vocab_rows) * 4
    return logits + 2 * tokens * config.vocab * 4


def prefill_workspace_bytes(
    config: ModelConfig,
    prompt_tokens: int,
    chunk: int,
    block_tokens: int,
    scored_chunk: int,
    itemsize: int,
    *,
    by_host: bool = False,
    tile: int = 0,
) -> int:
    """Return the peak bytes of temporaries during a prefill.

    chunk: number of tokens for which a layer is computed at a time
    scored_chunk: number of tokens of a chunk that is scored for retrieval, 0 without retrieval
    by_host, tile: see `prompt_bytes`
    """
    kernels = {"by_host": by_host, "tile": tile}
    prefill = prompt_bytes(config, prompt_tokens, chunk, itemsize, **kernels)
    if not scored_chunk:
        return prefill
    scored = min(SCORED_TOKENS, chunk, prompt_tokens)
    if by_host:
        # Elsewhere the temporaries of the layer, which are free again by then, have room for it.
        prefill += running_bytes(config, scored, max(1, HOST_PARTS // config.attention.kv_heads))
    return prefill + _scoring_bytes(config, scored, prompt_tokens, block_tokens, scored_chunk)


def pass_workspace_bytes(
    config: ModelConfig,
    context_tokens: int,
    pass_tokens: int,
    block_tokens: int,
    scored_chunk: int,
    itemsize: int,
    splits: int,
    rounding: int = 0,
    *,
    by_host: bool = False,
    tile: int = 0,
) -> int:
    """Return the peak bytes of temporaries after the prefill: in a pass, or while choosing chunks,
    copying chunks, or drawing tokens.

    scored_chunk: see `prefill_workspace_bytes`
    splits: the most parts into which the attention of a pass divides its keys
    rounding: bytes of temporaries for copying chunks in 8 bits
    by_host, tile: see `prompt_bytes`
    """
    kernels = {"by_host": by_host, "tile": tile}
    forward = forward_bytes(config, pass_tokens, itemsize, context_tokens, **kernels)
    forward += running_bytes(config, pass_tokens, splits)
    distributions = distribution_bytes(config, pass_tokens)
    if not scored_chunk:
        return max(forward, distributions)
    forward += _scoring_bytes(config, pass_tokens, context_tokens, block_tokens, scored_chunk)
    choosing = refresh_bytes(config, -(-context_tokens // scored_chunk))
    return max(forward, distributions, choosing, rounding)


def _scoring_bytes(
    config: ModelConfig, tokens: int, context_tokens: int, block_tokens: int, scored_chunk: int
) -> int:
    """Return the additional bytes for scoring chunks in the attention of `tokens` queries."""
    chunks = -(-context_tokens // scored_chunk)
    piece = config.attention.heads * (block_tokens + tokens) * 4 * 2
    return score_bytes(config, tokens, chunks) + tokens * piece
