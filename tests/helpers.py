"""Tiny random models of every family, their tokenizer, and placements."""

from __future__ import annotations

from pathlib import Path

import torch

from triforce_offload.plan.placement import Placement

VOCAB = 97
BLOCK = 16
LAYERS = 3

_SIZES = {
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
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SLIDING = ("sliding_attention",) * (LAYERS - 1)

_GEMMA4 = {
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
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3}),
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
    "yarn-rope": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_bias": True}),
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
    "phi3-longrope": (
        "Phi3",
        {
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
        },
    ),
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
    "gemma4": ("Gemma4", {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "gemma4-unified": ("Gemma4Unified", _GEMMA4),
    # Recurrent layers before and after attention: the gated delta rule, and convolutions alone.
    "qwen3_5": (
        "Qwen3_5",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-bias": ("Lfm2", {"layer_types": ["full_attention", "conv", "conv"], "conv_bias": True}),
}

# Every mix of resident and streamed; more resident blocks than there are means all.
PLACEMENTS = {
    "resident": Placement((), True, 10**6, 0, 0, 0),
    "kv": Placement((), True, 0, 0, 3, 2),
    "kv-one-slot": Placement((), True, 0, 0, 1, 1),
    "kv-in-part": Placement((), True, 7, 0, 2, 1),
    "kv-lent": Placement((), True, 2, 0, 2, 1, 7),
    "weights": Placement((0, 1, 2), True, 10**6, 2, 0, 0),
    "weights-one-slot": Placement((0, 2), False, 10**6, 1, 0, 0),
    "both": Placement((0, 1, 2), False, 0, 2, 3, 2),
    "both-one-slot": Placement((1, 2), False, 4, 1, 1, 1),
    "int4": Placement((0, 1, 2), False, 0, 2, 3, 2, int4_layers=(0, 1, 2)),
    "int4-in-part": Placement((1,), True, 4, 1, 2, 1, 7, int4_layers=(0, 1)),
}


def placed(placement: str, options: dict[str, object]) -> dict[str, object]:
    """Options of an engine with a placement. Where weights stream and nothing stands in for them
    no budget may be asked for.
    """
    where = PLACEMENTS[placement]
    drafts = where.can_draft and options.get("weights") != "stored"
    dropped = ("budget",) if where.streamed_layers and not drafts else ()
    return {k: v for k, v in options.items() if k not in dropped} | {"placement": where}


def make_model(family: str, directory: Path, **overrides: object) -> torch.nn.Module:
    """A tiny random model of a family, float32, saved to `directory` and returned."""
    import transformers

    kind, options = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    made = getattr(transformers, f"{kind}ForCausalLM")
    model = made(made.config_class(**{**_SIZES, **options, **overrides})).eval()
    for name, parameter in model.named_parameters():
        # Their norms multiply by 1 + the weights, except those of recurrent layers.
        from_zero = kind in ("Gemma3", "Qwen3_5") and "linear_attn" not in name
        if "norm" in name or name.endswith("bias"):
            mean = float("norm" in name and not from_zero)
            torch.nn.init.normal_(parameter, mean, 0.2)
        if name.endswith("A_log"):
            # States that remember a hundred tokens.
            torch.nn.init.normal_(parameter, -4.0, 1.0)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, 1.0, 0.2)
    model.save_pretrained(directory)
    return model


def add_head(directory: Path, model: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Add a random MTP head to a model's files, as Qwen names it. Return its tensors."""
    from safetensors.torch import load_file, save_file

    held, generator = (
        load_file(directory / "model.safetensors"),
        torch.Generator().manual_seed(seed),
    )
    layer = model.config.layer_types.index("full_attention")
    width, whole = model.config.hidden_size, f"model.layers.{layer}."
    shapes = {
        name.replace(whole, "mtp.layers.0."): tensor.shape
        for name, tensor in held.items()
        if name.startswith(whole)
    }
    shapes |= {"mtp.fc.weight": torch.Size((width, 2 * width))}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes |= {f"mtp.{name}.weight": torch.Size((width,)) for name in norms}
    head = {n: torch.randn(shape, generator=generator) * 0.2 for n, shape in shapes.items()}
    save_file(held | head, directory / "model.safetensors", metadata={"format": "pt"})
    return head


def full_layers(config: object) -> object:
    """What a config of transformers says of layers without a window. Layers of Gemma 4 differ."""
    if not config.model_type.startswith("gemma4"):
        return config
    return config.per_layer_config["full_attention"]


def random_ids(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<a>' if m['role'] == 'assistant' else '<u>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def add_tokenizer(directory: Path, *, chat: bool = True) -> None:
    """A tokenizer of VOCAB tokens beside a tiny model: printable ASCII, and two of a chat."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(32 + i): i for i in range(VOCAB - 3)}
    vocab |= {"<u>": VOCAB - 3, "<a>": VOCAB - 2, "<unk>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<[ua]>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE if chat else None
    fast.save_pretrained(directory)


def write_tokens_of_bytes(directory: Path) -> None:
    """A tiny model whose tokens are bytes, and one that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(directory)
    make_model("llama", directory, vocab_size=len(fast), eos_token_id=fast.eos_token_id)
