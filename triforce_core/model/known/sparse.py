"""Shapes of mixtures of experts: fields of their config.json files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 1e7,
    "dtype": "bfloat16",
}
# Other fields have their defaults.
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
    "dtype": "bfloat16",
}
# The text part of Gemma 4, whose other fields have their defaults.
GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SPARSE: Mapping[str, Mapping[str, Any]] = {
    # Those of July 2025 and later, and Qwen3-Coder, which has the same shape.
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-coder-30b-a3b": _QWEN3_30B_A3B,
    # The text part of Qwen3.5 and 3.6, whose other fields have their defaults.
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        "dtype": "bfloat16",
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "dtype": "bfloat16",
    },
    # That of M2, 2.1 and 2.5.
    "minimax-m2": {
        "model_type": "minimax_m2",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "rotary_dim": 64,
        "vocab_size": 200064,
        "max_position_embeddings": 196608,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "dtype": "bfloat16",
    },
    "laguna-xs-2.1": {
        "model_type": "laguna",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 10,
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 32.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 64.0,
                "beta_slow": 1.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vocab_size": 100352,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "gemma4-26b-a4b": GEMMA4
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "head_dim": 128,
        "attention_bias": True,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "dtype": "bfloat16",
    },
}
