"""What a family of models is, and what its description is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import windows
from triforce_core.model.feed_forward import MLP, Activation, DenseMLP
from triforce_core.model.layers import (
    Attention,
    LayerSpec,
    NormKind,
    Norms,
)

Layers = tuple[LayerSpec, ...]
# Fields that give the number of experts; some configs have it under two names.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


# Fields of which null says that the model has none.
_NULL_IS_NONE = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank"),
)


# Fields with the kind of each layer.
_LAYER_LISTS = ("layers_block_type", "hybrid_override_pattern")


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
    norm_eps: the field of what norms add to the mean of squares
    renamed: names of fields in old configs, and what they are called now
    """

    name: str
    hf_class: str
    layers: Callable[[Fields, int], Layers]
    scales: Callable[[Fields], Mapping[str, float]] = _no_scales
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm_kind: NormKind = NormKind.RMS
    unscaled_windows: bool = False
    norm_eps: str = "rms_norm_eps"
    renamed: Mapping[str, str] = field(default_factory=dict)

    def completed(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the family's defaults. null is a default too, except that it says
        that there is no window, no cap or no rank of queries. Lists of layers give the number of
        layers, if it is not there.
        """
        raw = dict(raw)
        for old, new in self.renamed.items():
            value = raw.pop(old, None)
            if value is not None:
                raw[new] = value
        for name in _LAYER_LISTS:
            if raw.get("num_hidden_layers") is None and isinstance(raw.get(name), list | str):
                raw["num_hidden_layers"] = len(raw[name])
        absent = {
            name: value
            for name, value in self.defaults.items()
            if name not in raw or (raw[name] is None and name not in _NULL_IS_NONE)
        }
        return {**raw, **absent}


def layer(
    fields: Fields,
    *,
    norms: Norms = Norms.BEFORE,
    residual_scale: float = 1.0,
    qkv_bias: bool = False,
    output_bias: bool = False,
    activates: str = "hidden_act",
    mlp: MLP | None = None,
    heads: int | None = None,
    **attention: bool | float | None,
) -> LayerSpec:
    """Return a layer.

    activates: the field that names the MLP's activation
    mlp: the MLP; None for a dense one of intermediate_size columns
    heads: number of query heads; None for num_attention_heads
    attention: further fields of Attention
    """
    usual = fields.whole("num_attention_heads")
    mixer = Attention(
        heads=heads or usual,
        kv_heads=fields.whole("num_key_value_heads", usual),
        head_dim=fields.whole("head_dim", fields.whole("hidden_size") // usual or 1),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        **attention,
    )
    if mlp is None:
        mlp = DenseMLP(fields.whole("intermediate_size"), activation(fields, activates))
    return LayerSpec(mixer, mlp, norms, residual_scale)


def activation(fields: Fields, name: str) -> Activation:
    """Return the activation of a gate that a field names. Raises UnsupportedModelError."""
    known = [Activation.SILU.value, Activation.GELU_TANH.value]
    fields.only(name, *known)
    return Activation(fields.get(name) or known[0])


def with_windows(
    fields: Fields, seen: Sequence[int | None], **same: bool | float | str | Norms | None
) -> Layers:
    """Return layers that differ in their windows alone. same: fields of all, see `layer`"""
    kinds = {window: layer(fields, window=window, **same) for window in set(seen)}
    return tuple(kinds[window] for window in seen)


def exaone_layers(fields: Fields, count: int, norms: Norms) -> Layers:
    """Return the layers of an EXAONE from 4 on. In models that have windows elsewhere,
    full-attention layers do not rotate.
    """

    def has_window(index: int) -> bool:
        """Of as many layers the last one has no window; "LLLG" says the same as 4."""
        pattern = fields.get("sliding_window_pattern")
        named = isinstance(pattern, str) and pattern
        every = len(pattern) if named else fields.whole("sliding_window_pattern", 4)
        return (index + 1) % every != 0

    rotates_all = fields.get("sliding_window") is None
    return tuple(
        layer(
            fields,
            norms=norms,
            qk_norm=True,
            rotated=rotates_all or window is not None,
            window=window,
        )
        for window in windows(fields, count, has_window)
    )


def granite_scales(fields: Fields) -> dict[str, float]:
    """Return the scales of a ModelConfig of Granite."""
    return {
        "embedding_scale": fields.real("embedding_multiplier", 1.0),
        "logit_scale": 1 / fields.real("logits_scaling", 1.0),
    }
