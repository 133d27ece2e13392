"""Latent attention in GGUF files, as llama.cpp's converter writes that of DeepSeek and GLM."""

from __future__ import annotations

import gguf
import numpy as np


def describe_latent(writer: gguf.GGUFWriter, config: object) -> None:
    """Adds the sizes of latent attention, as of one head that all query heads share."""
    latent, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(latent)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    rope = config.rope_parameters
    if scale := rope.get("mscale_all_dim", 1.0 if "llama_4_scaling_beta" in rope else None):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def latent_tensors(config: object, layer: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The projections of keys, transposed, and of values of each head, which are one tensor in
    safetensors.
    """
    heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], 1)
    prefix = f"blk.{layer}.attn_"
    return {f"{prefix}k_b.weight": keys.transpose(0, 2, 1).copy(), f"{prefix}v_b.weight": values}
