"""Families with Mamba-2 layers: what their config.json says of their layers."""

from __future__ import annotations

import math
from dataclasses import replace

from triforce_core.model.families.family import Family, Layers, activation, granite_scales, layer
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL
from triforce_core.model.families.recurrent import LINEAR
from triforce_core.model.families.sigmoid import sigmoid_router
from triforce_core.model.families.sparse import experts_of, renamed
from triforce_core.model.feed_forward import MLP, Activation, DenseMLP, Experts, NoMLP, Router
from triforce_core.model.layers import NormKind
from triforce_core.model.parts.recurrent import Mamba2
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# Kinds of layers by the names, and by the letters, that older configs have for them.
_KINDS = {"mamba": LINEAR, "attention": FULL}
_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def _kinds(fields: Fields, name: str, count: int, *known: str) -> list[str]:
    """Return the kind of each layer. Raises CheckpointError or UnsupportedModelError."""
    kinds = [_KINDS.get(str(kind), kind) for kind in fields.of_layers(name, count)]
    if unknown := [kind for kind in kinds if kind not in known]:
        raise UnsupportedModelError(
            f"{fields.source}: {name} names {unknown[0]!r}, which is not supported (only "
            f"{', '.join(known)})"
        )
    return kinds


def _check_steps(fields: Fields) -> None:
    """Raise UnsupportedModelError if steps have limits."""
    limits = fields.get("time_step_limit")
    if limits is None:
        return
    # Infinity is written in more than one way, also as an object.
    least, most = limits if isinstance(limits, list) and len(limits) == 2 else (None, 0.0)
    if least != 0 or (isinstance(most, int | float) and math.isfinite(most)):
        raise UnsupportedModelError(
            f"{fields.source}: time_step_limit {limits!r} is not supported (only 0 to infinity)"
        )


def _granite4(fields: Fields, count: int) -> Layers:
    """Granite 4: without recurrent layers and experts it is Granite 3, but for names of fields."""
    kinds = _kinds(fields, "layer_types", count, FULL, LINEAR)
    rope = fields.get("position_embedding_type")
    if rope not in (None, "rope", "nope"):
        raise UnsupportedModelError(
            f"{fields.source}: position_embedding_type {rope!r} is not supported"
        )
    bias = fields.flag("attention_bias", False)
    residual, scale = (fields.real(f"{name}_multiplier", 1.0) for name in ("residual", "attention"))
    attends = layer(
        fields,
        residual_scale=residual,
        qkv_bias=bias,
        output_bias=bias,
        scale=scale,
        rotated=rope == "rope",
        mlp=_granite_mlp(fields),
    )
    if LINEAR not in kinds:
        return (attends,) * count
    recurs = replace(attends, mixer=_granite_mamba(fields))
    return tuple(attends if kind == FULL else recurs for kind in kinds)


def _granite_mlp(fields: Fields) -> MLP:
    """Return experts beside one that every token goes through, or that one alone."""
    shared = fields.whole("shared_intermediate_size")
    if not fields.get("num_local_experts"):
        return DenseMLP(shared, activation(fields, "hidden_act"))
    width = "intermediate_size"
    return experts_of(fields, "num_local_experts", Router(), width=width, shared=shared)


def _granite_mamba(fields: Fields) -> Mamba2:
    fields.only("mamba_proj_bias", False)
    _check_steps(fields)
    heads = fields.whole("mamba_n_heads")
    values = fields.whole("mamba_expand") * fields.whole("hidden_size")
    size = values // heads if fields.get("mamba_d_head") == "auto" else fields.whole("mamba_d_head")
    if heads * size != values:
        raise CheckpointError(
            f"{fields.source}: {heads} heads of {size} (mamba_d_head) are not {values} columns "
            "(mamba_expand)"
        )
    return Mamba2(
        key_heads=fields.whole("mamba_n_groups"),
        value_heads=heads,
        key_dim=fields.whole("mamba_d_state"),
        value_dim=size,
        taps=fields.whole("mamba_d_conv", least=2),
        conv_bias=fields.flag("mamba_conv_bias", True),
    )


def _nemotron_h(fields: Fields, count: int) -> Layers:
    """Every mixer and every MLP has a number of its own, and an MLP follows a mixer: both are a
    layer here. A mixer that another one follows is a layer without an MLP.
    """
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and fields.get("layers_block_type") is None:
        by_letter = {"layers_block_type": [_LETTERS.get(letter, letter) for letter in pattern]}
        fields = Fields({**fields.raw, **by_letter}, fields.source, fields.read)
    kinds = _kinds(fields, "layers_block_type", count, FULL, LINEAR, "mlp", "moe")
    for name, value in _NEMOTRON_ONLY.items():
        fields.only(name, value)
    _check_steps(fields)
    if not {"mlp", "moe"} & {*kinds}:
        raise UnsupportedModelError(f"{fields.source}: a model without an MLP is not supported")
    # Configs of models without experts may give their number too.
    fields.get("n_routed_experts")
    attends = layer(fields, mlp=NoMLP(), rotated=False)
    mixers = {FULL: attends.mixer}
    if LINEAR in kinds:
        mixers[LINEAR] = _nemotron_mamba(fields)
    mlps: dict[str, MLP] = {}
    if "mlp" in kinds:
        mlps["mlp"] = DenseMLP(fields.whole("intermediate_size"), Activation.RELU2)
    if "moe" in kinds:
        mlps["moe"] = _nemotron_experts(fields)
    layers = []
    for kind in kinds:
        if kind in mixers:
            layers.append(replace(attends, mixer=mixers[kind]))
        elif not layers or layers[-1].mlp.width:
            raise UnsupportedModelError(
                f"{fields.source}: an MLP that does not follow a mixer is not supported"
            )
        else:
            layers[-1] = replace(layers[-1], mlp=mlps[kind])
    return tuple(layers)


def _nemotron_mamba(fields: Fields) -> Mamba2:
    return Mamba2(
        key_heads=fields.whole("n_groups"),
        value_heads=fields.whole("mamba_num_heads"),
        key_dim=fields.whole("ssm_state_size"),
        value_dim=fields.whole("mamba_head_dim"),
        taps=fields.whole("conv_kernel", least=2),
        conv_bias=fields.flag("use_conv_bias", True),
    )


def _nemotron_experts(fields: Fields) -> Experts:
    return Experts(
        fields.whole("n_routed_experts"),
        fields.whole("num_experts_per_tok"),
        fields.whole("moe_intermediate_size"),
        sigmoid_router(fields),
        fields.whole("moe_shared_expert_intermediate_size"),
        activation=Activation.RELU2,
        latent=fields.whole("moe_latent_size", 0, least=0),
    )


# What transformers' configs take for fields that are not there.
_GRANITE = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_NEMOTRON = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
_NEMOTRON_ONLY = {
    "mamba_proj_bias": False,
    "attention_bias": False,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
}
# Names in the first configs, and what they are called now.
_NEMOTRON_RENAMED = {
    "attention_head_dim": "head_dim",
    "layer_types": "layers_block_type",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}
MAMBA = (
    Family("granitemoehybrid", "GraniteMoeHybrid", _granite4, granite_scales, defaults=_GRANITE),
    Family(
        "nemotron_h",
        "NemotronH",
        _nemotron_h,
        defaults=_NEMOTRON,
        norm_kind=NormKind.RMS_FLOAT32,
        norm_eps="layer_norm_epsilon",
        renamed=_NEMOTRON_RENAMED | renamed("n_routed_experts"),
    ),
)
