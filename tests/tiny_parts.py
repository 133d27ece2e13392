"""Fields that configs of tiny models share."""

from __future__ import annotations

VOCAB = 97
LAYERS = 3

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Wide enough that the arg-max is rarely close.
    "initializer_range": 0.3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SLIDING = ("sliding_attention",) * (LAYERS - 1)

GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": False,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        },
    },
}
# Keys and values that later layers use, and per-layer embeddings.
GEMMA4_SMALL = {
    **GEMMA4,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", *SLIDING, "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
}
QWEN3_5 = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MOE = {"moe_intermediate_size": 40}
# Tokens behind the first 19 choose the keys that they attend to.
QWEN4 = QWEN3_5 | {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "hc_count": 4,
    "hc_lowrank": 12,
    "ple_layer_ids": [3],
    "ple_embed_dim": 48,
    "heads_per_ngram": 3,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 4,
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "eos_token_id": 3,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    **MOE,
}
GRANITE4 = {
    "intermediate_size": 40,
    "shared_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
# Three layers, of which one has no MLP.
NEMOTRON = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 6,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    **MOE,
}
LAGUNA = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 48,
    "moe_routed_scaling_factor": 1.5,
    "head_dim": 16,
    "num_attention_heads_per_layer": [4, 6, 6],
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": YARN | {"partial_rotary_factor": 0.5},
    },
    **MOE,
}
MELLUM = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": [*SLIDING, "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": YARN,
    },
    **MOE,
}
AFMOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "num_dense_layers": 1,
    "route_scale": 1.5,
    "mup_enabled": True,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": [*SLIDING, "full_attention"],
    **MOE,
}
LFM3 = {
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "conv_L_cache": 7,
    "sliding_window": 24,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
}
LONGROPE = {
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 20,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(6)],
        "long_factor": [2.0 + 0.7 * i for i in range(6)],
        "original_max_position_embeddings": 20,
        "partial_rotary_factor": 0.75,
    },
}
SOLAR = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "head_dim": 16,
    **MOE,
}
EXAONE_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": [*SLIDING, "full_attention"],
    **MOE,
}
HY_V3 = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "router_scaling_factor": 1.5,
    "head_dim": 16,
    **MOE,
}
DOTS1 = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "head_dim": 16,
    "sliding_window": None,
    **MOE,
}
