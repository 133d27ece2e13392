"""Shapes of well-known models, as their config.json says them; no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.errors import UsageError

from .config import ModelConfig, from_hf

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama2-7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 262144,
    },
    "llama3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 262144,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 262144,
        "rope_theta": 1e6,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 262144,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "llama-68m": {
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
}
"""As config.json says it. Positions are raised to 256K: weights are random, only time counts."""


def read_shape(name: str) -> ModelConfig:
    """A shape by its name, or that of a config.json or of the folder it lies in.

    Raises UsageError or CheckpointError.
    """
    if name in SHAPES:
        return from_hf(SHAPES[name], {})
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"shape {name!r} is none of {', '.join(SHAPES)} and no config.json: {error}"
        ) from error
    if not isinstance(raw, dict):
        raise UsageError(f"{file} holds no object")
    return from_hf(raw, {})
