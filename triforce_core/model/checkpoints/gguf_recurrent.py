"""What GGUF files of architectures with recurrent layers say in their own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL
from triforce_core.model.families.recurrent import CONV, LINEAR
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# Returns the fields of a file under the usual names, and further ones under names of config.json,
# from its fields and the names of its tensors.
OwnFields = Callable[[Fields, Set[str]], tuple[Fields, dict[str, Any]]]
# llama.cpp's numbers of routers.
SOFTMAX, SIGMOID = 1, 2
# What files say of the longest context where nothing rotates, and what Granite 4 was trained for.
_NO_POSITIONS, _GRANITE4_POSITIONS = 1 << 20, 131_072


def of_layers(fields: Fields, name: str, count: int, least: int = 1) -> list[int]:
    """Return a number of each layer, of a field that gives one or each. Raises CheckpointError."""
    given = fields.get(name)
    values = getattr(given, "values", [given] * count)
    each = values.tolist() if hasattr(values, "tolist") else list(values or ())
    return [Fields({name: value}, fields.source).whole(name, least=least) for value in each]


def layers_of(fields: Fields) -> int:
    """Return the number of layers without those that only draft. Raises CheckpointError."""
    return fields.whole("block_count") - fields.whole("nextn_predict_layers", 0, least=0)


def _qwen35(fields: Fields, names: Set[str]) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a file without its layers that only draft, and those of its recurrent
    layers. Raises CheckpointError.
    """
    own, heads = dict(fields.raw), fields.whole("ssm.time_step_rank")
    own["block_count"] = count = layers_of(fields)
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
    fields.only("expert_gating_func", SIGMOID)
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
    count = layers_of(fields)
    own, kinds = _by_layer(dict(fields.raw), fields.source, LINEAR, [FULL] * count)
    own["block_count"] = count
    widths = of_layers(fields, "feed_forward_length", count, least=0)[:count]
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


RECURRENT_FIELDS: Mapping[str, OwnFields] = {
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen3next": _qwen3next,
    "qwen4exp": _qwen4exp,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "granitehybrid": _granitehybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
}
