"""Families of dense models: what each one's config.json says of its layers.

A family is a description. It has no forward code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triforce_core.model.families.fields import Fields
from triforce_core.model.families.windows import windows, windows_if_shorter
from triforce_core.model.layers import (
    Activation,
    Attention,
    DenseMLP,
    LayerSpec,
    NormKind,
    Norms,
)
from triforce_offload.errors import CheckpointError, UnsupportedModelError

Layers = tuple[LayerSpec, ...]


def _no_scales(fields: Fields) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    name: `model_type` in config.json
    hf_class: transformers' name of the model, before `ForCausalLM`
    layers: returns the layers of a model, from its config and their number
    scales: returns the scales of a ModelConfig
    defaults: values of fields that a config does not mention, where they are not the usual ones
    norm_kind: how norms are computed
    unscaled_windows: whether a scaled rotary embedding is not scaled in layers with a window
    """

    name: str
    hf_class: str
    layers: Callable[[Fields, int], Layers]
    scales: Callable[[Fields], Mapping[str, float]] = _no_scales
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm_kind: NormKind = NormKind.RMS
    unscaled_windows: bool = False

    @property
    def norm_eps(self) -> str:
        """The field of what norms add to the mean of squares."""
        return "layer_norm_eps" if self.norm_kind is NormKind.LAYER else "rms_norm_eps"

    def completed(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the family's defaults. null is a default too, except that it says
        that there is no window.
        """
        absent = {
            name: value
            for name, value in self.defaults.items()
            if name not in raw or (raw[name] is None and name != "sliding_window")
        }
        return {**raw, **absent}


def _layer(
    fields: Fields,
    *,
    norms: Norms = Norms.BEFORE,
    residual_scale: float = 1.0,
    qkv_bias: bool = False,
    output_bias: bool = False,
    activation: str = "hidden_act",
    **attention: bool | float | None,
) -> LayerSpec:
    """Return a layer.

    activation: the field that names the MLP's activation
    attention: further fields of Attention
    """
    heads = fields.whole("num_attention_heads")
    mixer = Attention(
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", fields.whole("hidden_size") // heads or 1),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        **attention,
    )
    mlp = DenseMLP(fields.whole("intermediate_size"), _activation(fields, activation))
    return LayerSpec(mixer, mlp, norms, residual_scale)


def _activation(fields: Fields, name: str) -> Activation:
    value, known = fields.raw.get(name, "silu"), [each.value for each in Activation]
    if value not in known:
        raise UnsupportedModelError(f"{name} {value!r} is not supported (only {', '.join(known)})")
    return Activation(value)


def _with_windows(
    fields: Fields, windows: Sequence[int | None], **same: bool | float | Norms
) -> Layers:
    """Return layers that differ in their windows alone. same: fields of all, see `_layer`"""
    kinds = {window: _layer(fields, window=window, **same) for window in set(windows)}
    return tuple(kinds[window] for window in windows)


def _llama(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (_layer(fields, qkv_bias=bias, output_bias=bias),) * count


def _mistral(fields: Fields, count: int) -> Layers:
    """Every layer has a window, if there is one."""
    return _with_windows(fields, windows_if_shorter(fields, count))


def _late(fields: Fields) -> Callable[[int], bool]:
    """Layers from max_window_layers on have a window."""
    first = fields.whole("max_window_layers", 28, least=0)
    return lambda layer: layer >= first


def _qwen2(fields: Fields, count: int) -> Layers:
    """Queries, keys and values always have a bias."""
    return _with_windows(fields, windows(fields, count, _late(fields)), qkv_bias=True)


def _qwen3(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    same = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return _with_windows(fields, windows(fields, count, _late(fields)), **same)


def _seed_oss(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", True), fields.flag("attention_out_bias", False)
    return (_layer(fields, qkv_bias=bias[0], output_bias=bias[1]),) * count


def _smollm3(fields: Fields, count: int) -> Layers:
    """Layers whose entry of no_rope_layers is 0 do not rotate; without a list, every fourth."""
    bias = fields.flag("attention_bias", False)
    every = fields.whole("no_rope_layer_interval", 4)
    rotates = fields.get("no_rope_layers")
    if rotates is None:
        rotates = [int((layer + 1) % every != 0) for layer in range(count)]
    if (
        not isinstance(rotates, list)
        or len(rotates) != count
        or any(each not in (0, 1) for each in rotates)
    ):
        raise CheckpointError(
            f"{fields.source}: no_rope_layers must be a list of {count} zeros and ones, "
            f"got {rotates!r}"
        )
    seen = windows(fields, count, lambda layer: not rotates[layer])
    return tuple(
        _layer(fields, qkv_bias=bias, output_bias=bias, rotated=bool(each), window=window)
        for each, window in zip(rotates, seen, strict=True)
    )


def _olmo2(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    norms = {"norms": Norms.AFTER, "qk_norm": True, "norm_over_heads": True}
    return (_layer(fields, qkv_bias=bias, output_bias=bias, **norms),) * count


def _olmo3(fields: Fields, count: int) -> Layers:
    """Three of four layers have a window. Only the others rotate as rope_scaling says."""
    bias = fields.flag("attention_bias", False)
    norms = {"norms": Norms.AFTER, "qk_norm": True, "norm_over_heads": True}
    seen = windows(fields, count, lambda layer: (layer + 1) % 4 != 0)
    return _with_windows(fields, seen, qkv_bias=bias, output_bias=bias, **norms)


def _pattern(fields: Fields) -> int:
    """Return of how many layers the last one has no window. "LLLG" says the same as 4."""
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return len(pattern)
    return fields.whole("sliding_window_pattern", 4)


def _exaone4(fields: Fields, count: int) -> Layers:
    """In models that have windows elsewhere, full-attention layers do not rotate."""
    rotates_all = fields.get("sliding_window") is None
    seen = windows(fields, count, lambda layer: (layer + 1) % _pattern(fields) != 0)
    return tuple(
        _layer(
            fields,
            norms=Norms.AFTER,
            qk_norm=True,
            rotated=rotates_all or window is not None,
            window=window,
        )
        for window in seen
    )


def _granite(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    residual, scale = (fields.real(f"{name}_multiplier", 1.0) for name in ("residual", "attention"))
    layer = _layer(fields, qkv_bias=bias, output_bias=bias, residual_scale=residual, scale=scale)
    return (layer,) * count


def _granite_scales(fields: Fields) -> dict[str, float]:
    return {
        "embedding_scale": fields.real("embedding_multiplier", 1.0),
        "logit_scale": 1 / fields.real("logits_scaling", 1.0),
    }


def _glm(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (_layer(fields, qkv_bias=bias),) * count


def _glm4(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (_layer(fields, qkv_bias=bias, norms=Norms.AROUND),) * count


def _gemma3(fields: Fields, count: int) -> Layers:
    """Without layer_types, every sixth layer is without a window."""
    bias = fields.flag("attention_bias", False)
    every = fields.whole("sliding_window_pattern", 6)
    head_dim = fields.whole("head_dim")
    scalar = fields.real("query_pre_attn_scalar", head_dim)
    found = windows(fields, count, lambda layer: (layer + 1) % every != 0)
    kinds = {
        window: _layer(
            fields,
            norms=Norms.AROUND,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            scale=None if scalar == head_dim else scalar**-0.5,
            window=window,
            activation="hidden_activation",
        )
        for window in dict.fromkeys(found)
    }
    return tuple(kinds[window] for window in found)


def _gemma3_scales(fields: Fields) -> dict[str, float]:
    return {"embedding_scale": fields.whole("hidden_size") ** 0.5}


def _cohere2(fields: Fields, count: int) -> Layers:
    """Only layers with a window rotate. Without layer_types, every fourth is without one."""
    bias = fields.flag("attention_bias", False)
    every = fields.whole("sliding_window_pattern", 4)
    found = windows(fields, count, lambda layer: (layer + 1) % every != 0)
    kinds = {
        window: replace(
            _layer(
                fields,
                qkv_bias=bias,
                output_bias=bias,
                rotated=window is not None,
                window=window,
            ),
            parallel=True,
        )
        for window in dict.fromkeys(found)
    }
    return tuple(kinds[window] for window in found)


def _cohere2_scales(fields: Fields) -> dict[str, float]:
    return {"logit_scale": fields.real("logit_scale")}


def _plain(fields: Fields, count: int) -> Layers:
    """No biases and no norms of queries and keys."""
    return (_layer(fields),) * count


# What transformers' configs take for fields that are not there.
_GLM = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_MINISTRAL3 = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_OLMO3 = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096}
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_SMOLLM3 = {
    "use_sliding_window": False,
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
}
_ERNIE = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_COHERE2 = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
}
FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "Llama", _llama),
        Family("mistral", "Mistral", _mistral, defaults={"sliding_window": 4096}),
        Family("ministral3", "Ministral3", _plain, defaults=_MINISTRAL3),
        Family("qwen2", "Qwen2", _qwen2, defaults=_NO_WINDOW),
        Family("qwen3", "Qwen3", _qwen3, defaults={"head_dim": 128, **_NO_WINDOW}),
        Family("seed_oss", "SeedOss", _seed_oss, defaults={"head_dim": 128}),
        Family("smollm3", "SmolLM3", _smollm3, defaults=_SMOLLM3),
        Family("olmo2", "Olmo2", _olmo2, defaults={"rms_norm_eps": 1e-5}),
        Family("olmo3", "Olmo3", _olmo3, defaults=_OLMO3, unscaled_windows=True),
        Family(
            "exaone4",
            "Exaone4",
            _exaone4,
            defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5},
        ),
        Family("granite", "Granite", _granite, _granite_scales),
        Family("glm", "Glm", _glm, defaults=_GLM),
        Family("glm4", "Glm4", _glm4, defaults=_GLM),
        Family("phi3", "Phi3", _mistral, defaults={"rms_norm_eps": 1e-5}),
        Family("ernie4_5", "Ernie4_5", _plain, defaults=_ERNIE),
        Family(
            "cohere2",
            "Cohere2",
            _cohere2,
            _cohere2_scales,
            defaults=_COHERE2,
            norm_kind=NormKind.LAYER,
        ),
        Family(
            "gemma3_text",
            "Gemma3",
            _gemma3,
            _gemma3_scales,
            defaults=_GEMMA3,
            norm_kind=NormKind.RMS_PLUS_ONE,
        ),
    )
}
