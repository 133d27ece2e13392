"""What GGUF files of some architectures say in their own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from triforce_core.model.families.family import EXPERT_COUNTS
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL, SLIDING
from triforce_core.model.families.recurrent import CONV, LINEAR
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# Numbers of layers of Gemma 2 27B and 3 27B. llama.cpp knows by them how these scale scores.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
# What Gemma 2 has where a file is silent: by the field's name there and in config.json.
_GEMMA2 = {
    ("attn_logit_softcapping", "attn_logit_softcapping"): 50.0,
    ("final_logit_softcapping", "final_logit_softcapping"): 30.0,
    ("attention.sliding_window", "sliding_window"): 4096,
}
# llama.cpp's numbers of routers.
_SOFTMAX, _SIGMOID = 1, 2
_SCORES = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}
# What files say of the longest context where nothing rotates, and what Granite 4 was trained for.
_NO_POSITIONS, _GRANITE4_POSITIONS = 1 << 20, 131_072
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


def _of_layers(fields: Fields, name: str, count: int, least: int = 1) -> list[int]:
    """Return a number of each layer, of a field that gives one or each. Raises CheckpointError."""
    given = fields.get(name)
    values = getattr(given, "values", [given] * count)
    each = values.tolist() if hasattr(values, "tolist") else list(values or ())
    return [Fields({name: value}, fields.source).whole(name, least=least) for value in each]


def _layers_of(fields: Fields) -> int:
    """Return the number of layers without those that only draft. Raises CheckpointError."""
    return fields.whole("block_count") - fields.whole("nextn_predict_layers", 0, least=0)


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
        "enable_moe_block": bool(own.get("expert_count")),
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


def _laguna(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file with the greatest number of heads of a layer, and that of each.
    Of a period of layers, by default four, the first has no window. Raises CheckpointError or
    UnsupportedModelError.
    """
    fields.only("expert_gating_func", _SIGMOID)
    fields.only("rope.dimension_count_swa", fields.get("attention.key_length"))
    own, count = dict(fields.raw), fields.whole("block_count")
    heads = _of_layers(fields, "attention.head_count", count)
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


def _qwen35(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file without its layers that only draft, and those of its recurrent
    layers. Raises CheckpointError.
    """
    own, heads = dict(fields.raw), fields.whole("ssm.time_step_rank")
    own["block_count"] = count = _layers_of(fields)
    every = fields.whole("full_attention_interval", 4)
    kinds = [FULL if (index + 1) % every == 0 else LINEAR for index in range(count)]
    own, kinds = _by_layer(own, fields.source, LINEAR, kinds)
    return Fields(own, fields.source), {
        "layer_types": kinds,
        "linear_num_key_heads": fields.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.whole("ssm.state_size"),
        "linear_value_head_dim": fields.whole("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": fields.whole("ssm.conv_kernel"),
        "tiled_output": True,
    }


def _qwen3next(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """As of Qwen3.5, whose files have value heads in another order. Raises CheckpointError."""
    fields, more = _qwen35(fields, names)
    return fields, more | {"tiled_output": False}


def _qwen4exp(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields as of Qwen3.5, and those of residual streams, of the index and of n-grams.
    Raises CheckpointError or UnsupportedModelError.
    """
    fields, more = _qwen35(fields, names)
    more |= {
        "output_gate_type": "sigmoid",
        "hc_count": fields.whole("hyper_connection.count"),
        "hc_lowrank": fields.whole("hyper_connection.low_rank"),
        "indexer_n_heads": fields.get("attention.indexer.head_count"),
        "indexer_head_dim": fields.get("attention.indexer.key_length"),
        "indexer_budget": fields.get("attention.indexer.top_k"),
    }
    # Of layers that attend to all keys, 0.
    if blocks := _numbers(fields, "attention.compress_ratios"):
        more["indexer_compress_ratio"] = max(blocks)
        if len({*blocks, 0}) > 2:
            raise UnsupportedModelError(
                f"{fields.source}: attention.compress_ratios {blocks} that differ are not supported"
            )
    if layers := _numbers(fields, "ple.layers"):
        more |= {
            "ple_layer_ids": [layer + 1 for layer in layers],
            "ngram_size": fields.whole("ple.ngram_size"),
            "heads_per_ngram": fields.whole("ple.heads_per_ngram"),
            "ple_conv_kernel_size": fields.whole("ple.conv_kernel"),
            "eos_token_id": fields.whole("ple.eos_token_id", least=0),
            "ngram_rows": _numbers(fields, "ple.head_vocab_sizes"),
            "ngram_multipliers": _numbers(fields, "ple.layer_multipliers"),
        }
        heads = (more["ngram_size"] - 1) * more["heads_per_ngram"]
        more["ple_embed_dim"] = heads * fields.whole("embedding_length_per_layer_input")
    return fields, more


def _numbers(fields: Fields, name: str) -> list[int]:
    """Return a list of numbers, empty if it is not there."""
    values = getattr(fields.get(name), "values", None)
    return [] if values is None else [int(value) for value in values]


def _qwen3moe(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """llama.cpp normalises the weights of experts in every file of this architecture."""
    return fields, {"norm_topk_prob": True}


def _glm4moe(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file without its layers that only draft. Raises CheckpointError."""
    own = dict(fields.raw)
    own["block_count"] = _layers_of(fields)
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
    if fields.get("attention.temperature_scale"):
        raise UnsupportedModelError(
            f"{fields.source}: queries that grow with their position (attention.temperature_scale) "
            "are not supported with latent attention"
        )
    own, rotated = dict(fields.raw), fields.whole("rope.dimension_count")
    own["block_count"] = count = _layers_of(fields)
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
    scores = fields.get("expert_gating_func") or (_SIGMOID if biased else _SOFTMAX)
    if scores not in _SCORES:
        raise UnsupportedModelError(
            f"{fields.source}: expert_gating_func {scores!r} is not supported (only "
            f"{' or '.join(map(str, _SCORES))})"
        )
    return Fields(own, fields.source), more | {"scoring_func": _SCORES[scores]}


def _yarn_of_keys(fields: Fields) -> dict[str, Any]:
    """Return what YaRN has to do with the scale of scores, under names of config.json. A file has a
    tenth of mscale_all_dim.
    """
    if (tenth := fields.get("rope.scaling.yarn_log_multiplier")) is None:
        return {}
    kind, factor = fields.get("rope.scaling.type"), fields.get("rope.scaling.factor")
    return {"rope_type": kind, "factor": factor, "mscale_all_dim": 10 * tenth}


def _lfm2(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file, and those of its convolutions. Raises CheckpointError."""
    kinds = [FULL] * fields.whole("block_count")
    own, kinds = _by_layer(dict(fields.raw), fields.source, CONV, kinds)
    more = {"layer_types": kinds, "conv_L_cache": fields.whole("shortconv.l_cache")}
    return Fields(own, fields.source), {**more, "block_auto_adjust_ff_dim": False}


def _lfm2moe(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields as of LFM2, and those of the experts. Raises CheckpointError or
    UnsupportedModelError.
    """
    fields.only("expert_gating_func", _SIGMOID)
    own, more = _lfm2(fields, names)
    more["use_expert_bias"] = any(name.endswith("exp_probs_b.bias") for name in names)
    more["num_dense_layers"] = fields.whole("leading_dense_block_count", 0, least=0)
    return own, more


def _granitehybrid(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file, and those of its Mamba-2 layers. Raises CheckpointError."""
    kinds = [FULL] * fields.whole("block_count")
    own, kinds = _by_layer(dict(fields.raw), fields.source, LINEAR, kinds)
    heads, values = fields.whole("ssm.time_step_rank"), fields.whole("ssm.inner_size")
    # Bamba has none, and another one in llama.cpp.
    fields.real("attention.scale")
    if own.get("context_length") == _NO_POSITIONS:
        own["context_length"] = _GRANITE4_POSITIONS
    shared = "expert_shared_feed_forward_length"
    return Fields(own, fields.source), {
        "layer_types": kinds,
        "num_local_experts": fields.get("expert_count"),
        "shared_intermediate_size": fields.get(shared) or fields.get("feed_forward_length"),
        # llama.cpp's sign for models that rotate.
        "position_embedding_type": "rope" if fields.flag("rope.scaling.finetuned", True) else None,
        "mamba_n_heads": heads,
        "mamba_n_groups": fields.whole("ssm.group_count"),
        "mamba_d_state": fields.whole("ssm.state_size"),
        "mamba_d_head": values // heads,
        "mamba_d_conv": fields.whole("ssm.conv_kernel"),
        "mamba_expand": values // fields.whole("embedding_length"),
        "mamba_conv_bias": _with_conv_bias(names),
    }


def _nemotron_h(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file without what only drafts, and those of its Mamba-2 layers. Raises
    CheckpointError.
    """
    count = _layers_of(fields)
    own, kinds = _by_layer(dict(fields.raw), fields.source, LINEAR, [FULL] * count)
    own["block_count"] = count
    widths = _of_layers(fields, "feed_forward_length", count, least=0)[:count]
    if len(widths) < count:
        raise CheckpointError(
            f"{fields.source}: feed_forward_length must give a number for each of {count} blocks, "
            f"got {len(widths)}"
        )
    for block, width in enumerate(widths):
        if width:
            kinds[block] = "moe" if f"blk.{block}.ffn_gate_inp.weight" in names else "mlp"
    # Nothing rotates.
    own = {name: value for name, value in own.items() if not name.startswith("rope.")}
    own["feed_forward_length"] = max(widths, default=0)
    heads = fields.whole("ssm.time_step_rank")
    return Fields(own, fields.source), {
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": fields.whole("ssm.inner_size") // heads,
        "n_groups": fields.whole("ssm.group_count"),
        "ssm_state_size": fields.whole("ssm.state_size"),
        "conv_kernel": fields.whole("ssm.conv_kernel"),
        "use_conv_bias": _with_conv_bias(names),
        "moe_latent_size": fields.get("moe_latent_size"),
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
    }


def _with_conv_bias(names: Set[str]) -> bool:
    return any(name.endswith("ssm_conv1d.bias") for name in names)


def _by_layer(
    own: dict[str, Any], where: str, recurrent: str, kinds: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields with one number of key-value heads, and the kind of each layer: recurrent
    ones have no heads, if the file gives them by layer. Raises CheckpointError.
    """
    name = "attention.head_count_kv"
    given = getattr(own.get(name), "values", None)
    if given is None:
        return own, kinds
    each = given.tolist() if hasattr(given, "tolist") else list(given)
    counts = {count for count in each if count}
    if len(each) < len(kinds) or len(counts) != 1:
        raise CheckpointError(f"{where}: {name} must give one number or none by layer, got {each}")
    kinds = [FULL if count else recurrent for count in each[: len(kinds)]]
    return own | {name: counts.pop()}, kinds


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
OWN_FIELDS: Mapping[str, Callable[[Fields, Set[str]], tuple[Fields, dict[str, Any]]]] = {
    "gemma2": _gemma2,
    "gemma3": partial(_gemma, _GEMMA_27B["gemma3"]),
    "gemma4": _gemma4,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3moe": _qwen3moe,
    "glm4moe": _glm4moe,
    "qwen3next": _qwen3next,
    "qwen4exp": _qwen4exp,
    "deepseek2": _deepseek2,
    "laguna": _laguna,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "granitehybrid": _granitehybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
}
