"""Gemma 2, 3 and 4: what their config.json says of their layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from triforce_core.model.families.family import Family, Layers, activation, layer, with_windows
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import windows
from triforce_core.model.feed_forward import Activation, ExpertsBeside
from triforce_core.model.layers import LayerSpec, NormKind, Norms
from triforce_core.model.parts.specs import PerLayerInputs
from triforce_offload.errors import CheckpointError, UnsupportedModelError


def _seen(fields: Fields, count: int) -> tuple[int | None, ...]:
    """Return the window of each layer. Without layer_types, every sixth layer has none."""
    every = fields.whole("sliding_window_pattern", 6)
    return windows(fields, count, lambda index: (index + 1) % every != 0)


def _gemma2(fields: Fields, count: int) -> Layers:
    """Every second layer has a window, beginning with the first."""
    found = windows(fields, count, lambda index: index % 2 == 0)
    cap = _cap(fields, "attn_logit_softcapping")
    return with_windows(fields, found, scale=_scale(fields), score_cap=cap, **_common(fields))


def _gemma3(fields: Fields, count: int) -> Layers:
    found, scale = _seen(fields, count), _scale(fields)
    return with_windows(fields, found, scale=scale, qk_norm=True, **_common(fields))


def _scale(fields: Fields) -> float | None:
    head_dim = fields.whole("head_dim")
    scalar = fields.real("query_pre_attn_scalar", head_dim)
    return None if scalar == head_dim else scalar**-0.5


def _cap(fields: Fields, name: str) -> float | None:
    """Return a cap, None for none. Raises CheckpointError."""
    return None if fields.get(name) is None else fields.real(name)


def _common(fields: Fields) -> dict[str, Any]:
    """Return what layers of Gemma 2, 3 and 4 have in common, see `layer`."""
    bias = fields.flag("attention_bias", False)
    return {
        "norms": Norms.AROUND,
        "qkv_bias": bias,
        "output_bias": bias,
        "activates": "hidden_activation",
    }


def _gemma4(fields: Fields, count: int) -> Layers:
    """Layers without a window have heads of another size and number, and may have no values of
    their own. In the small models (E2B, E4B) the last layers have neither keys nor values, and all
    take numbers of their token.
    """
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise UnsupportedModelError(
            f"{fields.source}: use_bidirectional_attention "
            f"({fields.raw['use_bidirectional_attention']!r}) is not supported (only 'vision', "
            "since images are not read)"
        )
    found = _seen(fields, count)
    if found[-1] is not None:
        raise UnsupportedModelError(f"{fields.source}: a window in the last layer is not supported")
    full = _full_layers(fields, [index for index, window in enumerate(found) if window is None])
    kinds = {window: _gemma4_layer(fields, window, full) for window in dict.fromkeys(found)}
    return _with_shared_keys(fields, [kinds[window] for window in found])


def _with_shared_keys(fields: Fields, layers: list[LayerSpec]) -> Layers:
    """Return the layers, of which the last ones take the keys and values of the last layer before
    them that sees as much. Raises CheckpointError.
    """
    sharing = fields.whole("num_kv_shared_layers", 0, least=0)
    own = len(layers) - sharing
    if not sharing:
        return tuple(layers)
    sources = {spec.mixer.window: index for index, spec in enumerate(layers[: max(own, 0)])}
    if {spec.mixer.window for spec in layers} - sources.keys():
        raise CheckpointError(
            f"{fields.source}: num_kv_shared_layers ({sharing}) leaves no layer of each kind with "
            f"keys of its own, of {len(layers)}"
        )
    wider = 1 + fields.flag("use_double_wide_mlp", False)

    def shared(index: int, spec: LayerSpec) -> LayerSpec:
        if index < own:
            shares = index in sources.values()
            return replace(spec, mixer=replace(spec.mixer, shares_kv=shares))
        dense = "shared" if isinstance(spec.mlp, ExpertsBeside) else "width"
        mlp = replace(spec.mlp, **{dense: wider * getattr(spec.mlp, dense)})
        return replace(spec, mixer=replace(spec.mixer, **_REUSES_KV), mlp=mlp)

    return tuple(shared(index, spec) for index, spec in enumerate(layers))


def _gemma4_layer(fields: Fields, window: int | None, full: Mapping[str, Any]) -> LayerSpec:
    """full: fields of the heads of layers without a window"""
    own = fields if window else Fields({**fields.raw, **full}, fields.source, fields.read)
    spec = layer(
        own,
        value_norm=True,
        projects_values=window is not None or not fields.flag("attention_k_eq_v", False),
        scale=1.0,
        window=window,
        qk_norm=True,
        **_common(fields),
    )
    if fields.flag("enable_moe_block", False):
        spec = replace(spec, mlp=_experts_beside(fields))
    width = fields.whole("hidden_size_per_layer_input", least=0)
    if width and activation(fields, "hidden_activation") is not Activation.GELU_TANH:
        raise UnsupportedModelError(
            f"{fields.source}: hidden_size_per_layer_input ({width}) is supported with a "
            "hidden_activation of 'gelu_pytorch_tanh' alone"
        )
    return replace(
        spec, output_scale=True, per_layer_inputs=PerLayerInputs(width) if width else None
    )


def _experts_beside(fields: Fields) -> ExpertsBeside:
    return ExpertsBeside(
        fields.whole("num_experts"),
        fields.whole("top_k_experts"),
        fields.whole("moe_intermediate_size"),
        shared=fields.whole("intermediate_size"),
        activation=activation(fields, "hidden_activation"),
    )


def _full_layers(fields: Fields, full: list[int]) -> Mapping[str, Any]:
    """Return the fields of layers without a window that differ from the others: as the first
    configs have them, or as transformers 5 writes them, by layer. Raises CheckpointError.
    """
    given = fields.get("per_layer_config")
    if given is None:
        own = {"head_dim": fields.whole("global_head_dim")}
        heads = fields.get("num_global_key_value_heads")
        if heads is not None and fields.flag("attention_k_eq_v", False):
            own["num_key_value_heads"] = heads
        return own
    known = {"head_dim", "num_key_value_heads"}
    if (
        not isinstance(given, Mapping)
        or sorted(given) != sorted(map(str, full))
        or not all(isinstance(each, Mapping) and known.issuperset(each) for each in given.values())
        or any(each != given[str(full[0])] for each in given.values())
    ):
        raise CheckpointError(
            f"{fields.source}: per_layer_config must give the layers without a window "
            f"({', '.join(map(str, full))}) the same head_dim and num_key_value_heads, "
            f"got {given!r}"
        )
    return given[str(full[0])]


def _scales(fields: Fields) -> dict[str, float | None]:
    return {
        "embedding_scale": fields.whole("hidden_size") ** 0.5,
        "logit_cap": _cap(fields, "final_logit_softcapping"),
    }


# Of a layer whose keys and values are another's.
_REUSES_KV = {
    **dict.fromkeys(("projects_keys", "projects_values", "value_norm"), False),
    "reuses_kv": True,
}
# What transformers' configs take for fields that are not there.
_SAME = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    **_SAME,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **_SAME,
    "vocab_size": 262208,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_GEMMA4 = {
    **_SAME,
    "vocab_size": 262144,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}
_GEMMA4_UNIFIED = {
    **_GEMMA4,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
}
GEMMA = (
    Family(
        "gemma2",
        "Gemma2",
        _gemma2,
        _scales,
        defaults=_GEMMA2,
        norm_kind=NormKind.RMS_PLUS_ONE,
    ),
    Family(
        "gemma3_text",
        "Gemma3",
        _gemma3,
        _scales,
        defaults=_GEMMA3,
        norm_kind=NormKind.RMS_PLUS_ONE,
    ),
    Family(
        "gemma4_text",
        "Gemma4",
        _gemma4,
        _scales,
        defaults=_GEMMA4,
        norm_kind=NormKind.RMS_FLOAT32,
    ),
    Family(
        "gemma4_unified_text",
        "Gemma4Unified",
        _gemma4,
        _scales,
        defaults=_GEMMA4_UNIFIED,
        norm_kind=NormKind.RMS_FLOAT32,
    ),
)
