"""Configs of tiny models of every family, as transformers makes them."""

from __future__ import annotations

from tiny_parts import (
    AFMOE,
    DOTS1,
    EXAONE_MOE,
    GEMMA4,
    GEMMA4_SMALL,
    GRANITE4,
    HY_V3,
    LAGUNA,
    LATENT,
    LAYERS,
    LFM3,
    LLAMA3,
    LONGROPE,
    MELLUM,
    MOE,
    NEMOTRON,
    QWEN3_5,
    QWEN4,
    SLIDING,
    SOLAR,
    YARN,
)

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    # 64 trained positions, so that the texts below run past them and the frequencies change.
    "dynamic-rope": (
        "Llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "yarn-rope": ("Qwen2", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    # A window in every layer: no KV is stored in blocks, and nothing of it streams.
    "mistral-windows": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_bias": True}),
    # MLPs without a gate.
    "arcee": ("Arcee", {"head_dim": 24}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "olmo2": ("Olmo2", {}),
    "exaone4": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS, "head_dim": 16},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    # Without recurrent layers and experts.
    "granite4": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["full_attention"] * LAYERS,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "mamba_n_heads": 4,
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "phi3": ("Phi3", {}),
    "phi3-partial": ("Phi3", {"partial_rotary_factor": 0.75}),
    # Few enough positions that prompts are longer: long factors, and queries that grow.
    "phi3-longrope": ("Phi3", LONGROPE),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 20,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "ministral": ("Ministral", {"head_dim": 16, "sliding_window": 24}),
    "cwm": (
        "Cwm",
        {
            "head_dim": 16,
            # transformers takes no null, and the vocabulary has no such token.
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "sliding_window": 24,
            "layer_types": ["full_attention", *SLIDING],
            "rope_parameters": LLAMA3,
        },
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    # Windows shorter than prompts, and than what is drafted.
    "qwen3-windows": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "exaone4-windows": (
        "Exaone4",
        {"head_dim": 16, "sliding_window": 24, "layer_types": [*SLIDING, "full_attention"]},
    ),
    "smollm3-windows": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 12,
            "layer_types": [*SLIDING, "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        },
    ),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 0.5,
        },
    ),
    # Caps of scores and of logits, which these scores reach.
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 4,
            "tie_word_embeddings": False,
            "sliding_window": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    # A scale of scores that is not that of the heads' size, and two rotary embeddings.
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            # Scaled embeddings that are also the output matrix would repeat each token.
            "tie_word_embeddings": False,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            },
        },
    ),
    # Full layers with more and fewer heads than the others, whose values are their keys.
    "gemma4": ("Gemma4", {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "gemma4-unified": ("Gemma4Unified", GEMMA4),
    "gemma4-small": ("Gemma4", GEMMA4_SMALL),
    "gemma4-moe": (
        "Gemma4",
        {
            **GEMMA4,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    # Recurrent layers before and after attention: the gated delta rule, and convolutions alone.
    "qwen3_5": ("Qwen3_5", QWEN3_5),
    # Experts, in some models beside dense layers or a shared expert.
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": None},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48, **MOE},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 16,
            **MOE,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "tie_word_embeddings": False, **MOE},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "head_dim": 16,
            "use_qk_norm": True,
            **MOE,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **QWEN3_5,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 48,
            **MOE,
        },
    ),
    # Recurrent layers whose projections are stored together, and a dense layer.
    "qwen3_next-moe": (
        "Qwen3Next",
        {
            **QWEN3_5,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
            **MOE,
        },
    ),
    "exaone_moe-moe": ("ExaoneMoe", EXAONE_MOE),
    "hy_v3-moe": ("HYV3", HY_V3),
    "flex_olmo-moe": ("FlexOlmo", {"num_experts": 8, "num_experts_per_tok": 3}),
    "solar_open-moe": ("SolarOpen", SOLAR),
    "dots1-moe": ("Dots1", DOTS1),
    "mellum-moe": ("Mellum", MELLUM),
    # A gate for each column, stored apart from the queries, and scaled embeddings.
    "afmoe-moe": ("Afmoe", AFMOE),
    # Heads that are normalised together, and rotated in part.
    "minimax_m2-moe": (
        "MiniMaxM2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    # Latent attention: with a rank of queries or without, and YaRN that makes scores sharper.
    # The first has vectors of the size of its queries.
    "deepseek_v2-moe": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "kv_lora_rank": 16, "n_shared_experts": 2},
    ),
    "deepseek_v3-moe": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},
        },
    ),
    "glm4_lite-moe": ("Glm4MoeLite", {**LATENT, "q_lora_rank": 24, "v_head_dim": 24}),
    # Queries that grow with their position.
    "mistral4-moe": (
        "Mistral4",
        {
            **LATENT,
            "q_lora_rank": 24,
            # Published files have an mscale and an mscale_all_dim of 1 instead of the factor, by
            # which transformers 5.23 sharpens scores.
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 20,
                "attention_factor": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    # A gate of each head, more heads in layers with a window, and two rotary embeddings.
    "laguna-moe": ("Laguna", LAGUNA),
    "gpt-oss-moe": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "granite4-h": ("GraniteMoeHybrid", {**GRANITE4, "num_local_experts": 0, "mamba_n_groups": 1}),
    "granite4-h-moe": ("GraniteMoeHybrid", {**GRANITE4, "num_local_experts": 6}),
    "nemotron_h-moe": ("NemotronH", NEMOTRON),
    "qwen4_exp-moe": ("Qwen4Exp", QWEN4),
    "nemotron_h-latent-moe": (
        "NemotronH",
        NEMOTRON | {"moe_latent_size": 48, "moe_intermediate_size": 96},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 6,
            "num_dense_layers": 1,
            **MOE,
        },
    ),
    # Convolutions, windows and attention with a gate of each head, and two rotary embeddings.
    "lfm3": ("Lfm3", LFM3),
    "lfm2-bias": ("Lfm2", {"layer_types": ["full_attention", "conv", "conv"], "conv_bias": True}),
}
# Families whose tokens choose the keys that they attend to: nothing is retrieved for drafts.
CHOOSE_KEYS = ("qwen4_exp-moe",)
WITH_EXPERTS = [name for name in FAMILIES if "moe" in name or name == "mixtral"]
