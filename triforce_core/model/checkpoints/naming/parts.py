"""Names of the tensors of residual streams, n-grams and an index of keys in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triforce_core.model.checkpoints.naming.pieces import Change, Piece, head_order, pieces_of
from triforce_core.model.parts.specs import Indexer, NGrams, PerLayerInputs, Streams
from triforce_offload.checkpoint.source import Corner

if TYPE_CHECKING:
    from triforce_core.model.feed_forward import Shapes


@dataclass(frozen=True)
class PartNames:
    """Full names of tensors.

    streams: of each tensor of residual streams, by ours without what it is around, with a place for
        that; and what it is around, by our names
    ngrams: of each tensor of n-gram embeddings in a layer, by ours
    tables: of the table of n-grams, or of its parts in order, with a place for their numbers
    per_layer: of each tensor of per-layer embeddings in a layer, by ours
    of_all_layers: likewise, of tensors with the parts of all layers, and of the table
    index: of the index's projections, of queries and of vectors, apart or as one tensor
    index_norms: of the norms of its queries and of its vectors
    """

    streams: tuple[tuple[str, str], ...]
    around: tuple[tuple[str, str], ...]
    ngrams: tuple[tuple[str, str], ...]
    tables: tuple[str, ...]
    per_layer: tuple[tuple[str, str], ...]
    of_all_layers: tuple[tuple[str, str], ...]
    index: tuple[str, ...]
    index_norms: tuple[str, str]

    def stream_name(self, part: str) -> str:
        """Return the name of a tensor of residual streams, by ours."""
        around, _, own = part.partition("_")
        return dict(self.streams)[own].format(dict(self.around)[around])


HF_PARTS = PartNames(
    streams=(
        ("mix_norm", "{}.hc_norm.weight"),
        ("mix_down", "{}.input_mix_weight_down.weight"),
        ("mix_up", "{}.input_mix_weight_up.weight"),
        ("inject", "{}.block_inject_weight.weight"),
    ),
    around=(
        ("mixer", "attn_hyper_connection"),
        ("mlp", "mlp_hyper_connection"),
        ("last", "hyper_connection_mixer"),
    ),
    ngrams=(
        ("ngram_keys", "ple.key_proj.weight"),
        ("ngram_values", "ple.value_proj.weight"),
        ("ngram_key_norm", "ple.norm_key.weight"),
        ("ngram_query_norm", "ple.norm_query.weight"),
        ("ngram_conv_norm", "ple.norm_conv.weight"),
        ("ngram_conv", "ple.conv1d.weight"),
    ),
    tables=(
        "layers.{layer}.ple.ple_embedding.ngram_embedding.weight",
        "layers.{layer}.ple.ple_embedding.ngram_embedding.shard_{part}.weight",
    ),
    per_layer=(
        ("per_layer_gate", "per_layer_input_gate.weight"),
        ("per_layer_up", "per_layer_projection.weight"),
        ("per_layer_norm", "post_per_layer_input_norm.weight"),
    ),
    of_all_layers=(
        ("per_layer_mix", "per_layer_model_projection.weight"),
        ("per_layer_mix_norm", "per_layer_projection_norm.weight"),
        ("per_layer_table", "embed_tokens_per_layer.weight"),
    ),
    index=("self_attn.indexer.index_qk_proj.weight",),
    index_norms=(
        "self_attn.indexer.q_layernorm.weight",
        "self_attn.indexer.k_layernorm.weight",
    ),
)
GGUF_PARTS = PartNames(
    streams=(
        ("mix_norm", "{}_norm.weight"),
        ("mix_down", "{}_down.weight"),
        ("mix_up", "{}_up.weight"),
        ("inject", "{}_inject.weight"),
    ),
    around=(("mixer", "hc_attn"), ("mlp", "hc_ffn"), ("last", "output_hc")),
    ngrams=(
        ("ngram_keys", "ple_key.weight"),
        ("ngram_values", "ple_value.weight"),
        ("ngram_key_norm", "ple_norm_key.weight"),
        ("ngram_query_norm", "ple_norm_query.weight"),
        ("ngram_conv_norm", "ple_norm_conv.weight"),
        ("ngram_conv", "ple_conv1d.weight"),
    ),
    tables=("per_layer_token_embd.weight",),
    per_layer=(
        ("per_layer_gate", "inp_gate.weight"),
        ("per_layer_up", "proj.weight"),
        ("per_layer_norm", "post_norm.weight"),
    ),
    of_all_layers=(
        ("per_layer_mix", "per_layer_model_proj.weight"),
        ("per_layer_mix_norm", "per_layer_proj_norm.weight"),
        ("per_layer_table", "per_layer_token_embd.weight"),
    ),
    index=("indexer.q_proj.weight", "indexer.k_proj.weight"),
    index_norms=("indexer.q_norm.weight", "indexer.k_norm.weight"),
)


def stream_pieces(
    shapes: Shapes, names: PartNames, change: Change | None
) -> dict[str, list[Piece]]:
    """Return the pieces of the tensors of residual streams. change: turns the stored weights of
    norms into the model's
    """
    return {
        part: [Piece(names.stream_name(part), shape[0], change=change if len(shape) == 1 else None)]
        for part, shape in shapes.items()
    }


def streams_around(streams: Streams | None, hidden: int) -> Shapes:
    """Return the shapes of the tensors of residual streams around the mixer and the MLP of a layer;
    none without streams.
    """
    if streams is None:
        return {}
    return streams.shapes(hidden, "mixer") | streams.shapes(hidden, "mlp")


def ngram_pieces(
    ngrams: NGrams | None, hidden: int, names: PartNames, change: Change | None
) -> dict[str, list[Piece]]:
    """Likewise, of n-gram embeddings in their layer."""
    if ngrams is None:
        return {}
    own = dict(names.ngrams)
    return {
        part: [Piece(own[part], shape[0], change=change if len(shape) == 1 else None)]
        for part, shape in ngrams.shapes(hidden).items()
    }


def per_layer_pieces(
    inputs: PerLayerInputs | None, hidden: int, names: PartNames
) -> dict[str, list[Piece]]:
    """Return the pieces of the tensors of per-layer embeddings in a layer."""
    if inputs is None:
        return {}
    shapes = inputs.shapes(hidden)
    return {part: [Piece(name, shapes[part][0])] for part, name in names.per_layer}


def per_layer_slice(
    part: str, inputs: PerLayerInputs, hidden: int, name: str, layer: int, layers: int
) -> Piece:
    """Return a layer's part of a tensor that has those of all. name: of the tensor"""
    if part == "per_layer_mix_norm":
        return Piece(name, inputs.width)
    whole = (layers * inputs.width, hidden)
    return Piece(name, inputs.width, corner=Corner(layer * inputs.width, 0), whole=whole)


def index_pieces(
    index: Indexer, rotated: int, names: PartNames, change: Change | None
) -> tuple[list[Piece], dict[str, list[Piece]]]:
    """Return the pieces of an index's projection, and of its norms.

    rotated: how many numbers of a query or a vector are rotated
    """
    order = head_order(index.dim, rotated, interleaved=False)
    sizes = (index.heads * index.dim, index.dim)
    projected = pieces_of(names.index, sizes, (order, order))
    parts = ("index_q_norm", "index_k_norm")
    norms = {
        part: [Piece(name, index.dim, order, change=change)]
        for part, name in zip(parts, names.index_norms, strict=True)
    }
    return projected, norms
