"""What GGUF files of some architectures say in their own way."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any

from triforce_core.model.checkpoints.gguf_recurrent import (
    RECURRENT_FIELDS,
    SIGMOID,
    SOFTMAX,
    OwnFields,
    layers_of,
    of_layers,
)
from triforce_core.model.families.family import EXPERT_COUNTS
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL, SLIDING
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# Numbers of layers of Gemma 2 27B and 3 27B. llama.cpp knows by them how these scale scores.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
# What Gemma 2 has where a file is silent: by the field's name there and in config.json.
_GEMMA2 = {
    ("attn_logit_softcapping", "attn_logit_softcapping"): 50.0,
    ("final_logit_softcapping", "final_logit_softcapping"): 30.0,
    ("attention.sliding_window", "sliding_window"): 4096,
}
_SCORES = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
# What every model of Gemma has.
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file, and what files of Gemma 2 do not say: the first ones have
    neither caps nor windows, which llama.cpp knows. Raises CheckpointError.
    """
    fields, more = _gemma(_GEMMA_27B["gemma2"], fields, names)
    absent = (each for each in _GEMMA2.items() if each[0][0] not in fields.raw)
    return fields, more | {ours: value for (_, ours), value in absent}


def _gemma(layers: int, fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file, and what files of Gemma 2 and 3 do not say. Raises
    CheckpointError.

    layers: number of layers of the 27B
    """
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    scalar = fields.whole("attention.key_length", hidden // heads or 1)
    if fields.raw.get("block_count") == layers:
        scalar = hidden / heads
    return fields, {"query_pre_attn_scalar": scalar, **_GEMMA}


def _gemma4(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file with those of layers with a window under the usual names, and
    what differs in the others, under names of config.json.

    Raises CheckpointError or UnsupportedModelError.
    """
    where, own = fields.source, dict(fields.raw)
    slides = list(map(bool, getattr(own.get("attention.sliding_window_pattern"), "values", [])))
    heads = of_layers(fields, "attention.head_count_kv", len(slides))
    if True not in slides or False not in slides or len(heads) != len(slides):
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
            str(layer): {"head_dim": head_dim, "num_key_value_heads": heads[layer]}
            for layer, has_window in enumerate(slides)
            if not has_window
        },
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in names,
        "hidden_size_per_layer_input": own.get("embedding_length_per_layer_input") or 0,
        "num_kv_shared_layers": own.get("attention.shared_kv_layers"),
        "enable_moe_block": bool(own.get("expert_count")),
    }
    each = list(of_layers(fields, "feed_forward_length", len(slides)))
    sharing = more["num_kv_shared_layers"] or 0
    if sharing and each == [each[0]] * (len(slides) - sharing) + [2 * each[0]] * sharing:
        each, more["use_double_wide_mlp"] = each[:1], True
    widths = set(each)
    if len(widths) > 1:
        raise UnsupportedModelError(
            f"{where}: feed_forward_length of {min(widths)} to {max(widths)} by layer is not "
            "supported"
        )
    own["feed_forward_length"] = widths.pop()
    own["attention.head_count_kv"] = heads[slides.index(True)]
    for name in ("attention.key_length", "attention.value_length"):
        own[name] = own.get(f"{name}_swa", own.get(name))
    return Fields(own, where), more


def _laguna(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file with the greatest number of heads of a layer, and that of each.
    Of a period of layers, by default four, the first has no window. Raises CheckpointError or
    UnsupportedModelError.
    """
    fields.only("expert_gating_func", SIGMOID)
    fields.only("rope.dimension_count_swa", fields.get("attention.key_length"))
    own, count = dict(fields.raw), fields.whole("block_count")
    heads = of_layers(fields, "attention.head_count", count)
    own["attention.head_count"] = max(heads)
    dense = fields.whole("leading_dense_block_count", 0, least=0)
    more = {
        "num_attention_heads_per_layer": heads,
        "mlp_layer_types": ["dense" if index < dense else "sparse" for index in range(count)],
    }
    slides = getattr(own.get("attention.sliding_window_pattern"), "values", None)
    if slides is None:
        period = fields.whole("attention.sliding_window_pattern", 4)
        has_window = bool(own.get("attention.sliding_window"))
        slides = [has_window and index % period for index in range(count)]
    return Fields(own, fields.source), more | {
        "layer_types": [SLIDING if each else FULL for each in slides]
    }


def _afmoe(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file, and what llama.cpp knows of all: embeddings are scaled, and the
    last of each four layers, or of as many as the file says, has no window.

    Raises CheckpointError or UnsupportedModelError.
    """
    fields.only("expert_gating_func", SIGMOID)
    more = {
        "mup_enabled": True,
        "num_shared_experts": fields.whole("expert_shared_count", 0, least=0),
        "num_dense_layers": fields.whole("leading_dense_block_count", 0, least=0),
        "route_norm": fields.get("expert_weights_norm"),
        "route_scale": fields.real("expert_weights_scale", 1.0),
    }
    if getattr(fields.get("attention.sliding_window_pattern"), "values", None) is None:
        period = fields.whole("attention.sliding_window_pattern", 4)
        more["global_attn_every_n_layers"] = period
    return fields, more


def _qwen3moe(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """llama.cpp normalises the weights of experts in every file of this architecture."""
    return fields, {"norm_topk_prob": True}


def _glm4moe(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file without its layers that only draft. Raises CheckpointError."""
    own = dict(fields.raw)
    own["block_count"] = layers_of(fields)
    return Fields(own, fields.source), {"norm_topk_prob": bool(own.get("expert_weights_norm"))}


def _deepseek2(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file without its layers that only draft, and those of its latent
    attention. Raises CheckpointError or UnsupportedModelError.
    """
    if "attention.key_length_mla" not in fields.raw:
        raise UnsupportedModelError(
            f"{fields.source}: files without attention.key_length_mla are not supported, as "
            "llama.cpp wrote them before April 2025; convert the model again"
        )
    own, rotated = dict(fields.raw), fields.whole("rope.dimension_count")
    own["block_count"] = count = layers_of(fields)
    dense = fields.whole("leading_dense_block_count", 0, least=0)
    own["attention.value_length"] = fields.whole("attention.key_length")
    more = {
        "kv_lora_rank": fields.whole("attention.kv_lora_rank"),
        "q_lora_rank": fields.get("attention.q_lora_rank") or 0,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": fields.whole("attention.key_length_mla") - rotated,
        "v_head_dim": fields.whole("attention.value_length_mla"),
        "first_k_dense_replace": dense if fields.get("expert_count") else count,
        "n_shared_experts": fields.whole("expert_shared_count", 0, least=0),
        "norm_topk_prob": bool(own.get("expert_weights_norm")),
        "rope_parameters": _yarn_of_keys(fields),
    }
    # The first files do not say it.
    biased = any(name.endswith("exp_probs_b.bias") for name in names)
    scores = fields.get("expert_gating_func") or (SIGMOID if biased else SOFTMAX)
    if scores not in _SCORES:
        raise UnsupportedModelError(
            f"{fields.source}: expert_gating_func {scores!r} is not supported (only "
            f"{' or '.join(map(str, _SCORES))})"
        )
    return Fields(own, fields.source), more | {"scoring_func": _SCORES[scores]}


def _mistral4(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Likewise, of Mistral Small 4. Files that llama.cpp's converter makes of transformers' do not
    say that queries grow with their position.
    """
    own = {"attention.temperature_scale": 0.1, **fields.raw}
    return _deepseek2(Fields(own, fields.source), names)


def _yarn_of_keys(fields: Fields) -> dict[str, Any]:
    """Return what YaRN has to do with the scale of scores, under names of config.json. A file has a
    tenth of mscale_all_dim.
    """
    if (tenth := fields.get("rope.scaling.yarn_log_multiplier")) is None:
        return {}
    kind, factor = fields.get("rope.scaling.type"), fields.get("rope.scaling.factor")
    return {"rope_type": kind, "factor": factor, "mscale_all_dim": 10 * tenth}


# Names of fields of experts in config.json files, by their names in a file. Families have names of
# their own for some.
_EXPERTS = {
    "expert_count": EXPERT_COUNTS,
    "expert_used_count": ("num_experts_per_tok", "moe_k", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor", "moe_routed_scaling_factor"),
    "expert_weights_norm": ("norm_topk_prob",),
}


def expert_fields(fields: Fields) -> dict[str, Any]:
    """Return the fields of experts under their names in config.json files."""
    return {
        name: fields.get(stored)
        for stored, names in _EXPERTS.items()
        if stored in fields.raw
        for name in names
    }


# What files of an architecture say in their own way: its functions return the fields under the
# usual names, and further ones under names of config.json.
OWN_FIELDS: Mapping[str, OwnFields] = {
    **RECURRENT_FIELDS,
    "gemma2": _gemma2,
    "gemma3": partial(_gemma, _GEMMA_27B["gemma3"]),
    "gemma4": _gemma4,
    "qwen3moe": _qwen3moe,
    "glm4moe": _glm4moe,
    "deepseek2": _deepseek2,
    "mistral4": _mistral4,
    "laguna": _laguna,
    "afmoe": _afmoe,
}
