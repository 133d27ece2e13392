"""Mapping from this runtime's tensor names to those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from triforce_core.model.checkpoints.naming.experts import expert_pieces
from triforce_core.model.checkpoints.naming.families import (
    GGUF,
    GGUF_FAMILIES,
    HF_BEFORE,
    HF_FAMILIES,
    HF_PREFIXES,
    Naming,
)
from triforce_core.model.checkpoints.naming.latent import latent_pieces
from triforce_core.model.checkpoints.naming.parts import (
    index_pieces,
    ngram_pieces,
    per_layer_pieces,
    per_layer_slice,
    stream_pieces,
    streams_around,
)
from triforce_core.model.checkpoints.naming.pieces import (
    Change,
    Piece,
    head_order,
    less_one,
    pieces_of,
)
from triforce_core.model.checkpoints.naming.recurrent import recurrent_pieces
from triforce_core.model.checkpoints.tables import table_names
from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import Experts
from triforce_core.model.layers import Attention, LatentAttention, LayerSpec, NormKind
from triforce_offload.checkpoint.source import Corner


def hf_names(config: ModelConfig, held: Collection[str] = ()) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor in safetensors files.

    held: names of the tensors in the files; a language model beside others has a prefix
    """
    first = {name.split("layers.")[0] for name in held}
    prefix, head = next((each for each in HF_PREFIXES if each[0] in first), HF_PREFIXES[0])
    naming = HF_FAMILIES.get(config.family, Naming(HF_BEFORE))
    layer = prefix + "layers.{}."
    naming = replace(naming, experts=naming.experts.as_held(held, layer, len(config.layers)))
    embedding = prefix + naming.embedding
    ends = {
        "embedding": embedding,
        "head": embedding if config.tied else head,
        "norm": prefix + naming.last_norm,
        "last": prefix,
    }
    return _named(config, ends, naming, layer, held)


def gguf_names(config: ModelConfig, held: Collection[str] = ()) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor in a GGUF file. held: names of the tensors in it"""
    naming = GGUF_FAMILIES.get(config.family, GGUF)
    layer = "blk.{}."
    experts = naming.experts.as_held(held, layer, len(config.layers))
    naming = replace(naming, experts=experts, recurrent=naming.recurrent.as_held(held))
    if GGUF.last_norm in held:
        # So do the files of LFM2 that Ollama converts call it.
        naming = replace(naming, last_norm=GGUF.last_norm)
    ends = {
        "embedding": "token_embd.weight",
        "head": "token_embd.weight" if config.tied else "output.weight",
        "norm": naming.last_norm,
        "last": "",
    }
    return _named(config, ends, naming, layer, held)


def blocks(family: str, layers: Sequence[LayerSpec]) -> list[int]:
    """Return the number that each layer, or its mixer, has in files of a family, and the first
    number behind all.
    """
    return HF_FAMILIES.get(family, Naming(HF_BEFORE)).blocks(layers)


def _named(
    config: ModelConfig,
    ends: Mapping[str, str],
    naming: Naming,
    prefix: str,
    held: Collection[str],
) -> Callable[[str], list[Piece]]:
    """Return a function from `embedding`, `layers.3.qkv`, ... to the pieces of the checkpoint."""
    change = _change_of_norms(config, naming)
    whole = {
        "embedding": [Piece(ends["embedding"], config.vocab)],
        "head": [Piece(ends["head"], config.vocab)],
        "norm": [Piece(ends["norm"], config.hidden, change=change)],
    }
    if config.streams:
        for part, pieces in stream_pieces(config.last_shapes, naming.parts, change).items():
            whole[part] = [replace(piece, name=ends["last"] + piece.name) for piece in pieces]
    if config.ngrams:
        at = next(index for index, spec in enumerate(config.layers) if spec.ngrams)
        tables = [ends["last"] + name for name in naming.parts.tables]
        whole["ngrams"] = [Piece(name, 0) for name in table_names(held, tables, at)]
    shared = {part: ends["last"] + name for part, name in naming.parts.of_all_layers}
    if config.per_layer_inputs:
        whole["per_layer_table"] = [Piece(shared["per_layer_table"], config.vocab)]
    parts = {spec: _layer_pieces(spec, config, naming) for spec in config.distinct_layers}
    blocks = naming.blocks(config.layers)

    def lookup(name: str) -> list[Piece]:
        if name in whole:
            return whole[name]
        _, layer, part = name.split(".")
        spec, number = config.layers[int(layer)], blocks[int(layer)]
        if part in shared:
            of_all = config.hidden, shared[part], int(layer), len(config.layers)
            return [per_layer_slice(part, spec.per_layer_inputs, *of_all)]
        if naming.apart and part in ("post_norm", *spec.mlp.shapes(config.hidden)):
            number += 1
        return [
            replace(piece, name=prefix.format(number) + piece.name) for piece in parts[spec][part]
        ]

    return lookup


def _layer_pieces(spec: LayerSpec, config: ModelConfig, naming: Naming) -> dict[str, list[Piece]]:
    """Return the pieces of the checkpoint that make up each tensor of a layer."""
    width, hidden, change = spec.mlp.width, config.hidden, _change_of_norms(config, naming)
    count = spec.mlp.activation.projections
    gate_up = [f"{name}.weight" for name in naming.gate_up[-count:]]
    parts = {
        "output_scale": [Piece(naming.output_scale, 1)],
        "gate_up": pieces_of(gate_up, (width,) * count, (None,) * count),
        "down": [Piece(f"{naming.down}.weight", hidden)],
    }
    if isinstance(spec.mlp, Experts):
        parts |= expert_pieces(spec.mlp, hidden, naming.experts)
    around = streams_around(spec.streams, hidden)
    parts |= stream_pieces(around, naming.parts, change)
    parts |= ngram_pieces(spec.ngrams, hidden, naming.parts, change)
    parts |= per_layer_pieces(spec.per_layer_inputs, hidden, naming.parts)
    for part, name in naming.norms.items():
        rows = spec.shapes(hidden).get(part, (0,))[0]
        parts[part] = [Piece(f"{name}.weight", rows, change=change)]
    if isinstance(spec.mixer, LatentAttention):
        interleaved = naming.interleaved
        return parts | latent_pieces(spec.mixer, hidden, naming.latent, interleaved=interleaved)
    if isinstance(spec.mixer, Attention):
        return parts | _attention_pieces(spec.mixer, config, naming)
    return parts | recurrent_pieces(spec.mixer, hidden, naming.recurrent)


def _attention_pieces(
    mixer: Attention, config: ModelConfig, naming: Naming
) -> dict[str, list[Piece]]:
    """Likewise, of the tensors of attention."""
    rope = config.rope_of(mixer) or config.rope
    rotated = rope.rotated(mixer.head_dim)
    order = head_order(mixer.head_dim, rotated, interleaved=naming.interleaved)
    queries, gated = mixer.queries, order
    if mixer.output_gate:
        queries *= 2
        gated = order and (*order, *range(mixer.head_dim, 2 * mixer.head_dim))
    projected = mixer.projections
    sizes, orders = (queries, mixer.keys, mixer.keys), (gated, order, None)
    parts, change = {}, _change_of_norms(config, naming)
    for suffix, ending in (("", "weight"), ("_bias", "bias")):
        named = [f"{name}.{ending}" for name in naming.qkv[:projected]]
        if mixer.output_gate and naming.output_gate:
            pieces = [
                Piece(name, mixer.head_dim, rows, Corner(head * mixer.head_dim, 0))
                for head in range(mixer.heads)
                for name, rows in ((named[0], order), (f"{naming.output_gate}.{ending}", None))
            ]
            pieces += pieces_of(named[1:], sizes[1:projected], orders[1:projected])
        else:
            pieces = pieces_of(named, sizes[:projected], orders[:projected])
        if mixer.index and not suffix:
            rotated = config.index_rope.rotated(mixer.index.dim)
            own, norms = index_pieces(
                mixer.index, rotated, naming.parts, _change_of_norms(config, naming)
            )
            pieces, parts = pieces + own, parts | norms
        if mixer.head_gate:
            pieces.append(Piece(f"{naming.head_gate}.{ending}", mixer.heads))
        parts["qkv" + suffix] = pieces
        parts["o" + suffix] = [Piece(f"{naming.o}.{ending}", config.hidden)]
    parts["sinks"] = [Piece(naming.sinks, mixer.heads)]
    for part in ("q_norm", "k_norm"):
        if shape := mixer.shapes(config.hidden).get(part):
            name = f"{naming.norms[part]}.weight"
            parts[part] = [Piece(name, shape[0], order, change=change)]
    return parts


def _change_of_norms(config: ModelConfig, naming: Naming) -> Change | None:
    """Return what turns the stored weights of norms into the model's."""
    folded = config.norm_kind is NormKind.RMS_PLUS_ONE and naming.stored_norms is NormKind.RMS
    return less_one if folded else None
