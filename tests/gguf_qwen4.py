"""What llama.cpp's converter writes of Qwen3.8-Flash-Next, beside what Qwen3.5 has too."""

from __future__ import annotations

import re

import gguf
import numpy as np
import torch

_NAMES = {
    r"attn_hyper_connection\.hc_norm": "hc_attn_norm",
    r"attn_hyper_connection\.input_mix_weight_down": "hc_attn_down",
    r"attn_hyper_connection\.input_mix_weight_up": "hc_attn_up",
    r"attn_hyper_connection\.block_inject_weight": "hc_attn_inject",
    r"mlp_hyper_connection\.hc_norm": "hc_ffn_norm",
    r"mlp_hyper_connection\.input_mix_weight_down": "hc_ffn_down",
    r"mlp_hyper_connection\.input_mix_weight_up": "hc_ffn_up",
    r"mlp_hyper_connection\.block_inject_weight": "hc_ffn_inject",
    r"ple\.key_proj": "ple_key",
    r"ple\.value_proj": "ple_value",
    r"ple\.norm_key": "ple_norm_key",
    r"ple\.norm_query": "ple_norm_query",
    r"ple\.norm_conv": "ple_norm_conv",
    r"ple\.conv1d": "ple_conv1d",
    r"indexer\.q_layernorm": "indexer.q_norm",
    r"indexer\.k_layernorm": "indexer.k_norm",
}
_ENDS = {
    "hc_norm": "output_hc_norm",
    "input_mix_weight_down": "output_hc_down",
    "input_mix_weight_up": "output_hc_up",
}


def qwen4_tensors(config: object, name: str, array: np.ndarray) -> dict[str, np.ndarray] | None:
    """The tensors of a file that one of transformers becomes; none of constants that are metadata.
    None for a tensor that Qwen3.5 has too.
    """
    plus = array + 1 if "norm" in name else array
    if "hyper_connection_mixer" in name:
        return {f"{_ENDS[name.split('.')[-2]]}.weight": plus}
    if name.endswith("ngram_embedding.weight"):
        return {"per_layer_token_embd.weight": array}
    if "ple_embedding" in name:
        return {}
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and name.endswith("indexer.index_qk_proj.weight"):
        queries = config.indexer_n_heads * config.indexer_head_dim
        parts = {"q": array[:queries], "k": array[queries:]}
        return {f"blk.{layer[1]}.indexer.{part}_proj.weight": rows for part, rows in parts.items()}
    for pattern, stored in _NAMES.items():
        if layer and re.search(pattern + r"\.weight$", name):
            return {f"blk.{layer[1]}.{stored}.weight": plus.squeeze()}
    return None


def describe_qwen4(writer: gguf.GGUFWriter, model: torch.nn.Module) -> None:
    """Adds the metadata of residual streams, of the index and of n-grams."""
    config, number, numbers = model.config, writer.add_uint32, writer.add_array
    writer.add_eos_token_id(config.eos_token_id)
    number("qwen4exp.hyper_connection.count", config.hc_count)
    number("qwen4exp.hyper_connection.low_rank", config.hc_lowrank)
    number("qwen4exp.attention.indexer.head_count", config.indexer_n_heads)
    number("qwen4exp.attention.indexer.key_length", config.indexer_head_dim)
    number("qwen4exp.attention.indexer.top_k", config.indexer_budget)
    ratio, kinds = config.indexer_compress_ratio, config.layer_types
    chooses = [ratio if kind == "indexed_attention" else 0 for kind in kinds]
    numbers("qwen4exp.attention.compress_ratios", chooses)
    numbers("qwen4exp.ple.layers", [layer - 1 for layer in config.ple_layer_ids])
    number("qwen4exp.ple.ngram_size", config.ngram_size)
    number("qwen4exp.ple.heads_per_ngram", config.heads_per_ngram)
    number("qwen4exp.ple.conv_kernel", config.ple_conv_kernel_size)
    number("qwen4exp.ple.eos_token_id", config.eos_token_id)
    heads = config.heads_per_ngram * (config.ngram_size - 1)
    number("qwen4exp.embedding_length_per_layer_input", config.ple_embed_dim // heads)
    constants = model.model.layers[config.ple_layer_ids[0] - 1].ple.ple_embedding
    for name, buffer in (
        ("layer_multipliers", constants.layer_multipliers),
        ("head_offsets", constants.ngram_heads_offsets),
        ("head_vocab_sizes", constants.ngram_heads_vocab_sizes),
    ):
        kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
        writer.add_key_value(f"qwen4exp.ple.{name}", buffer.tolist(), *kinds)
