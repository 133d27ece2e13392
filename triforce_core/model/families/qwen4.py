"""Qwen4 as its first model has it, Qwen3.8-Flash-Next: what config.json says of its layers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count as numbers_from
from itertools import islice

from triforce_core.model.families.family import Family, Layers
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL
from triforce_core.model.families.recurrent import LINEAR, qwen3_5_layers
from triforce_core.model.families.sparse import QWEN3_NEXT, beside_a_gated_one
from triforce_core.model.feed_forward import Router
from triforce_core.model.layers import Attention, LayerSpec, NormKind
from triforce_core.model.parts.recurrent import DeltaNet
from triforce_core.model.parts.specs import Indexer, NGrams, Streams
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# Names of layers that choose what they attend to. All full-attention layers do, if one does.
_INDEXED = (FULL, "indexed_attention", "sparse_attention", "compressed_sparse_attention")
# Constants of the hash of n-grams, which no config mentions (splitmix64, and a step for each layer
# with n-grams).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = (1 << 64) - 1


def _qwen4(fields: Fields, count: int) -> Layers:
    """Layers as of Qwen3-Next, with residual streams in place of norms. One of them has n-gram
    embeddings before it.
    """
    every = fields.whole("full_attention_interval", 4)
    default = [FULL if (index + 1) % every == 0 else LINEAR for index in range(count)]
    kinds = fields.of_layers("layer_types", count, default)
    plain = {
        "layer_types": [FULL if kind in _INDEXED else kind for kind in kinds],
        "output_gate_type": None,
    }
    inner = Fields({**fields.raw, **plain}, fields.source, fields.read)
    experts = beside_a_gated_one(fields, Router(normalised=fields.flag("norm_topk_prob", True)))
    gate = fields.get("output_gate_type") or fields.get("hidden_act")
    if gate not in (None, "silu", "swish", "sigmoid"):
        raise UnsupportedModelError(f"{fields.source}: output_gate_type {gate!r} is not supported")
    streams = Streams(fields.whole("hc_count", least=2), fields.whole("hc_lowrank"))
    index, ngrams, at = _index(fields), *_ngrams(fields, streams.count)
    if ngrams and index is None:
        raise UnsupportedModelError(
            f"{fields.source}: n-gram embeddings (ple_layer_ids) without an index of keys "
            "(indexer_n_heads) are not supported"
        )

    def changed(spec: LayerSpec, layer: int) -> LayerSpec:
        if isinstance(spec.mixer, Attention):
            mixer = replace(spec.mixer, index=index)
        else:
            mixer = replace(spec.mixer, sigmoid_gate=gate == "sigmoid")
        return replace(spec, mixer=mixer, streams=streams, ngrams=ngrams if layer == at else None)

    layers = qwen3_5_layers(inner, count, mlp=experts)
    if ngrams and not (0 <= at < count and isinstance(layers[at].mixer, DeltaNet)):
        raise CheckpointError(
            f"{fields.source}: ple_layer_ids {at + 1} is no recurrent one of {count} layers"
        )
    return tuple(changed(spec, layer) for layer, spec in enumerate(layers))


def _index(fields: Fields) -> Indexer | None:
    if fields.get("indexer_n_heads") is None:
        return None
    fields.only("indexer_kv_heads", 1)
    index = Indexer(
        heads=fields.whole("indexer_n_heads"),
        dim=fields.whole("indexer_head_dim"),
        budget=fields.whole("indexer_budget"),
        block=fields.whole("indexer_compress_ratio"),
    )
    if index.budget % index.block:
        raise CheckpointError(
            f"{fields.source}: {index.budget} tokens (indexer_budget) are no whole blocks of "
            f"{index.block}"
        )
    return index


def _ngrams(fields: Fields, streams: int) -> tuple[NGrams | None, int]:
    """Return the n-gram embeddings and the layer that has them; None and -1 without any."""
    layers = fields.get("ple_layer_ids") or []
    if not layers:
        return None, -1
    if len(layers) > 1:
        raise UnsupportedModelError(
            f"{fields.source}: n-gram embeddings of several layers ({layers}) are not supported"
        )
    longest, per_length = fields.whole("ngram_size", 3, least=2), fields.whole("heads_per_ngram", 8)
    heads = (longest - 1) * per_length
    columns = fields.whole("ple_embed_dim", fields.whole("hidden_size"))
    end = fields.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if columns % heads or not isinstance(end, int):
        raise CheckpointError(
            f"{fields.source}: {heads} heads of n-grams cannot share {columns} columns "
            f"(ple_embed_dim), or eos_token_id {end!r} is no token"
        )
    # GGUF files have these numbers.
    sizes, multipliers = fields.get("ngram_rows"), fields.get("ngram_multipliers")
    if not sizes:
        sizes = _primes(fields.whole("ngram_vocab_size_base", 20_000_000), heads)
    if not multipliers:
        seed = fields.whole("seed", 1234, least=0)
        multipliers = _multipliers(fields.whole("vocab_size"), longest, seed)
    return (
        NGrams(
            tuple(sizes),
            tuple(multipliers),
            columns // heads,
            fields.whole("ple_conv_kernel_size", 4, least=2),
            end,
            streams,
        ),
        layers[0] - 1,
    )


def _primes(least: int, count: int) -> list[int]:
    """Return the first `count` primes from a number on."""
    primes = (n for n in numbers_from(least) if n > 1 and all(n % d for d in _divisors(n)))
    return list(islice(primes, count))


def _divisors(number: int) -> range:
    return range(2, math.isqrt(number) + 1)


def _multipliers(vocab: int, count: int, seed: int) -> list[int]:
    """Return odd factors, so small that products with tokens have 63 bits."""
    half = max(1, ((1 << 63) - 1) // vocab // 2)
    return [2 * (_mixed(seed + _STEP * (index + 1)) % half) + 1 for index in range(count)]


def _mixed(value: int) -> int:
    """Return the next number of splitmix64 (Steele et al., 2014)."""
    value = ((value & _BITS) + _STEP) & _BITS
    value = ((value ^ (value >> 30)) * _FIRST) & _BITS
    value = ((value ^ (value >> 27)) * _SECOND) & _BITS
    return value ^ (value >> 31)


# What transformers' config takes for fields that are not there.
_DEFAULTS = {**QWEN3_NEXT, "partial_rotary_factor": 1.0, "hc_count": 4, "hc_lowrank": 320}
QWEN4 = (
    Family(
        "qwen4_exp_text",
        "Qwen4Exp",
        _qwen4,
        defaults=_DEFAULTS,
        norm_kind=NormKind.RMS_PLUS_ONE,
    ),
)
