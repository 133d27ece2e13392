"""Families of mixtures of experts that score experts by sigmoids, as DeepSeek-V3 did first."""

from __future__ import annotations

from dataclasses import replace

from triforce_core.model.families.family import Family, Layers, exaone_layers, layer
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL, SLIDING, windows
from triforce_core.model.families.recurrent import LFM2, LFM2_RENAMED, lfm2_layers
from triforce_core.model.families.sparse import alternating, experts_of, renamed, sparse_from, where
from triforce_core.model.feed_forward import Router, Scores
from triforce_core.model.layers import HeadGate, NormKind, Norms
from triforce_offload.errors import CheckpointError


def sigmoid_router(fields: Fields, *, biased: bool = True) -> Router:
    """Return a router as its fields describe it under DeepSeek-V3's names."""
    return Router(
        Scores.SIGMOID,
        fields.flag("norm_topk_prob", True),
        biased=biased,
        scale=fields.real("routed_scaling_factor", 1.0),
        groups=fields.whole("n_group", 1),
        chosen_groups=fields.whole("topk_group", 1),
    )


def _glm4_moe(fields: Fields, count: int) -> Layers:
    first = fields.whole("first_k_dense_replace", 1, least=0)
    router = sigmoid_router(fields)
    shared = fields.whole("n_shared_experts", 1) * fields.whole("moe_intermediate_size")
    experts = experts_of(fields, "n_routed_experts", router, shared=shared)
    bias, norm = fields.flag("attention_bias", False), fields.flag("use_qk_norm", False)
    dense = layer(fields, qkv_bias=bias, qk_norm=norm)
    return where(dense, experts, [index >= first for index in range(count)])


def _solar_open(fields: Fields, count: int) -> Layers:
    """Every layer has experts beside shared ones."""
    fields.only("first_k_dense_replace", 0)
    fields.only("use_qk_norm", False)
    shared = fields.whole("n_shared_experts", 1) * fields.whole("moe_intermediate_size")
    experts = experts_of(fields, "n_routed_experts", sigmoid_router(fields), shared=shared)
    bias = fields.flag("attention_bias", False)
    return (layer(fields, mlp=experts, qkv_bias=bias),) * count


def _dots1(fields: Fields, count: int) -> Layers:
    """Layers from max_window_layers on have a window, if there is one."""
    windowed = fields.whole("max_window_layers", 62, least=0)
    sparse = fields.whole("first_k_dense_replace", 0, least=0)
    router = sigmoid_router(fields)
    shared = fields.whole("n_shared_experts") * fields.whole("moe_intermediate_size")
    experts = experts_of(fields, "n_routed_experts", router, shared=shared)
    bias = fields.flag("attention_bias", False)
    seen = windows(fields, count, lambda index: index >= windowed)
    same = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return alternating(fields, seen, experts, [index >= sparse for index in range(count)], **same)


def _exaone_moe(fields: Fields, count: int) -> Layers:
    """As in EXAONE 4, full-attention layers do not rotate in models that have windows elsewhere."""
    first = fields.whole("first_k_dense_replace", 1, least=0)
    shared = fields.whole("num_shared_experts", 1) * fields.whole("moe_intermediate_size")
    experts = experts_of(fields, "num_experts", sigmoid_router(fields), shared=shared)
    sparse = sparse_from(fields, count, first)
    layers = exaone_layers(fields, count, Norms.BEFORE)
    return tuple(
        replace(spec, mlp=experts) if each else spec
        for spec, each in zip(layers, sparse, strict=True)
    )


def _hy_v3(fields: Fields, count: int) -> Layers:
    """The first layer alone is dense, if mlp_layer_types does not say otherwise."""
    router = Router(Scores.SIGMOID, biased=True, scale=fields.real("router_scaling_factor", 2.826))
    shared = fields.whole("num_shared_experts", 1) * fields.whole("moe_intermediate_size")
    experts = experts_of(fields, "num_experts", router, shared=shared)
    bias = fields.flag("attention_bias", False)
    dense = layer(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return where(dense, experts, sparse_from(fields, count, 1))


def _afmoe(fields: Fields, count: int) -> Layers:
    """Only layers with a window rotate. Without layer_types, one of a few layers is without one."""
    fields.only("score_func", "sigmoid")
    fields.only("n_group", 1)
    fields.only("attention_bias", False)
    fields.only("num_expert_groups", 1)
    fields.only("route_norm", True)
    every = fields.whole("global_attn_every_n_layers", 4)
    dense = fields.whole("num_dense_layers", 1, least=0)
    router = Router(Scores.SIGMOID, biased=True, scale=fields.real("route_scale", 1.0))
    shared = fields.whole("num_shared_experts", 0, least=0) * fields.whole("moe_intermediate_size")
    experts = experts_of(fields, "num_experts", router, shared=shared)
    layers = []
    for index, window in enumerate(windows(fields, count, lambda each: (each + 1) % every != 0)):
        spec = layer(
            fields,
            norms=Norms.AROUND,
            qk_norm=True,
            output_gate=True,
            window=window,
            rotated=window is not None,
        )
        layers.append(spec if index < dense else replace(spec, mlp=experts))
    return tuple(layers)


def _afmoe_scales(fields: Fields) -> dict[str, float]:
    scaled = fields.flag("mup_enabled", False)
    return {"embedding_scale": fields.whole("hidden_size") ** 0.5} if scaled else {}


def _minimax_m2(fields: Fields, count: int) -> Layers:
    """Other models of MiniMax have linear attention or a shared expert, and are refused."""
    fields.only("attn_type_list", [1] * count)
    fields.only("shared_intermediate_size", 0)
    fields.only("scoring_func", "sigmoid")
    fields.only("use_routing_bias", True)
    fields.only("use_qk_norm", True)
    fields.only("qk_norm_type", "per_layer")
    router = Router(Scores.SIGMOID, biased=True)
    experts = experts_of(fields, "num_local_experts", router, width="intermediate_size")
    return (layer(fields, mlp=experts, qk_norm=True, norm_over_heads=True),) * count


def _laguna(fields: Fields, count: int) -> Layers:
    """Layers with a window may have more query heads than the others. Without mlp_layer_types the
    first layer alone is dense.
    """
    fields.only("gating", True, "per-head", "per_head")
    fields.only("gating_types", ["per_head"] * count, ["per-head"] * count)
    fields.only("attention_bias", False)
    fields.only("norm_topk_prob", True)
    fields.only("moe_apply_router_weight_on_input", False)
    fields.only("moe_router_logit_softcapping", 0)
    fields.only("moe_router_score_func", "sigmoid")
    fields.only("moe_router_use_sigmoid", True)
    for name in ("swa_attention_sink_enabled", "qkv_bias"):
        fields.only(name, False)
    # As the first files said it.
    fields.only("swa_rope_parameters")
    router = Router(
        Scores.SIGMOID, biased=True, scale=fields.real("moe_routed_scaling_factor", 1.0)
    )
    shared = fields.whole("shared_expert_intermediate_size")
    experts = experts_of(fields, "num_experts", router, shared=shared)
    usual = [fields.whole("num_attention_heads")] * count
    heads = fields.wholes("num_attention_heads_per_layer", count, usual)
    layers = []
    for window, own, sparse in zip(
        windows(fields, count, lambda _: False), heads, sparse_from(fields, count, 1), strict=True
    ):
        spec = layer(fields, heads=own, window=window, qk_norm=True, head_gate=HeadGate.SOFTPLUS)
        layers.append(replace(spec, mlp=experts) if sparse else spec)
    return tuple(layers)


def _lfm2_moe(fields: Fields, count: int) -> Layers:
    """The first layers have dense MLPs. transformers adds 1e-6 to the sum of the chosen scores;
    llama.cpp and this program do not.
    """
    if fields.get("layer_types") is None and fields.get("full_attn_idxs") is None:
        raise CheckpointError(f"{fields.source}: layer_types is missing")
    router = sigmoid_router(fields, biased=fields.flag("use_expert_bias", True))
    experts = experts_of(fields, "num_experts", router)
    first = fields.whole("num_dense_layers", 2, least=0)
    return tuple(
        spec if index < first else replace(spec, mlp=experts)
        for index, spec in enumerate(lfm2_layers(fields, count))
    )


# What transformers' configs take for fields that are not there.
_GLM = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
}
_SOLAR = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    # Layers have no dense MLP, and files need not give its width.
    "intermediate_size": 1280,
}
_DOTS1 = {
    "norm_topk_prob": False,
    "sliding_window": 4096,
    # transformers has none for these: those of the published model.
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
}
_EXAONE_MOE = {
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5,
}
_HY_V3 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11_158_840.0,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
_AFMOE = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "moe_intermediate_size": 1408,
}
_MINIMAX_M2 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5e6,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
_LAGUNA = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
_LFM2_MOE = LFM2 | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}
SIGMOID = (
    Family(
        "glm4_moe",
        "Glm4Moe",
        _glm4_moe,
        defaults=_GLM,
        renamed=renamed("n_routed_experts"),
    ),
    Family(
        "solar_open",
        "SolarOpen",
        _solar_open,
        defaults=_SOLAR,
        renamed=renamed("n_routed_experts"),
    ),
    Family("dots1", "Dots1", _dots1, defaults=_DOTS1, renamed=renamed("n_routed_experts")),
    Family(
        "exaone_moe",
        "ExaoneMoe",
        _exaone_moe,
        defaults=_EXAONE_MOE,
        renamed=renamed("num_experts"),
    ),
    Family("hy_v3", "HYV3", _hy_v3, defaults=_HY_V3, renamed=renamed("num_experts")),
    Family(
        "afmoe",
        "Afmoe",
        _afmoe,
        _afmoe_scales,
        defaults=_AFMOE,
        norm_kind=NormKind.RMS_FLOAT32,
        renamed=renamed("num_experts"),
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2",
        _minimax_m2,
        defaults=_MINIMAX_M2,
        renamed=renamed("num_local_experts"),
    ),
    Family("laguna", "Laguna", _laguna, defaults=_LAGUNA, renamed=renamed("num_experts")),
    Family(
        "lfm2_moe",
        "Lfm2Moe",
        _lfm2_moe,
        defaults=_LFM2_MOE,
        norm_eps="norm_eps",
        renamed=LFM2_RENAMED | renamed("num_experts"),
    ),
)
