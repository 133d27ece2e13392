"""How families name the tensors of their layers in each kind of file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from triforce_core.model.checkpoints.naming.experts import (
    GGUF_EXPERTS,
    GGUF_GEMMA4,
    HF_AFMOE,
    HF_ERNIE,
    HF_EXAONE,
    HF_GEMMA4,
    HF_GPT_OSS,
    HF_GRANITE,
    HF_GRANITE4,
    HF_HY_V3,
    HF_LAGUNA,
    HF_LFM2,
    HF_MINIMAX,
    HF_MIXTRAL,
    HF_NEMOTRON,
    HF_QWEN2,
    ExpertNames,
)
from triforce_core.model.checkpoints.naming.latent import GGUF_LATENT, LatentNames
from triforce_core.model.checkpoints.naming.parts import (
    GGUF_PARTS,
    HF_PARTS,
    PartNames,
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
)
from triforce_core.model.layers import LayerSpec, NormKind


@dataclass(frozen=True)
class Naming:
    """How a family names the tensors of its layers in a kind of file.

    norms: name of each norm, by this runtime's name
    sinks: full name of the scores of sinks
    head_gate: name of the projection of a gate for each head
    output_gate: name of the projection of gates for all columns; empty if it is the queries' too
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
    output_gate: str = ""
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
HF_BEFORE = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    **_HF_HEADS,
}
_HF_AFTER = {
    "mixer_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
    **_HF_HEADS,
}
_GLM4 = HF_BEFORE | {"mixer_norm": "post_self_attn_layernorm", "mlp_norm": "post_mlp_layernorm"}
_HF_GEMMA = (
    HF_BEFORE
    | _HF_AFTER
    | {
        "post_norm": "pre_feedforward_layernorm",
        "experts_norm": "pre_feedforward_layernorm_2",
        "dense_out_norm": "post_feedforward_layernorm_1",
        "experts_out_norm": "post_feedforward_layernorm_2",
    }
)
_HF_AFMOE = HF_BEFORE | {
    "post_norm": "pre_mlp_layernorm",
    "mixer_norm": "post_attention_layernorm",
    "mlp_norm": "post_mlp_layernorm",
}
_ONE_GATE_UP = ("mlp.gate_up_proj",)
HF_FAMILIES = {
    **dict.fromkeys(("olmo2", "olmo3"), Naming(_HF_AFTER)),
    "exaone4": Naming(_HF_AFTER),
    "hyperclovax": Naming(HF_BEFORE | {"mixer_norm": "post_norm1", "mlp_norm": "post_norm2"}),
    "glm": Naming(HF_BEFORE, gate_up=_ONE_GATE_UP, interleaved=True),
    "glm4": Naming(_GLM4, gate_up=_ONE_GATE_UP, interleaved=True),
    "cohere2": Naming(HF_BEFORE, interleaved=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), Naming(_HF_GEMMA)),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), Naming(_HF_GEMMA, experts=HF_GEMMA4)),
    "flex_olmo": Naming(_HF_AFTER),
    "exaone_moe": Naming(HF_BEFORE, experts=HF_EXAONE),
    "hy_v3": Naming(HF_BEFORE, experts=HF_HY_V3),
    "mixtral": Naming(HF_BEFORE, experts=HF_MIXTRAL),
    "qwen2_moe": Naming(HF_BEFORE, experts=HF_QWEN2),
    "gpt_oss": Naming(HF_BEFORE, experts=HF_GPT_OSS),
    "granitemoe": Naming(HF_BEFORE, experts=HF_GRANITE),
    "granitemoehybrid": Naming(
        HF_BEFORE,
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
    "phi3": Naming(HF_BEFORE, qkv=("self_attn.qkv_proj",), gate_up=_ONE_GATE_UP),
    **dict.fromkeys(
        ("ernie4_5", "ernie4_5_moe"), Naming(HF_BEFORE, interleaved=True, experts=HF_ERNIE)
    ),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        Naming(HF_BEFORE, recurrent=HF_DELTA_NET, experts=HF_QWEN2),
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"),
        Naming(HF_BEFORE, interleaved=True),
    ),
    "solar_open": Naming(HF_BEFORE),
    "dots1": Naming(HF_BEFORE),
    "mellum": Naming(HF_BEFORE),
    "afmoe": Naming(_HF_AFMOE, output_gate="self_attn.gate_proj", experts=HF_AFMOE),
    "minimax_m2": Naming(HF_BEFORE, experts=HF_MINIMAX),
    "laguna": Naming(HF_BEFORE, experts=HF_LAGUNA),
    "qwen3_next": Naming(HF_BEFORE, recurrent=HF_QWEN3_NEXT, experts=HF_QWEN2),
    "qwen4_exp_text": Naming(HF_BEFORE, recurrent=HF_DELTA_NET, experts=HF_QWEN2),
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
    "lfm3": Naming(
        {
            "input_norm": "operator_norm",
            "mixer_norm": "post_operator_norm",
            "post_norm": "ffn_norm",
            "mlp_norm": "post_ffn_norm",
            **_HF_HEADS,
        },
        head_gate="self_attn.gate_proj",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        last_norm="embedding_norm.weight",
        recurrent=HF_SHORT_CONV,
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
GGUF = Naming(
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
_GGUF_PAIRS = replace(GGUF, interleaved=True)
_GGUF_POST_ATTENTION = replace(GGUF, norms=_GGUF_BEFORE | {"post_norm": "post_attention_norm"})
GGUF_FAMILIES = {
    **dict.fromkeys(("llama", "arcee", "smollm3", "granite", "ernie4_5", "cohere2"), _GGUF_PAIRS),
    **dict.fromkeys(("mixtral", "granitemoe", "ernie4_5_moe", "deepseek_v3"), _GGUF_PAIRS),
    **dict.fromkeys(("ministral3", "mistral4"), _GGUF_PAIRS),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), replace(GGUF, norms=_GGUF_AFTER)),
    **dict.fromkeys(("seed_oss", "glm4_moe", "gpt_oss"), _GGUF_POST_ATTENTION),
    "glm4": replace(_GGUF_PAIRS, norms=_GGUF_BEFORE | _GGUF_AFTER, gate_up=("ffn_up",)),
    **dict.fromkeys(("gemma2", "gemma3_text"), replace(GGUF, norms=_GGUF_BEFORE | _GGUF_AFTER)),
    "gemma4_text": replace(GGUF, norms=_GGUF_GEMMA4, experts=GGUF_GEMMA4),
    "afmoe": replace(GGUF, norms=_GGUF_BEFORE | _GGUF_AFTER, output_gate="attn_gate"),
    "phi3": replace(GGUF, qkv=("attn_qkv",), gate_up=("ffn_up",)),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        replace(_GGUF_POST_ATTENTION, recurrent=GGUF_DELTA_NET),
    ),
    "qwen3_next": replace(_GGUF_POST_ATTENTION, recurrent=GGUF_QWEN3_NEXT),
    "qwen4_exp_text": replace(GGUF, recurrent=GGUF_DELTA_NET),
    "granitemoehybrid": replace(_GGUF_PAIRS, recurrent=GGUF_MAMBA2),
    "nemotron_h": replace(
        _GGUF_PAIRS,
        norms={"input_norm": "attn_norm", "post_norm": "attn_norm"},
        apart=True,
        recurrent=GGUF_MAMBA2,
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        replace(GGUF, last_norm="token_embd_norm.weight", recurrent=GGUF_SHORT_CONV),
    ),
}
