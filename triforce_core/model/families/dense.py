"""Families of dense models: what each one's config.json says of its layers.

A family is a description. It has no forward code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triforce_core.model.families.fields import Fields
from triforce_core.model.layers import Attention, DenseMLP, LayerSpec, Norms
from triforce_offload.errors import CheckpointError

Layers = tuple[LayerSpec, ...]


def _no_scales(fields: Fields) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models.

    name: `model_type` in config.json
    hf_class: transformers' name of the model, before `ForCausalLM`
    layers: returns the layers of a model of so many layers
    scales: returns the scales of a ModelConfig
    rotated_share: share of each head that is rotated, if the config does not say
    tied: whether the embedding is the output matrix, if the config does not say
    usual_window: the window if the config does not say
    window_is_asked_for: whether a window is active only if `use_sliding_window` is set
    """

    name: str
    hf_class: str
    layers: Callable[[Fields, int], Layers]
    scales: Callable[[Fields], Mapping[str, float]] = _no_scales
    rotated_share: float = 1.0
    tied: bool = False
    usual_window: int | None = None
    window_is_asked_for: bool = False


def _layer(
    fields: Fields,
    *,
    head_dim: int | None = None,
    norms: Norms = Norms.BEFORE,
    residual_scale: float = 1.0,
    qkv_bias: bool = False,
    output_bias: bool = False,
    **attention: bool | float,
) -> LayerSpec:
    """Return a layer. attention: further fields of Attention"""
    heads = fields.whole("num_attention_heads")
    mixer = Attention(
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", head_dim or fields.whole("hidden_size") // heads or 1),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        **attention,
    )
    return LayerSpec(mixer, DenseMLP(fields.whole("intermediate_size")), norms, residual_scale)


def _llama(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (_layer(fields, qkv_bias=bias, output_bias=bias),) * count


def _qwen2(fields: Fields, count: int) -> Layers:
    """Queries, keys and values always have a bias."""
    return (_layer(fields, qkv_bias=True),) * count


def _qwen3(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (_layer(fields, head_dim=128, qkv_bias=bias, output_bias=bias, qk_norm=True),) * count


def _seed_oss(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", True), fields.flag("attention_out_bias", False)
    return (_layer(fields, head_dim=128, qkv_bias=bias[0], output_bias=bias[1]),) * count


def _smollm3(fields: Fields, count: int) -> Layers:
    """Layers whose entry of no_rope_layers is 0 do not rotate; without a list, every fourth."""
    bias = fields.flag("attention_bias", False)
    every = fields.whole("no_rope_layer_interval", 4)
    rotates = fields.raw.get("no_rope_layers")
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
    kinds = {
        rotated: _layer(fields, qkv_bias=bias, output_bias=bias, rotated=rotated)
        for rotated in (False, True)
    }
    return tuple(kinds[bool(each)] for each in rotates)


def _olmo2(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    norms = {"norms": Norms.AFTER, "qk_norm": True, "norm_over_heads": True}
    return (_layer(fields, qkv_bias=bias, output_bias=bias, **norms),) * count


def _exaone4(fields: Fields, count: int) -> Layers:
    return (_layer(fields, norms=Norms.AFTER, qk_norm=True),) * count


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
    return (_layer(fields, head_dim=128, qkv_bias=bias),) * count


def _glm4(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (_layer(fields, head_dim=128, qkv_bias=bias, norms=Norms.AROUND),) * count


def _plain(fields: Fields, count: int) -> Layers:
    """No biases and no norms of queries and keys."""
    return (_layer(fields),) * count


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "Llama", _llama),
        # transformers uses a window of 4096 if a Mistral config does not mention one.
        Family("mistral", "Mistral", _llama, usual_window=4096),
        Family("ministral3", "Ministral3", _plain),
        Family("qwen2", "Qwen2", _qwen2, window_is_asked_for=True),
        Family("qwen3", "Qwen3", _qwen3, window_is_asked_for=True),
        Family("seed_oss", "SeedOss", _seed_oss),
        Family("smollm3", "SmolLM3", _smollm3, tied=True, window_is_asked_for=True),
        Family("olmo2", "Olmo2", _olmo2),
        Family("exaone4", "Exaone4", _exaone4, usual_window=4096),
        Family("granite", "Granite", _granite, _granite_scales),
        Family("glm", "Glm", _glm, rotated_share=0.5),
        Family("glm4", "Glm4", _glm4, rotated_share=0.5),
        Family("phi3", "Phi3", _plain),
        Family("ernie4_5", "Ernie4_5", _plain, tied=True),
    )
}
