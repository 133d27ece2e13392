"""Model configs from GGUF headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from triforce_core.model.config import ModelConfig, RopeConfig
from triforce_core.model.families.dense import FAMILIES
from triforce_core.model.families.family import Family
from triforce_core.model.families.fields import Fields, layer_count, token_ids
from triforce_core.model.families.ropes import check_rope
from triforce_core.model.families.windows import FULL, SLIDING, with_own_rope
from triforce_core.model.layers import LayerSpec, NormKind
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from triforce_offload.checkpoint.gguf import GGUFSource

# Families by llama.cpp's names, which are mostly transformers' own. Mistral is `llama` there.
_FAMILIES = {
    name: FAMILIES[name]
    for name in (
        *("llama", "qwen2", "qwen3", "seed_oss", "smollm3", "olmo2", "exaone4", "granite"),
        *("glm4", "phi3", "ernie4_5", "cohere2"),
    )
} | {"gemma3": FAMILIES["gemma3_text"], "gemma4": FAMILIES["gemma4_text"]}
# Families of files with windows, by an architecture that is another one's without them.
_WITH_WINDOWS = {"olmo2": FAMILIES["olmo3"]}
# Number of layers of Gemma 3 27B. llama.cpp knows by it how that model scales scores.
_GEMMA3_27B = 62
# What every model of Gemma 3 and 4 has.
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
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
        raise UnsupportedModelError(
            f"{where}: architecture {architecture!r} is not supported (only {', '.join(_FAMILIES)})"
        )
    family = _FAMILIES[architecture]
    if f"{architecture}.attention.sliding_window" in source.metadata:
        family = _WITH_WINDOWS.get(architecture, family)
    prefix = architecture + "."
    own = {k.removeprefix(prefix): v for k, v in source.metadata.items() if k.startswith(prefix)}
    fields = Fields(own, where)
    names = source.names()
    positions = fields.whole("context_length")
    _refuse_unsupported(fields)
    if any(name.startswith("rope_factors_") for name in names):
        raise UnsupportedModelError(f"{where}: rope factors of longrope are not supported")
    own_fields = _OWN_FIELDS.get(architecture)
    fields, more = own_fields(fields, names) if own_fields else (fields, {})
    described = Fields(_as_in_hf(fields, positions) | more, where)
    layers = family.layers(described, layer_count(fields, "block_count"))
    scales = family.scales(described)
    _refuse_unread(described, positions, architecture)
    layers = tuple(_with_tensors(spec, names) for spec in layers)
    head_dim = next(
        (each.mixer.head_dim for each in layers if not each.mixer.window), described.raw["head_dim"]
    )
    window_rope = _window_rope(fields, family)
    vocab = source.metadata.get("tokenizer.ggml.tokens")
    return ModelConfig(
        family=family.name,
        layers=layers if window_rope is None else with_own_rope(layers),
        hidden=described.raw["hidden_size"],
        vocab=fields.whole("vocab_size", getattr(vocab, "length", None)),
        norm_eps=fields.real(_NORM_EPS.get(family.norm_kind, "attention.layer_norm_rms_epsilon")),
        trained_positions=positions,
        rope=_gguf_rope(fields, positions, head_dim),
        window_rope=window_rope,
        norm_kind=family.norm_kind,
        tied="output.weight" not in names,
        eos_token_ids=_gguf_eos(source.metadata),
        **scales,
    )


def _refuse_unsupported(fields: Fields) -> None:
    where, own = fields.source, fields.raw
    if own.get("expert_count"):
        raise UnsupportedModelError(f"{where}: mixture of experts (expert_count) is not supported")
    if own.get("attn_logit_softcapping"):
        raise UnsupportedModelError(f"{where}: attn_logit_softcapping is not supported")
    if own.get("rope.dimension_sections") is not None:
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
        "final_logit_softcapping": described.raw["final_logit_softcapping"],
    }
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
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "max_position_embeddings": positions,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.whole("feed_forward_length"),
        **{ours: fields.real(name) for ours, name in _NUMBERS.items() if name in fields.raw},
    }


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


def _gemma3(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file, and what files of Gemma 3 do not say. Raises CheckpointError."""
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    scalar = fields.whole("attention.key_length", hidden // heads or 1)
    if fields.raw.get("block_count") == _GEMMA3_27B:
        scalar = hidden / heads
    return fields, {"query_pre_attn_scalar": scalar, **_GEMMA}


def _of_layers(fields: Fields, name: str, count: int) -> list[int]:
    """Return a number of each layer, of a field that gives one or each. Raises CheckpointError."""
    given = fields.get(name)
    values = getattr(given, "values", [given] * count)
    each = values.tolist() if hasattr(values, "tolist") else list(values)
    return [Fields({name: value}, fields.source).whole(name) for value in each]


def _gemma4(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file with those of layers with a window under the usual names, and
    what differs in the others, under names of config.json.

    Raises CheckpointError or UnsupportedModelError.
    """
    where, own = fields.source, dict(fields.raw)
    slides = list(map(bool, getattr(own.get("attention.sliding_window_pattern"), "values", [])))
    each = _of_layers(fields, "attention.head_count_kv", len(slides))
    if True not in slides or False not in slides or len(each) != len(slides):
        raise CheckpointError(
            f"{where}: attention.sliding_window_pattern and attention.head_count_kv must give "
            "windows and numbers of heads by layer"
        )
    if "rope_freqs.weight" not in names:
        raise CheckpointError(f"{where}: rope_freqs.weight is missing")
    full, head_dim = slides.index(False), fields.whole("attention.key_length")
    more = {
        **_GEMMA,
        "per_layer_config": {
            str(layer): {"head_dim": head_dim, "num_key_value_heads": each[layer]}
            for layer, has_window in enumerate(slides)
            if not has_window
        },
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in names,
        "hidden_size_per_layer_input": own.get("embedding_length_per_layer_input"),
        "num_kv_shared_layers": own.get("attention.shared_kv_layers"),
    }
    widths = set(_of_layers(fields, "feed_forward_length", len(slides)))
    if len(widths) > 1:
        raise UnsupportedModelError(
            f"{where}: feed_forward_length of {min(widths)} to {max(widths)} by layer is not "
            "supported"
        )
    own["feed_forward_length"] = widths.pop()
    own["attention.head_count_kv"] = each[slides.index(True)]
    for name in ("attention.key_length", "attention.value_length"):
        own[name] = own.get(f"{name}_swa", own.get(name))
    return Fields(own, where), more


# What files of an architecture say in their own way: its functions return the fields under the
# usual names, and further ones under names of config.json.
_OWN_FIELDS: Mapping[str, Callable[[Fields, Set[str]], tuple[Fields, dict[str, Any]]]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}


def _window_rope(fields: Fields, family: Family) -> RopeConfig | None:
    """Return the rotary embedding of layers with a window, None if it is that of the others."""
    own = family.defaults.get("rope_parameters", {}).get(SLIDING, {})
    theta = family.defaults.get("rope_local_base_freq", own.get("rope_theta"))
    if family.unscaled_windows:
        theta = fields.real("rope.freq_base", 10000.0)
    return theta and RopeConfig(theta=fields.real("rope.freq_base_swa", theta))


def _with_tensors(spec: LayerSpec, names: Set[str]) -> LayerSpec:
    """Return a layer with the biases and norms that the file has tensors of."""
    mixer = replace(
        spec.mixer,
        qkv_bias=not names.isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        output_bias="blk.0.attn_output.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
    )
    return replace(spec, mixer=mixer)


def _gguf_rope(fields: Fields, positions: int, head_dim: int) -> RopeConfig:
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
