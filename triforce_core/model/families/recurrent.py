"""Families with recurrent layers: what their config.json says of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from triforce_core.model.families.family import Family, Layers, layer
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL, SLIDING
from triforce_core.model.feed_forward import MLP
from triforce_core.model.layers import HeadGate, Mixer, NormKind, Norms
from triforce_core.model.parts.recurrent import DeltaNet, ShortConv
from triforce_offload.errors import CheckpointError, UnsupportedModelError

LINEAR, CONV = "linear_attention", "conv"
# The kinds of four layers of LFM3.
_LFM3_LAYERS = (SLIDING, CONV, FULL, CONV)


def qwen3_5_layers(fields: Fields, count: int, mlp: MLP | None = None) -> Layers:
    """Without layer_types, every fourth layer is attention and the others are recurrent.

    mlp: see `layer`
    """
    every = fields.whole("full_attention_interval", 4)
    default = [FULL if (index + 1) % every == 0 else LINEAR for index in range(count)]
    if not fields.flag("attn_output_gate", True):
        raise UnsupportedModelError(f"{fields.source}: attn_output_gate false is not supported")
    mixer = DeltaNet(
        key_heads=fields.whole("linear_num_key_heads"),
        value_heads=fields.whole("linear_num_value_heads"),
        key_dim=fields.whole("linear_key_head_dim"),
        value_dim=fields.whole("linear_value_head_dim"),
        taps=fields.whole("linear_conv_kernel_dim", least=2),
        tiled_output=fields.flag("tiled_output", False),
    )
    if fields.get("output_gate_type") not in (None, "swish", "silu"):
        raise UnsupportedModelError(
            f"{fields.source}: output_gate_type {fields.raw['output_gate_type']!r} is not supported"
        )
    bias = fields.flag("attention_bias", False)
    same = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True, "output_gate": True}
    return _alternating(fields, default, LINEAR, mixer, mlp=mlp, **same)


def _lfm2(fields: Fields, count: int) -> Layers:
    width = {"intermediate_size": _lfm2_width(fields)}
    return lfm2_layers(Fields({**fields.raw, **width}, fields.source, fields.read), count)


def lfm2_layers(fields: Fields, count: int) -> Layers:
    """Without layer_types, layers that are not in full_attn_idxs are convolutions."""
    fields.only("hidden_act", "silu")
    full = fields.get("full_attn_idxs")
    full = list(range(count)) if full is None else full
    if not isinstance(full, list) or not all(isinstance(index, int) for index in full):
        raise CheckpointError(f"{fields.source}: full_attn_idxs must be a list, got {full!r}")
    default = [FULL if index in full else CONV for index in range(count)]
    mixer = ShortConv(
        channels=fields.whole("hidden_size"),
        taps=fields.whole("conv_L_cache", least=2),
        bias=fields.flag("conv_bias", False),
    )
    return _alternating(fields, default, CONV, mixer, qk_norm=True)


def _lfm3(fields: Fields, count: int) -> Layers:
    """Without layer_types, of four layers the third is attention, the first has a window, unless it
    is the first of all, and the others are convolutions.
    """
    fields.only("hidden_act", "silu")
    default = [_LFM3_LAYERS[index % 4] if index else CONV for index in range(count)]
    mixer = ShortConv(
        channels=fields.whole("hidden_size"),
        taps=fields.whole("conv_L_cache", least=2),
        bias=fields.flag("conv_bias", False),
    )
    gate = HeadGate.SIGMOID if fields.flag("use_attention_gate", True) else None
    norms = Norms.AROUND if fields.flag("use_sandwich_norm", True) else Norms.BEFORE
    bias = fields.flag("attention_bias", False)
    same = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True, "head_gate": gate}
    attends = FULL, SLIDING
    return _alternating(fields, default, CONV, mixer, attends=attends, norms=norms, **same)


def _lfm2_width(fields: Fields) -> int:
    """Return the width of the MLP, which configs give before an adjustment."""
    width = fields.whole("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if fields.get("block_ffn_dim_multiplier") is None:
        return width
    unit = fields.whole("block_multiple_of", 256)
    return unit * -(-int(fields.real("block_ffn_dim_multiplier") * width) // unit)


def _alternating(
    fields: Fields,
    default: Sequence[str],
    recurrent: str,
    mixer: Mixer,
    *,
    attends: Sequence[str] = (FULL,),
    mlp: MLP | None = None,
    norms: Norms = Norms.BEFORE,
    **attention: bool | HeadGate | None,
) -> Layers:
    """Return layers of which those that layer_types calls `recurrent` have this mixer, and the
    others attention, with a window where it calls them so.

    attends: kinds of layers with attention
    Raises CheckpointError or UnsupportedModelError.
    """
    kinds = fields.of_layers("layer_types", len(default), default)
    for kind in kinds:
        if kind not in (*attends, recurrent):
            raise UnsupportedModelError(
                f"{fields.source}: layer_types names {kind!r}, which is not supported (only "
                f"{', '.join(attends)} and {recurrent})"
            )
    full = layer(fields, mlp=mlp, norms=norms, **attention)
    specs = {FULL: full, recurrent: replace(full, mixer=mixer)}
    if SLIDING in kinds:
        window = fields.whole("sliding_window")
        specs[SLIDING] = replace(full, mixer=replace(full.mixer, window=window))
    return tuple(specs[kind] for kind in kinds)


# What transformers' configs take for fields that are not there.
QWEN3_5 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
LFM2 = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
}
_LFM3 = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_eps": 1e-5,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}
# Names in the first configs, and what they are called now.
LFM2_RENAMED = {"tie_embedding": "tie_word_embeddings"}
RECURRENT = (
    Family(
        "qwen3_5_text",
        "Qwen3_5",
        qwen3_5_layers,
        defaults=QWEN3_5,
        norm_kind=NormKind.RMS_PLUS_ONE,
    ),
    Family(
        "lfm2",
        "Lfm2",
        _lfm2,
        defaults=LFM2 | {"block_ffn_dim_multiplier": 1.0},
        norm_eps="norm_eps",
        renamed=LFM2_RENAMED | {"block_ff_dim": "intermediate_size"},
    ),
    Family("lfm3", "Lfm3", _lfm3, defaults=_LFM3, norm_eps="norm_eps"),
)
