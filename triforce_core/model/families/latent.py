"""Families with latent attention (MLA): DeepSeek's, and models built like them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


def _latent(fields: Fields, *, sharpened: bool) -> LatentAttention:
    """sharpened: whether YaRN changes the scale of scores"""
    fields.only("attention_bias", False)
    fields.only("rope_interleave", True)
    keys, rotated = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    latent = fields.whole("kv_lora_rank")
    if latent % 2 or rotated % 2:
        raise CheckpointError(
            f"{fields.source}: kv_lora_rank {latent} and qk_rope_head_dim {rotated} must be even"
        )
    sharpening = _sharpening(fields) if sharpened else 1.0
    return LatentAttention(
        heads=fields.whole("num_attention_heads"),
        kv_heads=1,
        head_dim=latent + rotated,
        scale=(keys + rotated) ** -0.5 * sharpening**2,
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


def of_rope(raw: Mapping[str, Any], layers: Layers) -> Mapping[str, Any]:
    """Return a config.json of a model with these layers as its rotary embedding is read. That of
    latent attention may give the share of a query that is rotated, which its sizes say too.
    """
    scaling = raw.get("rope_parameters")
    if not isinstance(layers[0].mixer, LatentAttention) or not isinstance(scaling, Mapping):
        return raw
    own = {name: value for name, value in scaling.items() if name != "partial_rotary_factor"}
    return {**raw, "rope_parameters": own}


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


def _router_of_mistral(fields: Fields) -> Router:
    """Return a router that scores experts by a softmax."""
    return replace(sigmoid_router(fields, biased=False), scores=Scores.SOFTMAX)


def _layers(
    fields: Fields,
    count: int,
    router: Callable[[Fields], Router] = _router,
    *,
    sharpened: bool = True,
) -> Layers:
    """The first layers have dense MLPs, and the others experts; or mlp_layer_types says which."""
    fields.only("moe_layer_freq", 1)
    mixer = _latent(fields, sharpened=sharpened)
    dense = DenseMLP(fields.whole("intermediate_size"), activation(fields, "hidden_act"))
    sparse = sparse_from(fields, count, fields.whole("first_k_dense_replace", least=0))
    layer = LayerSpec(mixer, dense)
    if not any(sparse):
        # The config may still give a number of experts, which then says nothing.
        fields.get("n_routed_experts")
        return (layer,) * count
    shared = fields.whole("n_shared_experts", 1, least=0) * fields.whole("moe_intermediate_size")
    experts = experts_of(fields, "n_routed_experts", router(fields), shared=shared)
    return where(layer, experts, sparse)


def _layers_of_mistral(fields: Fields, count: int) -> Layers:
    """Queries grow with their position, and so YaRN does not change the scale of scores. The
    publisher's params.json says this (`apply_scale`), and vLLM, SGLang and the first versions of
    transformers compute it, though config.json has the field by which transformers later does.
    """
    return _layers(fields, count, _router_of_mistral, sharpened=False)


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
_MISTRAL4 = _SIZES | {
    "first_k_dense_replace": 0,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_RENAMED = renamed("n_routed_experts")
LATENT = (
    Family("deepseek_v2", "DeepseekV2", _layers, defaults=_V2, renamed=_RENAMED),
    Family("deepseek_v3", "DeepseekV3", _layers, defaults=_V3, renamed=_RENAMED),
    Family("glm4_moe_lite", "Glm4MoeLite", _layers, defaults=_GLM, renamed=_RENAMED),
    Family(
        "mistral4",
        "Mistral4",
        _layers_of_mistral,
        defaults=_MISTRAL4,
        renamed=_RENAMED,
    ),
)
