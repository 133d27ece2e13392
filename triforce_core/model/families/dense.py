"""Families of models: what each one's config.json says of its layers.

A family is a description. It has no forward code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from triforce_core.model.families.family import (
    Family,
    Layers,
    exaone_layers,
    granite_scales,
    layer,
    with_windows,
)
from triforce_core.model.families.gemma import GEMMA
from triforce_core.model.families.latent import LATENT
from triforce_core.model.families.mamba import MAMBA
from triforce_core.model.families.qwen4 import QWEN4
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import windows, windows_if_shorter
from triforce_core.model.families.recurrent import RECURRENT
from triforce_core.model.families.sigmoid import SIGMOID
from triforce_core.model.families.sparse import SPARSE
from triforce_core.model.feed_forward import Activation, DenseMLP
from triforce_core.model.layers import NormKind, Norms
from triforce_offload.errors import CheckpointError


def _llama(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (layer(fields, qkv_bias=bias, output_bias=bias),) * count


def _arcee(fields: Fields, count: int) -> Layers:
    """MLPs have no gate."""
    fields.only("hidden_act", "relu2")
    bias = fields.flag("attention_bias", False)
    mlp = DenseMLP(fields.whole("intermediate_size"), Activation.RELU2)
    return (layer(fields, mlp=mlp, qkv_bias=bias, output_bias=bias),) * count


def _mistral(fields: Fields, count: int) -> Layers:
    """Every layer has a window, if there is one."""
    return with_windows(fields, windows_if_shorter(fields, count))


def _ministral(fields: Fields, count: int) -> Layers:
    """Every layer has a window, if there is one and layer_types does not say otherwise."""
    return with_windows(fields, windows(fields, count))


def _cwm(fields: Fields, count: int) -> Layers:
    """Every fourth layer, from the first on, has no window."""
    return with_windows(fields, windows(fields, count, lambda layer: layer % 4 != 0))


def _late(fields: Fields) -> Callable[[int], bool]:
    """Layers from max_window_layers on have a window."""
    first = fields.whole("max_window_layers", 28, least=0)
    return lambda layer: layer >= first


def _qwen2(fields: Fields, count: int) -> Layers:
    """Queries, keys and values always have a bias."""
    return with_windows(fields, windows(fields, count, _late(fields)), qkv_bias=True)


def _qwen3(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    same = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return with_windows(fields, windows(fields, count, _late(fields)), **same)


def _seed_oss(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", True), fields.flag("attention_out_bias", False)
    return (layer(fields, qkv_bias=bias[0], output_bias=bias[1]),) * count


def _smollm3(fields: Fields, count: int) -> Layers:
    """Layers whose entry of no_rope_layers is 0 do not rotate; without a list, every fourth."""
    bias = fields.flag("attention_bias", False)
    every = fields.whole("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % every != 0) for layer in range(count)]
    rotates = fields.of_layers("no_rope_layers", count, usual)
    if any(each not in (0, 1) for each in rotates):
        raise CheckpointError(
            f"{fields.source}: no_rope_layers must be zeros and ones, got {rotates!r}"
        )
    seen = windows(fields, count, lambda layer: not rotates[layer])
    return tuple(
        layer(fields, qkv_bias=bias, output_bias=bias, rotated=bool(each), window=window)
        for each, window in zip(rotates, seen, strict=True)
    )


def _olmo2(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    norms = {"norms": Norms.AFTER, "qk_norm": True, "norm_over_heads": True}
    return (layer(fields, qkv_bias=bias, output_bias=bias, **norms),) * count


def _olmo3(fields: Fields, count: int) -> Layers:
    """Three of four layers have a window. Only the others rotate as rope_scaling says."""
    bias = fields.flag("attention_bias", False)
    norms = {"norms": Norms.AFTER, "qk_norm": True, "norm_over_heads": True}
    seen = windows(fields, count, lambda layer: (layer + 1) % 4 != 0)
    return with_windows(fields, seen, qkv_bias=bias, output_bias=bias, **norms)


def _exaone4(fields: Fields, count: int) -> Layers:
    return exaone_layers(fields, count, Norms.AFTER)


def _granite(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    residual, scale = (fields.real(f"{name}_multiplier", 1.0) for name in ("residual", "attention"))
    same = {"qkv_bias": bias, "output_bias": bias}
    return (layer(fields, residual_scale=residual, scale=scale, **same),) * count


def _hyperclovax(fields: Fields, count: int) -> Layers:
    """As in Granite, with norms after the mixer and the MLP too."""
    norms = Norms.AROUND if fields.flag("use_post_norm", True) else Norms.BEFORE
    scale = fields.get("attention_multiplier")
    scale = None if scale is None else fields.real("attention_multiplier")
    bias, residual = fields.flag("attention_bias", False), fields.real("residual_multiplier", 1.0)
    same = {"qkv_bias": bias, "output_bias": bias, "scale": scale, "norms": norms}
    return (layer(fields, residual_scale=residual, **same),) * count


def _hyperclovax_scales(fields: Fields) -> dict[str, float]:
    """Logits are multiplied by what Granite divides them by."""
    return {
        "embedding_scale": fields.real("embedding_multiplier", 1.0),
        "logit_scale": fields.real("logits_scaling", 1.0),
    }


def _glm(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (layer(fields, qkv_bias=bias),) * count


def _glm4(fields: Fields, count: int) -> Layers:
    bias = fields.flag("attention_bias", False)
    return (layer(fields, qkv_bias=bias, norms=Norms.AROUND),) * count


def _cohere2(fields: Fields, count: int) -> Layers:
    """Only layers with a window rotate. Without layer_types, every fourth is without one."""
    bias = fields.flag("attention_bias", False)
    every = fields.whole("sliding_window_pattern", 4)
    found = windows(fields, count, lambda layer: (layer + 1) % every != 0)
    kinds = {
        window: replace(
            layer(
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
    return (layer(fields),) * count


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
_CWM = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8192,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
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
FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "Llama", _llama),
        Family("arcee", "Arcee", _arcee, defaults={"rms_norm_eps": 1e-5}),
        Family("mistral", "Mistral", _mistral, defaults={"sliding_window": 4096}),
        Family("ministral", "Ministral", _ministral, defaults={"sliding_window": 4096}),
        Family("ministral3", "Ministral3", _plain, defaults=_MINISTRAL3),
        Family("qwen2", "Qwen2", _qwen2, defaults=_NO_WINDOW),
        Family("qwen3", "Qwen3", _qwen3, defaults={"head_dim": 128, **_NO_WINDOW}),
        Family("seed_oss", "SeedOss", _seed_oss, defaults={"head_dim": 128}),
        Family("smollm3", "SmolLM3", _smollm3, defaults=_SMOLLM3),
        Family(
            "olmo2",
            "Olmo2",
            _olmo2,
            defaults={"rms_norm_eps": 1e-5},
            norm_kind=NormKind.RMS_FLOAT32,
        ),
        Family(
            "olmo3",
            "Olmo3",
            _olmo3,
            defaults=_OLMO3,
            norm_kind=NormKind.RMS_FLOAT32,
            unscaled_windows=True,
        ),
        Family(
            "exaone4",
            "Exaone4",
            _exaone4,
            defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5},
        ),
        Family("granite", "Granite", _granite, granite_scales),
        Family("hyperclovax", "HyperCLOVAX", _hyperclovax, _hyperclovax_scales),
        Family("cwm", "Cwm", _cwm, defaults=_CWM),
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
            norm_eps="layer_norm_eps",
        ),
        *GEMMA,
        *RECURRENT,
        *SPARSE,
        *MAMBA,
        *SIGMOID,
        *LATENT,
        *QWEN4,
    )
}
