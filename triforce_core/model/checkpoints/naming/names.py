"""Mapping from this runtime's tensor names to those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from triforce_core.model.checkpoints.naming.experts import (
    GGUF_EXPERTS,
    GGUF_GEMMA4,
    HF_ERNIE,
    HF_GEMMA4,
    HF_GPT_OSS,
    HF_GRANITE,
    HF_GRANITE4,
    HF_LAGUNA,
    HF_LFM2,
    HF_MINIMAX,
    HF_MIXTRAL,
    HF_NEMOTRON,
    HF_QWEN2,
    ExpertNames,
    expert_pieces,
)
from triforce_core.model.checkpoints.naming.latent import GGUF_LATENT, LatentNames, latent_pieces
from triforce_core.model.checkpoints.naming.parts import (
    GGUF_PARTS,
    HF_PARTS,
    PartNames,
    index_pieces,
    ngram_pieces,
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
from triforce_core.model.checkpoints.naming.recurrent import (
    GGUF_DELTA_NET,
    GGUF_MAMBA2,
    GGUF_QWEN3_NEXT,
    GGUF_SHORT_CONV,
    HF_DELTA_NET,
    HF_MAMBA2,
    HF_MAMBA2_MIXER,
    HF_QWEN3_NEXT,
    HF_SHORT_CONV,
    RecurrentNames,
    recurrent_pieces,
)
from triforce_core.model.checkpoints.tables import table_names
from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import Experts
from triforce_core.model.layers import Attention, LatentAttention, LayerSpec, NormKind


@dataclass(frozen=True)
class Naming:
    """How a family names the tensors of its layers in a kind of file.

    norms: name of each norm, by this runtime's name
    sinks: full name of the scores of sinks
    head_gate: name of the projection of a gate for each head
    qkv, gate_up: names of projections, apart or as one tensor
    interleaved: whether the rotated numbers of a head are stored in pairs: those with the same
        frequency side by side, not half a head apart
    stored_norms: how norms are computed from their stored weights; None for as in the model
    output_scale: full name of the factor of a layer's output
    apart: whether mixers and MLPs are numbered one after the other, and not as layers
    embedding: full name of the embedding
    last_norm: full name of the norm after the last layer
    recurrent: names of the tensors of recurrent layers
    latent: names of the tensors of latent attention
    experts: names of the tensors of experts
    parts: names of the tensors of residual streams, n-gram embeddings and an index of keys
    """

    norms: Mapping[str, str]
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    head_gate: str = "self_attn.g_proj"
    sinks: str = "self_attn.sinks"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    interleaved: bool = False
    stored_norms: NormKind | None = None
    output_scale: str = "layer_scalar"
    apart: bool = False
    embedding: str = "embed_tokens.weight"
    last_norm: str = "norm.weight"
    recurrent: RecurrentNames = field(default_factory=RecurrentNames)
    latent: LatentNames = field(default_factory=LatentNames)
    experts: ExpertNames = field(default_factory=ExpertNames)
    parts: PartNames = HF_PARTS

    def blocks(self, layers: Sequence[LayerSpec]) -> list[int]:
        """Return the number of each layer, or of its mixer if MLPs are numbered too; and the first
        number behind all.
        """
        followed = [self.apart and spec.mlp.width > 0 for spec in layers]
        return [layer + more for layer, more in enumerate(accumulate(followed, initial=0))]


_HF_HEADS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_HF_BEFORE = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    **_HF_HEADS,
}
_HF_AFTER = {
    "mixer_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
    **_HF_HEADS,
}
_GLM4 = _HF_BEFORE | {"mixer_norm": "post_self_attn_layernorm", "mlp_norm": "post_mlp_layernorm"}
_HF_GEMMA = (
    _HF_BEFORE
    | _HF_AFTER
    | {
        "post_norm": "pre_feedforward_layernorm",
        "experts_norm": "pre_feedforward_layernorm_2",
        "dense_out_norm": "post_feedforward_layernorm_1",
        "experts_out_norm": "post_feedforward_layernorm_2",
    }
)
_ONE_GATE_UP = ("mlp.gate_up_proj",)
_HF = {
    **dict.fromkeys(("olmo2", "olmo3"), Naming(_HF_AFTER)),
    "exaone4": Naming(_HF_AFTER),
    "glm": Naming(_HF_BEFORE, gate_up=_ONE_GATE_UP, interleaved=True),
    "glm4": Naming(_GLM4, gate_up=_ONE_GATE_UP, interleaved=True),
    "cohere2": Naming(_HF_BEFORE, interleaved=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), Naming(_HF_GEMMA)),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), Naming(_HF_GEMMA, experts=HF_GEMMA4)),
    "mixtral": Naming(_HF_BEFORE, experts=HF_MIXTRAL),
    "qwen2_moe": Naming(_HF_BEFORE, experts=HF_QWEN2),
    "gpt_oss": Naming(_HF_BEFORE, experts=HF_GPT_OSS),
    "granitemoe": Naming(_HF_BEFORE, experts=HF_GRANITE),
    "granitemoehybrid": Naming(
        _HF_BEFORE,
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        recurrent=HF_MAMBA2,
        experts=HF_GRANITE4,
    ),
    "nemotron_h": Naming(
        {"input_norm": "norm", "post_norm": "norm"},
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        o="mixer.o_proj",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        apart=True,
        embedding="embeddings.weight",
        last_norm="norm_f.weight",
        recurrent=HF_MAMBA2_MIXER,
        experts=HF_NEMOTRON,
    ),
    "phi3": Naming(_HF_BEFORE, qkv=("self_attn.qkv_proj",), gate_up=_ONE_GATE_UP),
    **dict.fromkeys(
        ("ernie4_5", "ernie4_5_moe"), Naming(_HF_BEFORE, interleaved=True, experts=HF_ERNIE)
    ),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        Naming(_HF_BEFORE, recurrent=HF_DELTA_NET, experts=HF_QWEN2),
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), Naming(_HF_BEFORE, interleaved=True)
    ),
    "minimax_m2": Naming(_HF_BEFORE, experts=HF_MINIMAX),
    "laguna": Naming(_HF_BEFORE, experts=HF_LAGUNA),
    "qwen3_next": Naming(_HF_BEFORE, recurrent=HF_QWEN3_NEXT, experts=HF_QWEN2),
    "qwen4_exp_text": Naming(_HF_BEFORE, recurrent=HF_DELTA_NET, experts=HF_QWEN2),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        Naming(
            {
                "input_norm": "operator_norm",
                "post_norm": "ffn_norm",
                "q_norm": "self_attn.q_layernorm",
                "k_norm": "self_attn.k_layernorm",
            },
            o="self_attn.out_proj",
            gate_up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
            last_norm="embedding_norm.weight",
            recurrent=HF_SHORT_CONV,
            experts=HF_LFM2,
        ),
    ),
}
# Where the language model is, and its output matrix: alone, or in a model that also reads images.
HF_PREFIXES = (
    ("model.", "lm_head.weight"),
    ("backbone.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
)
_GGUF_HEADS = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
_GGUF_BEFORE = {"input_norm": "attn_norm", "post_norm": "ffn_norm", **_GGUF_HEADS}
_GGUF_AFTER = {"mixer_norm": "post_attention_norm", "mlp_norm": "post_ffw_norm", **_GGUF_HEADS}
_GGUF_GEMMA4 = (
    _GGUF_BEFORE
    | _GGUF_AFTER
    | {
        "experts_norm": "pre_ffw_norm_2",
        "dense_out_norm": "post_ffw_norm_1",
        "experts_out_norm": "post_ffw_norm_2",
    }
)
_GGUF = Naming(
    _GGUF_BEFORE,
    qkv=("attn_q", "attn_k", "attn_v"),
    o="attn_output",
    head_gate="attn_gate",
    sinks="attn_sinks.weight",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    stored_norms=NormKind.RMS,
    output_scale="layer_output_scale.weight",
    latent=GGUF_LATENT,
    last_norm="output_norm.weight",
    experts=GGUF_EXPERTS,
    parts=GGUF_PARTS,
)
# llama.cpp rotates neighbouring pairs in some families. For these its converter stores q and k
# accordingly, unless transformers stores them so itself.
_GGUF_PAIRS = replace(_GGUF, interleaved=True)
_GGUF_POST_ATTENTION = replace(_GGUF, norms=_GGUF_BEFORE | {"post_norm": "post_attention_norm"})
_GGUF_FAMILIES = {
    **dict.fromkeys(("llama", "smollm3", "granite", "ernie4_5", "cohere2"), _GGUF_PAIRS),
    **dict.fromkeys(("mixtral", "granitemoe", "ernie4_5_moe", "deepseek_v3"), _GGUF_PAIRS),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), replace(_GGUF, norms=_GGUF_AFTER)),
    **dict.fromkeys(("seed_oss", "glm4_moe", "gpt_oss"), _GGUF_POST_ATTENTION),
    "glm4": replace(_GGUF_PAIRS, norms=_GGUF_BEFORE | _GGUF_AFTER, gate_up=("ffn_up",)),
    **dict.fromkeys(("gemma2", "gemma3_text"), replace(_GGUF, norms=_GGUF_BEFORE | _GGUF_AFTER)),
    "gemma4_text": replace(_GGUF, norms=_GGUF_GEMMA4, experts=GGUF_GEMMA4),
    "phi3": replace(_GGUF, qkv=("attn_qkv",), gate_up=("ffn_up",)),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        replace(_GGUF_POST_ATTENTION, recurrent=GGUF_DELTA_NET),
    ),
    "qwen3_next": replace(_GGUF_POST_ATTENTION, recurrent=GGUF_QWEN3_NEXT),
    "qwen4_exp_text": replace(_GGUF, recurrent=GGUF_DELTA_NET),
    "granitemoehybrid": replace(_GGUF_PAIRS, recurrent=GGUF_MAMBA2),
    "nemotron_h": replace(
        _GGUF_PAIRS,
        norms={"input_norm": "attn_norm", "post_norm": "attn_norm"},
        apart=True,
        recurrent=GGUF_MAMBA2,
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        replace(_GGUF, last_norm="token_embd_norm.weight", recurrent=GGUF_SHORT_CONV),
    ),
}


def hf_names(config: ModelConfig, held: Collection[str] = ()) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor in safetensors files.

    held: names of the tensors in the files; a language model beside others has a prefix
    """
    first = {name.split("layers.")[0] for name in held}
    prefix, head = next((each for each in HF_PREFIXES if each[0] in first), HF_PREFIXES[0])
    naming = _HF.get(config.family, Naming(_HF_BEFORE))
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
    naming = _GGUF_FAMILIES.get(config.family, _GGUF)
    layer = "blk.{}."
    experts = naming.experts.as_held(held, layer, len(config.layers))
    naming = replace(naming, experts=experts, recurrent=naming.recurrent.as_held(held))
    if _GGUF.last_norm in held:
        # So do the files of LFM2 that Ollama converts call it.
        naming = replace(naming, last_norm=_GGUF.last_norm)
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
    return _HF.get(family, Naming(_HF_BEFORE)).blocks(layers)


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
    parts = {spec: _layer_pieces(spec, config, naming) for spec in config.distinct_layers}
    blocks = naming.blocks(config.layers)

    def lookup(name: str) -> list[Piece]:
        if name in whole:
            return whole[name]
        _, layer, part = name.split(".")
        spec, number = config.layers[int(layer)], blocks[int(layer)]
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
    projected = 2 + mixer.projects_values
    sizes, orders = (queries, mixer.keys, mixer.keys), (gated, order, None)
    parts, change = {}, _change_of_norms(config, naming)
    for suffix, ending in (("", "weight"), ("_bias", "bias")):
        named = [f"{name}.{ending}" for name in naming.qkv[:projected]]
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
