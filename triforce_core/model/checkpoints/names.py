"""Mapping from this runtime's tensor names to those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import LayerSpec, NormKind
from triforce_core.model.share import Window
from triforce_offload.checkpoint.source import WHOLE, Corner


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint that makes up some rows of a tensor of the model.

    rows: number of rows
    order: which stored row of a head each row is (see `head_order`); None for rows as stored
    corner: first row and column of the part that is read; it is as wide as the model's tensor
    more: how much more than the model's the stored numbers are
    """

    name: str
    rows: int
    order: tuple[int, ...] | None = None
    corner: Corner = WHOLE
    more: float = 0.0

    def within(self, window: Window) -> Piece:
        """Return the part of the piece in a window, which covers whole heads."""
        rows = self.rows if window.rows is None else len(window.rows)
        first = 0 if window.rows is None else window.rows.start
        column = 0 if window.columns is None else window.columns.start
        corner = Corner(self.corner.row + first, self.corner.column + column)
        return replace(self, rows=rows, corner=corner)


@dataclass(frozen=True)
class Naming:
    """How a family names the tensors of its layers in a kind of file.

    norms: name of each norm, by this runtime's name
    qkv, gate_up: names of projections, apart or as one tensor
    interleaved: whether the rotated numbers of a head are stored in pairs: those with the same
        frequency side by side, not half a head apart
    stored_norms: how norms are computed from their stored weights; None for as in the model
    output_scale: full name of the factor of a layer's output
    """

    norms: Mapping[str, str]
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    interleaved: bool = False
    stored_norms: NormKind | None = None
    output_scale: str = "layer_scalar"


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
_ONE_GATE_UP = ("mlp.gate_up_proj",)
_HF = {
    **dict.fromkeys(("olmo2", "olmo3"), Naming(_HF_AFTER)),
    "exaone4": Naming(_HF_AFTER),
    "glm": Naming(_HF_BEFORE, gate_up=_ONE_GATE_UP, interleaved=True),
    "glm4": Naming(_GLM4, gate_up=_ONE_GATE_UP, interleaved=True),
    "cohere2": Naming(_HF_BEFORE, interleaved=True),
    **dict.fromkeys(
        ("gemma3_text", "gemma4_text", "gemma4_unified_text"),
        Naming(_HF_BEFORE | _HF_AFTER | {"post_norm": "pre_feedforward_layernorm"}),
    ),
    "granitemoehybrid": Naming(
        _HF_BEFORE, gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"
    ),
    "phi3": Naming(_HF_BEFORE, qkv=("self_attn.qkv_proj",), gate_up=_ONE_GATE_UP),
    "ernie4_5": Naming(_HF_BEFORE, interleaved=True),
}
# Where the language model is, and its output matrix: alone, or in a model that also reads images.
HF_PREFIXES = (
    ("model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
)
_GGUF_HEADS = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
_GGUF_BEFORE = {"input_norm": "attn_norm", "post_norm": "ffn_norm", **_GGUF_HEADS}
_GGUF_AFTER = {"mixer_norm": "post_attention_norm", "mlp_norm": "post_ffw_norm", **_GGUF_HEADS}
_GGUF = Naming(
    _GGUF_BEFORE,
    qkv=("attn_q", "attn_k", "attn_v"),
    o="attn_output",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    stored_norms=NormKind.RMS,
    output_scale="layer_output_scale.weight",
)
# llama.cpp rotates neighbouring pairs in some families. For these its converter stores q and k
# accordingly, unless transformers stores them so itself.
_GGUF_PAIRS = replace(_GGUF, interleaved=True)
_GGUF_FAMILIES = {
    **dict.fromkeys(("llama", "smollm3", "granite", "ernie4_5", "cohere2"), _GGUF_PAIRS),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), replace(_GGUF, norms=_GGUF_AFTER)),
    "seed_oss": replace(_GGUF, norms=_GGUF_BEFORE | {"post_norm": "post_attention_norm"}),
    "glm4": replace(_GGUF_PAIRS, norms=_GGUF_BEFORE | _GGUF_AFTER, gate_up=("ffn_up",)),
    **dict.fromkeys(
        ("gemma3_text", "gemma4_text"), replace(_GGUF, norms=_GGUF_BEFORE | _GGUF_AFTER)
    ),
    "phi3": replace(_GGUF, qkv=("attn_qkv",), gate_up=("ffn_up",)),
}


def hf_names(config: ModelConfig, held: Collection[str] = ()) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor in safetensors files.

    held: names of the tensors in the files; a language model beside others has a prefix
    """
    first = {name.split("layers.")[0] for name in held}
    prefix, head = next((each for each in HF_PREFIXES if each[0] in first), HF_PREFIXES[0])
    embedding = f"{prefix}embed_tokens.weight"
    ends = {
        "embedding": embedding,
        "head": embedding if config.tied else head,
        "norm": f"{prefix}norm.weight",
    }
    naming = _HF.get(config.family, Naming(_HF_BEFORE))
    return _named(config, ends, naming, prefix + "layers.{}.")


def gguf_names(config: ModelConfig) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor in a GGUF file."""
    ends = {
        "embedding": "token_embd.weight",
        "head": "token_embd.weight" if config.tied else "output.weight",
        "norm": "output_norm.weight",
    }
    return _named(config, ends, _GGUF_FAMILIES.get(config.family, _GGUF), "blk.{}.")


def head_order(head_dim: int, rotated: int, *, interleaved: bool) -> tuple[int, ...] | None:
    """Return which number of a stored head each number of ours is; None if they are the same.

    Ours are rotated in pairs half a head apart. Of heads that are rotated in part, pairs that stay
    as they are come after those that are rotated, in each half.

    rotated: how many numbers of a head are rotated; in files they come first
    """
    pairs, still = rotated // 2, head_dim // 2 - rotated // 2
    step, second = (2, 1) if interleaved else (1, pairs)
    rest = list(range(rotated, head_dim))
    order = [step * i for i in range(pairs)] + rest[:still]
    order += [step * i + second for i in range(pairs)] + rest[still:]
    return None if order == list(range(head_dim)) else tuple(order)


def _named(
    config: ModelConfig, ends: Mapping[str, str], naming: Naming, prefix: str
) -> Callable[[str], list[Piece]]:
    """Return a function from `embedding`, `layers.3.qkv`, ... to the pieces of the checkpoint."""
    more = _more_in_norms(config, naming)
    whole = {
        "embedding": [Piece(ends["embedding"], config.vocab)],
        "head": [Piece(ends["head"], config.vocab)],
        "norm": [Piece(ends["norm"], config.hidden, more=more)],
    }
    parts = {spec: _layer_pieces(spec, config, naming) for spec in config.distinct_layers}

    def lookup(name: str) -> list[Piece]:
        if name in whole:
            return whole[name]
        _, layer, part = name.split(".")
        return [
            replace(piece, name=prefix.format(layer) + piece.name)
            for piece in parts[config.layers[int(layer)]][part]
        ]

    return lookup


def _layer_pieces(spec: LayerSpec, config: ModelConfig, naming: Naming) -> dict[str, list[Piece]]:
    """Return the pieces of the checkpoint that make up each tensor of a layer."""
    mixer, width, hidden = spec.mixer, spec.mlp.width, config.hidden
    rope = config.rope_of(mixer) or config.rope
    order = head_order(mixer.head_dim, rope.rotated(mixer.head_dim), interleaved=naming.interleaved)
    projected = 2 + mixer.projects_values
    sizes = {"qkv": (mixer.queries, mixer.keys, mixer.keys)[:projected], "gate_up": (width, width)}
    orders = {"qkv": (order, order, None)[:projected], "gate_up": (None, None)}
    parts = {"output_scale": [Piece(naming.output_scale, 1)]}
    for suffix, ending in (("", "weight"), ("_bias", "bias")):
        for part, names in (("qkv", naming.qkv[:projected]), ("gate_up", naming.gate_up)):
            named = [f"{name}.{ending}" for name in names]
            parts[part + suffix] = _pieces(named, sizes[part], orders[part])
        parts["o" + suffix] = [Piece(f"{naming.o}.{ending}", hidden)]
        parts["down" + suffix] = [Piece(f"{naming.down}.{ending}", hidden)]
    for part, name in naming.norms.items():
        rows, each = spec.shapes(hidden).get(part, (0,))[0], None
        if part in ("q_norm", "k_norm"):
            each = order
        parts[part] = [Piece(f"{name}.weight", rows, each, more=_more_in_norms(config, naming))]
    return parts


def _more_in_norms(config: ModelConfig, naming: Naming) -> float:
    """Return how much more than the model's the stored weights of norms are."""
    folded = config.norm_kind is NormKind.RMS_PLUS_ONE and naming.stored_norms is NormKind.RMS
    return 1.0 if folded else 0.0


def _pieces(
    names: Sequence[str], sizes: Sequence[int], orders: Sequence[tuple[int, ...] | None]
) -> list[Piece]:
    """Return pieces of tensors of their own, or of one tensor that has all of them."""
    if len(names) == len(sizes):
        return [Piece(*each) for each in zip(names, sizes, orders, strict=True)]
    firsts = accumulate(sizes, initial=0)
    return [
        Piece(names[0], rows, order, Corner(first, 0))
        for rows, order, first in zip(sizes, orders, firsts, strict=False)
    ]
