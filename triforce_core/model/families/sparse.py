"""Families of mixtures of experts: what their config.json says of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from triforce_core.model.families.family import (
    EXPERT_COUNTS,
    Family,
    Layers,
    activation,
    granite_scales,
    layer,
)
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL, SLIDING, windows, windows_if_shorter
from triforce_core.model.families.recurrent import QWEN3_5, qwen3_5_layers
from triforce_core.model.feed_forward import Activation, DenseMLP, Experts, Router
from triforce_core.model.layers import LayerSpec, NormKind, Norms
from triforce_offload.errors import CheckpointError

# Least sum of a token's scores in ERNIE: those of a softmax never are so small.
_NORM_MIN = 1e-12


def experts_of(
    fields: Fields,
    count: str,
    router: Router,
    *,
    active: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
    shared: int = 0,
    gated_shared: bool = False,
) -> Experts:
    """Return the experts of a layer. count, active, width: the fields that give them"""
    return Experts(
        fields.whole(count),
        fields.whole(active),
        fields.whole(width),
        router,
        shared,
        gated_shared,
        activation(fields, "hidden_act"),
    )


def where(dense: LayerSpec, experts: Experts, sparse: list[bool]) -> Layers:
    """Return layers of which those that are marked have experts."""
    kinds = {False: dense, True: replace(dense, mlp=experts)}
    return tuple(kinds[each] for each in sparse)


def sparse_from(fields: Fields, count: int, first: int) -> list[bool]:
    """Return which layers have experts: those that mlp_layer_types names, or without it all from
    `first` on. Raises CheckpointError.
    """
    usual = ["dense" if index < first else "sparse" for index in range(count)]
    kinds = fields.of_layers("mlp_layer_types", count, usual)
    if unknown := sorted(set(map(str, kinds)) - {"dense", "sparse"}):
        raise CheckpointError(f"{fields.source}: mlp_layer_types names {unknown[0]!r}")
    return [kind == "sparse" for kind in kinds]


def alternating(
    fields: Fields,
    seen: Sequence[int | None],
    experts: Experts,
    sparse: list[bool],
    **same: bool,
) -> Layers:
    """Return layers with these windows, of which those that are marked have experts."""
    dense = {window: layer(fields, window=window, **same) for window in dict.fromkeys(seen)}
    return tuple(
        replace(dense[window], mlp=experts) if each else dense[window]
        for window, each in zip(seen, sparse, strict=True)
    )


def _mixtral(fields: Fields, count: int) -> Layers:
    seen = windows_if_shorter(fields, count)
    experts = experts_of(fields, "num_local_experts", Router(), width="intermediate_size")
    kinds = {window: layer(fields, mlp=experts, window=window) for window in set(seen)}
    return tuple(kinds[window] for window in seen)


def _sparse_of_qwen(fields: Fields, count: int) -> list[bool]:
    """Return which layers have experts: those at multiples of decoder_sparse_step that
    mlp_only_layers does not name. Raises CheckpointError.
    """
    step, dense = fields.whole("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise CheckpointError(f"{fields.source}: mlp_only_layers must be a list, got {dense!r}")
    return [(index + 1) % step == 0 and index not in dense for index in range(count)]


def beside_a_gated_one(fields: Fields, router: Router) -> Experts:
    """Return experts beside a shared one, the output of which a gate scales."""
    shared = fields.whole("shared_expert_intermediate_size")
    return experts_of(fields, "num_experts", router, shared=shared, gated_shared=True)


def _qwen2_moe(fields: Fields, count: int) -> Layers:
    first = fields.whole("max_window_layers", 28, least=0)
    seen = windows(fields, count, lambda index: index % 2 == 0 and index < first)
    experts = beside_a_gated_one(fields, Router(normalised=fields.flag("norm_topk_prob", False)))
    bias, sparse = fields.flag("qkv_bias", True), _sparse_of_qwen(fields, count)
    return alternating(fields, seen, experts, sparse, qkv_bias=bias)


def _qwen3_moe(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    router = Router(normalised=fields.flag("norm_topk_prob", False))
    same = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    experts, sparse = experts_of(fields, "num_experts", router), _sparse_of_qwen(fields, count)
    return alternating(fields, windows_if_shorter(fields, count), experts, sparse, **same)


def _mellum(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    router = Router(normalised=fields.flag("norm_topk_prob", True))
    same = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    experts = experts_of(fields, "num_experts", router)
    seen = windows(fields, count, lambda _: False)
    return alternating(fields, seen, experts, sparse_from(fields, count, 0), **same)


def _olmoe(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    router = Router(normalised=fields.flag("norm_topk_prob", False))
    experts = experts_of(fields, "num_experts", router, width="intermediate_size")
    norms = {"qk_norm": True, "norm_over_heads": True}
    return (layer(fields, mlp=experts, qkv_bias=bias, output_bias=bias, **norms),) * count


def _flex_olmo(fields: Fields, count: int) -> Layers:
    """As in OLMoE, with norms as in OLMo 2."""
    layers = _olmoe(fields, count)
    return (replace(layers[0], norms=Norms.AFTER),) * count


def _granitemoe(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    residual, scale = (fields.real(f"{name}_multiplier", 1.0) for name in ("residual", "attention"))
    experts = experts_of(fields, "num_local_experts", Router(), width="intermediate_size")
    same = {"qkv_bias": bias, "output_bias": bias, "scale": scale}
    return (layer(fields, mlp=experts, residual_scale=residual, **same),) * count


def _ernie4_5_moe(fields: Fields, count: int) -> Layers:
    first = fields.whole("moe_layer_start_index", 1, least=0)
    every = fields.whole("moe_layer_interval", 1)
    last = fields.get("moe_layer_end_index")
    last = count - 1 if last in (None, -1) else fields.whole("moe_layer_end_index", least=0)
    shared = fields.whole("moe_num_shared_experts", 2, least=0)
    fields.only("moe_norm_min", _NORM_MIN)
    experts = experts_of(
        fields,
        "moe_num_experts",
        Router(biased=True),
        active="moe_k",
        shared=shared * fields.whole("moe_intermediate_size"),
    )
    sparse = [first <= index <= last and (index + 1) % every == 0 for index in range(count)]
    return where(layer(fields), experts, sparse)


def _qwen3_5_moe(fields: Fields, count: int) -> Layers:
    return qwen3_5_layers(fields, count, mlp=beside_a_gated_one(fields, Router()))


def _qwen3_next(fields: Fields, count: int) -> Layers:
    experts = beside_a_gated_one(fields, Router(normalised=fields.flag("norm_topk_prob", True)))
    layers = qwen3_5_layers(fields, count, mlp=experts)
    dense = DenseMLP(fields.whole("intermediate_size"), experts.activation)
    return tuple(
        spec if sparse else replace(spec, mlp=dense)
        for spec, sparse in zip(layers, _sparse_of_qwen(fields, count), strict=True)
    )


def _gpt_oss(fields: Fields, count: int) -> Layers:
    """Every second layer has a window, from the first one on."""
    bias = fields.flag("attention_bias", True)
    fields.only("swiglu_limit", 7.0)
    fields.only("swiglu_alpha", 1.702)
    experts = replace(
        experts_of(
            fields, "num_local_experts", Router(linear_bias=True), width="intermediate_size"
        ),
        activation=Activation.CLAMPED,
        biases=True,
    )
    seen = windows(fields, count, lambda index: index % 2 == 0)
    same = {"qkv_bias": bias, "output_bias": bias, "sinks": True}
    kinds = {each: layer(fields, mlp=experts, window=each, **same) for each in set(seen)}
    return tuple(kinds[each] for each in seen)


def renamed(own: str) -> dict[str, str]:
    """Return a family's name of the number of experts by the names in other files."""
    return {name: own for name in EXPERT_COUNTS if name != own}


# What transformers' configs take for fields that are not there.
_MIXTRAL = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN2 = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3 = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_OLMOE = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
_FLEX_OLMO = {"rope_theta": 5e5, "num_experts": 7, "num_experts_per_tok": 5}
_GRANITE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_ERNIE = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
}
_QWEN3_5 = {
    **QWEN3_5,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_MELLUM = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 896,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 5e5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
QWEN3_NEXT = {**_QWEN3_5, "num_experts": 512, "num_experts_per_tok": 10}
_GPT_OSS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
SPARSE = (
    Family(
        "mixtral",
        "Mixtral",
        _mixtral,
        defaults=_MIXTRAL,
        renamed=renamed("num_local_experts"),
    ),
    Family("qwen2_moe", "Qwen2Moe", _qwen2_moe, defaults=_QWEN2),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        _qwen3_moe,
        defaults=_QWEN3,
        renamed=renamed("num_experts"),
    ),
    Family("mellum", "Mellum", _mellum, defaults=_MELLUM, renamed=renamed("num_experts")),
    Family("olmoe", "Olmoe", _olmoe, defaults=_OLMOE, renamed=renamed("num_experts")),
    Family(
        "flex_olmo",
        "FlexOlmo",
        _flex_olmo,
        defaults=_FLEX_OLMO,
        norm_kind=NormKind.RMS_FLOAT32,
        renamed=renamed("num_experts"),
    ),
    Family("granitemoe", "GraniteMoe", _granitemoe, granite_scales, defaults=_GRANITE),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        _ernie4_5_moe,
        defaults=_ERNIE,
        renamed=renamed("moe_num_experts") | {"num_experts_per_tok": "moe_k"},
    ),
    Family(
        "gpt_oss",
        "GptOss",
        _gpt_oss,
        defaults=_GPT_OSS,
        renamed=renamed("num_local_experts"),
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        _qwen3_5_moe,
        defaults=_QWEN3_5,
        norm_kind=NormKind.RMS_PLUS_ONE,
    ),
    Family(
        "qwen3_next",
        "Qwen3Next",
        _qwen3_next,
        defaults=QWEN3_NEXT,
        norm_kind=NormKind.RMS_PLUS_ONE,
    ),
)
