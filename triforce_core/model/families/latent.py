"""Families with latent attention (MLA): DeepSeek's, and models built like them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triforce_core.model.config import RopeConfig
from triforce_core.model.families.family import Family, Layers, activation
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.sigmoid import sigmoid_router
from triforce_core.model.families.sparse import experts_of, renamed, sparse_from, where
from triforce_core.model.feed_forward import DenseMLP, Router, Scores
from triforce_core.model.layers import LatentAttention, LayerSpec
from triforce_offload.errors import CheckpointError


def _latent(fields: Fields) -> LatentAttention:
    fields.only("attention_bias", False)
    fields.only("rope_interleave", True)
    keys, rotated = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    latent = fields.whole("kv_lora_rank")
    if latent % 2 or rotated % 2:
        raise CheckpointError(
            f"{fields.source}: kv_lora_rank {latent} and qk_rope_head_dim {rotated} must be even"
        )
    return LatentAttention(
        heads=fields.whole("num_attention_heads"),
        kv_heads=1,
        head_dim=latent + rotated,
        scale=(keys + rotated) ** -0.5 * _sharpening(fields) ** 2,
        latent=latent,
        key_dim=keys,
        value_dim=fields.whole("v_head_dim"),
        query_rank=fields.whole("q_lora_rank", 0, least=0),
    )


def _sharpening(fields: Fields) -> float:
    """Return the factor of queries and of keys in a model whose context was extended by YaRN, as
    transformers computes it.
    """
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{fields.source}: rope scaling must be an object, got {rope!r}")
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if not scaled or not rope.get("mscale_all_dim"):
        return 1.0
    known = Fields(rope, f"{fields.source}: rope scaling")
    factor = known.real("factor")
    if factor <= 1:
        return 1.0
    return 0.1 * known.real("mscale_all_dim") * math.log(factor) + 1


def latent_rope(rope: RopeConfig, layers: Layers) -> RopeConfig:
    """Return the rotary embedding of a model with these layers: of latent attention, it turns a
    part of the vector that a token keeps.
    """
    mixer = layers[0].mixer
    if not isinstance(mixer, LatentAttention):
        return rope
    share = {"partial_rotary_factor": mixer.rope_dim / mixer.head_dim}
    return replace(rope, parameters=MappingProxyType(dict(rope.parameters) | share))


def _router(fields: Fields) -> Router:
    """Return the router that scoring_func names."""
    fields.only("scoring_func", "softmax", "sigmoid")
    if fields.get("scoring_func") != "softmax":
        fields.only("topk_method", "noaux_tc")
        return sigmoid_router(fields)
    # With groups a token would choose them by their greatest score, not by a sum of two.
    fields.only("topk_method", "greedy")
    fields.only("n_group", 1)
    fields.only("norm_topk_prob", False)
    scale = fields.real("routed_scaling_factor", 1.0)
    return Router(Scores.SOFTMAX, normalised=False, scale=scale)


def _layers(fields: Fields, count: int) -> Layers:
    """The first layers have dense MLPs, and the others experts; or mlp_layer_types says which."""
    fields.only("moe_layer_freq", 1)
    mixer = _latent(fields)
    dense = DenseMLP(fields.whole("intermediate_size"), activation(fields, "hidden_act"))
    sparse = sparse_from(fields, count, fields.whole("first_k_dense_replace", least=0))
    layer = LayerSpec(mixer, dense)
    if not any(sparse):
        # The config may still give a number of experts, which then says nothing.
        fields.get("n_routed_experts")
        return (layer,) * count
    shared = fields.whole("n_shared_experts", 1, least=0) * fields.whole("moe_intermediate_size")
    experts = experts_of(fields, "n_routed_experts", _router(fields), shared=shared)
    return where(layer, experts, sparse)


# What transformers' configs take for fields that are not there.
_SIZES: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
}
_V2 = _SIZES | {
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "scoring_func": "softmax",
}
_V3 = _SIZES | {
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
_GLM = _SIZES | {
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}
_RENAMED = renamed("n_routed_experts")
LATENT = (
    Family("deepseek_v2", "DeepseekV2", _layers, defaults=_V2, renamed=_RENAMED),
    Family("deepseek_v3", "DeepseekV3", _layers, defaults=_V3, renamed=_RENAMED),
    Family("glm4_moe_lite", "Glm4MoeLite", _layers, defaults=_GLM, renamed=_RENAMED),
)
