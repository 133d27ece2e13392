"""Model configs from GGUF headers."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from triforce_core.model.checkpoints.gguf_fields import OWN_FIELDS, expert_fields
from triforce_core.model.checkpoints.naming.names import blocks
from triforce_core.model.config import ModelConfig, RopeConfig
from triforce_core.model.families.dense import FAMILIES
from triforce_core.model.families.family import EXPERT_COUNTS, Family
from triforce_core.model.families.hf import refuse_drafters
from triforce_core.model.families.reading.fields import Fields, layer_count, token_ids
from triforce_core.model.families.reading.ropes import check_rope
from triforce_core.model.families.reading.windows import FULL, SLIDING, with_own_rope
from triforce_core.model.layers import Attention, LayerSpec, NormKind
from triforce_core.model.parts.recurrent import ShortConv
from triforce_core.model.parts.specs import Keeps
from triforce_offload.errors import UnsupportedModelError

if TYPE_CHECKING:
    from triforce_offload.checkpoint.gguf import GGUFSource

# Families by llama.cpp's names, which are mostly transformers' own. Mistral is `llama` there.
_FAMILIES = {
    name: FAMILIES[name]
    for name in (
        *("llama", "qwen2", "qwen3", "arcee", "seed_oss", "smollm3", "olmo2", "exaone4", "granite"),
        *("glm4", "phi3", "ernie4_5", "cohere2", "lfm2"),
    )
} | {
    "gemma2": FAMILIES["gemma2"],
    "gemma3": FAMILIES["gemma3_text"],
    "gemma4": FAMILIES["gemma4_text"],
    "qwen35": FAMILIES["qwen3_5_text"],
    "qwen2moe": FAMILIES["qwen2_moe"],
    "qwen3moe": FAMILIES["qwen3_moe"],
    "qwen35moe": FAMILIES["qwen3_5_moe_text"],
    "olmoe": FAMILIES["olmoe"],
    "granitemoe": FAMILIES["granitemoe"],
    "ernie4_5-moe": FAMILIES["ernie4_5_moe"],
    "glm4moe": FAMILIES["glm4_moe"],
    "qwen3next": FAMILIES["qwen3_next"],
    "qwen4exp": FAMILIES["qwen4_exp_text"],
    # Files of DeepSeek-V2 and GLM-4.7-Flash say how they differ from DeepSeek-V3.
    "deepseek2": FAMILIES["deepseek_v3"],
    "mistral4": FAMILIES["mistral4"],
    # Also Mistral Small 3, whose queries do not grow with their position.
    "mistral3": FAMILIES["ministral3"],
    "minimax-m2": FAMILIES["minimax_m2"],
    "laguna": FAMILIES["laguna"],
    "afmoe": FAMILIES["afmoe"],
    "lfm2moe": FAMILIES["lfm2_moe"],
    "gpt-oss": FAMILIES["gpt_oss"],
    "granitehybrid": FAMILIES["granitemoehybrid"],
    "nemotron_h": FAMILIES["nemotron_h"],
    "nemotron_h_moe": FAMILIES["nemotron_h"],
}
# Families of files with experts, by an architecture that is another one's without them.
_WITH_EXPERTS = {"llama": FAMILIES["mixtral"]}
# Families of files with windows, by an architecture that is another one's without them.
_WITH_WINDOWS = {"olmo2": FAMILIES["olmo3"]}
# Those whose files have the rows of their heads in the usual order, though they also read images.
_ROTATED_AS_TEXT = ("qwen35", "qwen35moe", "qwen4exp")
# Caps have the same names in files as in config.json.
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_NORM_EPS = {NormKind.LAYER: "attention.layer_norm_epsilon"}
# Names of numbers in the file, by their names in config.json.
_NUMBERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}


def gguf_config(source: GGUFSource) -> ModelConfig:
    """Return the config of a GGUF file.

    Raises UnsupportedModelError or CheckpointError, which names the field.
    """
    where = str(source.path)
    architecture = source.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        refuse_drafters(architecture, f"{where}: ")
        raise UnsupportedModelError(
            f"{where}: architecture {architecture!r} is not supported; docs/models.md lists those "
            "that are"
        )
    family = _FAMILIES[architecture]
    if f"{architecture}.attention.sliding_window" in source.metadata:
        family = _WITH_WINDOWS.get(architecture, family)
    if source.metadata.get(f"{architecture}.expert_count"):
        family = _WITH_EXPERTS.get(architecture, family)
    prefix = architecture + "."
    own = {k.removeprefix(prefix): v for k, v in source.metadata.items() if k.startswith(prefix)}
    fields = Fields(own, where)
    names = source.names()
    _refuse_unsupported(fields, architecture)
    if any(name.startswith("rope_factors_") for name in names):
        raise UnsupportedModelError(f"{where}: rope factors of longrope are not supported")
    own_fields = OWN_FIELDS.get(architecture)
    fields, more = own_fields(fields, names) if own_fields else (fields, {})
    positions = fields.whole("context_length")
    described = Fields(_as_in_hf(fields, positions) | more, where)
    layers = family.layers(described, layer_count(fields, "block_count"))
    scales = family.scales(described)
    _refuse_unread(described, positions, architecture)
    numbers = blocks(family.name, layers)
    layers = tuple(_with_tensors(*each, names) for each in zip(layers, numbers, strict=False))
    full = (each.mixer.head_dim for each in layers if each.mixer.keeps is Keeps.KV)
    head_dim = next(full, described.raw["head_dim"])
    window_rope = _window_rope(fields, family)
    vocab = source.metadata.get("tokenizer.ggml.tokens")
    return ModelConfig(
        family=family.name,
        layers=layers if window_rope is None else with_own_rope(layers),
        hidden=described.raw["hidden_size"],
        vocab=fields.whole("vocab_size", getattr(vocab, "length", None)),
        norm_eps=fields.real(_NORM_EPS.get(family.norm_kind, "attention.layer_norm_rms_epsilon")),
        trained_positions=positions,
        rope=_gguf_rope(fields, family, positions, head_dim),
        window_rope=window_rope,
        norm_kind=family.norm_kind,
        tied="output.weight" not in names,
        eos_token_ids=_gguf_eos(source.metadata),
        **scales,
    )


def _refuse_unsupported(fields: Fields, architecture: str) -> None:
    where, own = fields.source, fields.raw
    if own.get("rope.dimension_sections") is not None and architecture not in _ROTATED_AS_TEXT:
        # Such files have the rows of their heads in another order.
        raise UnsupportedModelError(
            f"{where}: a model that reads images (rope.dimension_sections) is not supported as GGUF"
        )


def _refuse_unread(described: Fields, positions: int, architecture: str) -> None:
    """Raise UnsupportedModelError for a field that changes what a model computes, and that its
    family does not have.
    """
    window = described.raw["sliding_window"]
    said = {
        "sliding_window": (window or 0) < positions and window,
        **{cap: described.raw[cap] for cap in _CAPS},
    }
    if described.read.isdisjoint(EXPERT_COUNTS):
        said["num_experts"] = described.raw.get("num_experts")
    for name, value in said.items():
        if value and name not in described.read:
            raise UnsupportedModelError(
                f"{described.source}: {name} ({value}) is not supported in a {architecture} model"
            )


def _as_in_hf(fields: Fields, positions: int) -> dict[str, Any]:
    """Return the fields under their names in config.json, from which families read them."""
    hidden = fields.whole("embedding_length")
    heads = fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", hidden // heads or 1)
    if fields.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{fields.source}: values of another size than keys are not supported"
        )
    return {
        **_windows(fields),
        **expert_fields(fields),
        **{cap: fields.get(cap) for cap in _CAPS},
        "max_position_embeddings": positions,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _width(fields),
        **{ours: fields.real(name) for ours, name in _NUMBERS.items() if name in fields.raw},
    }


def _width(fields: Fields) -> int:
    """Return the width of dense MLPs, or of experts if there are no others."""
    name = "feed_forward_length"
    return fields.whole(name if name in fields.raw else f"expert_{name}")


def _windows(fields: Fields) -> dict[str, Any]:
    """Return the fields of windows under their names in config.json."""
    # 0 stands for no window.
    window = fields.get("attention.sliding_window") or None
    found = {"sliding_window": window and fields.whole("attention.sliding_window")}
    pattern = fields.get("attention.sliding_window_pattern")
    each_layer = getattr(pattern, "values", None)
    if each_layer is not None:
        found["layer_types"] = [SLIDING if slides else FULL for slides in each_layer]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern
    return found


def _window_rope(fields: Fields, family: Family) -> RopeConfig | None:
    """Return the rotary embedding of layers with a window, None if it is that of the others."""
    own = family.defaults.get("rope_parameters", {}).get(SLIDING, {})
    theta = family.defaults.get("rope_local_base_freq", own.get("rope_theta"))
    if family.unscaled_windows:
        theta = fields.real("rope.freq_base", 10000.0)
    return theta and RopeConfig(theta=fields.real("rope.freq_base_swa", theta))


def _with_tensors(spec: LayerSpec, block: int, names: Set[str]) -> LayerSpec:
    """Return a layer with the biases and norms that the file has tensors of. block: its number"""
    mixer, prefix = spec.mixer, f"blk.{block}."
    if isinstance(mixer, Attention):
        joint = f"{prefix}attn_q.bias", f"{prefix}attn_qkv.bias"
        mixer = replace(
            mixer,
            qkv_bias=not names.isdisjoint(joint),
            output_bias=f"{prefix}attn_output.bias" in names,
            qk_norm=f"{prefix}attn_q_norm.weight" in names,
        )
    elif isinstance(mixer, ShortConv):
        mixer = replace(mixer, bias=f"{prefix}shortconv.conv.bias" in names)
    return replace(spec, mixer=mixer)


def _gguf_rope(fields: Fields, family: Family, positions: int, head_dim: int) -> RopeConfig:
    kind = fields.raw.get("rope.scaling.type", "none")
    parameters: dict[str, Any] = {}
    if (rotated := fields.whole("rope.dimension_count", head_dim)) != head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    if kind in ("linear", "yarn"):
        parameters["factor"] = fields.real("rope.scaling.factor")
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = fields.whole(
            "rope.scaling.original_context_length", positions
        )
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            if (given := fields.real(f"rope.scaling.yarn_{name}", usual)) != usual:
                parameters[name] = given
        if tenth := fields.raw.get("rope.scaling.yarn_log_multiplier"):
            # Both are alike in all models, and so cosines and sines are not scaled.
            parameters["mscale"] = parameters["mscale_all_dim"] = 10 * tenth
        if family.name == "gpt_oss":
            # As the model was trained, though llama.cpp rounds the bounds of the frequencies.
            parameters["truncate"] = False
    if fields.get("attention.temperature_scale"):
        # How queries grow with their position.
        parameters["llama_4_scaling_beta"] = fields.real("attention.temperature_scale")
        original = parameters.setdefault("original_max_position_embeddings", positions)
        fields.only("attention.temperature_length", original)
    rope = RopeConfig(
        "default" if kind == "none" else str(kind),
        fields.real("rope.freq_base", 10000.0),
        MappingProxyType(parameters),
    )
    return check_rope(rope, fields.source, head_dim)


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ids += token_ids(metadata.get(f"tokenizer.ggml.{name}"), name)
    return tuple(dict.fromkeys(ids))
