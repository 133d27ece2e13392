"""Shapes of well-known models, from their config.json files. No tensors are created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from triforce_core.model.config import ModelConfig
from triforce_core.model.found.hub import cached
from triforce_core.model.found.names import local, without_site
from triforce_core.model.known.hub_ids import (
    gguf_id_of,
    like_known,
    of_ollamas,
    shape_of,
    unsupported_family,
)
from triforce_core.model.known.mixes import OF_SAFETENSORS, is_mix, pieces_of
from triforce_core.model.known.recent import MISTRAL_SMALL, RECENT
from triforce_core.model.known.shape_of_files import Shape, of_config, of_path
from triforce_core.model.layers import LayerSpec
from triforce_core.model.parts.recurrent import DeltaNet
from triforce_offload.errors import UnsupportedModelError, UsageError
from triforce_offload.machine.profiles import nearest

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_LLAMA3_2_ROPE = _LLAMA3_ROPE | {"factor": 32.0}

_LLAMA2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "float16",
}
# Yarn-Llama-2, as NousResearch published it.
_128K = {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
}

_QWEN2_5 = {
    "model_type": "qwen2",
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}
# With the rope scaling that its authors publish for 128K tokens.
_QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}

# Fields of config.json. mistral-7b is v0.3, mistral-small is 2501.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama2-7b": _LLAMA2_7B,
    "llama2-7b-128k": _LLAMA2_7B | _128K,
    "llama2-13b-128k": _LLAMA2_7B
    | _128K
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "llama3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "llama3.1-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    },
    "qwen2.5-14b": _QWEN2_5
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
    },
    "qwen2.5-32b": _QWEN2_5
    | {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
    },
    "qwen2.5-72b": _QWEN2_5
    | {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-14b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "qwen3-32b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "llama3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_2_ROPE,
        "tie_word_embeddings": True,
    },
    "llama3.2-3b": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_2_ROPE,
        "tie_word_embeddings": True,
    },
    "mistral-small": MISTRAL_SMALL,
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "sliding_window": None,
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
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "smollm2-1.7b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 1.3e5,
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
    **RECENT,
}


# Positions of published files, by how the names of their shapes begin.
_PUBLISHED = {"qwen2.5-": 32768, **dict.fromkeys(("qwen3-4b", "qwen3-8b"), 40960)}
_PUBLISHED |= dict.fromkeys(("qwen3-14b", "qwen3-32b"), 40960)


def read_shape(name: str) -> ModelConfig:
    """Return the config of a model, see `read_model`. Raises UsageError or CheckpointError."""
    return read_model(name).config


def read_model(name: str) -> Shape:
    """Return the shape of a model.

    name: a name of SHAPES or the hub id of such a model, either with a quantisation mix as in
        `qwen3-32b:Q4_K_M`, or its name as Ollama has it, as in `qwen3:32b`; a hub id that says that
        the model is in FP8 or integers of 4 bits; the path of a config.json, of its directory, or
        of a .gguf file; or a model on this machine by its hub id or Ollama's name

    Raises UsageError, which suggests the nearest names, UnsupportedModelError, which names the
    family, or CheckpointError.
    """
    if not local(name):
        name = without_site(name)
    known, _, mix = (name if local(name) else of_ollamas(name)).partition(":")
    if not Path(name).expanduser().exists():
        known = shape_of(known) or known
        if known not in SHAPES and cached(name) is None:
            like, of_id = like_known(known)
            known, mix = like or known, mix or of_id
    if known in SHAPES and (not mix or is_mix(mix)):
        return _known(known, mix)
    path = local(name) or cached(gguf_id_of(name) or name) or Path(name)
    if path.exists():
        return of_path(path)
    if known in SHAPES:
        # It refuses the quantisation, and names those that it knows.
        return _known(known, mix)
    if (family := unsupported_family(name)) is not None:
        raise UnsupportedModelError(
            f"{name} is of a family that is not supported: {family}; docs/models.md lists those "
            "that are"
        )
    raise UsageError(
        f"{name!r} is no file, no directory and none of the known models; "
        f"{nearest(known, SHAPES)} (`triforce plan --help` names all)"
    )


def _known(name: str, mix: str) -> Shape:
    """Return a shape of SHAPES, quantised unless `mix` is empty. Raises UsageError."""
    shape = replace(of_config(SHAPES[name]), published=_published(name))
    if not mix:
        return shape
    config, has_head = shape.config, True
    if mix.upper() not in OF_SAFETENSORS:
        # llama.cpp's converter leaves out a head of residual streams.
        config, has_head = _in_gguf(config), config.streams is None
    pieces = pieces_of(config, mix)
    return replace(shape, config=config, pieces=pieces, dtype=None, has_head=has_head)


def _published(name: str) -> int | None:
    found = (count for begin, count in _PUBLISHED.items() if name.startswith(begin))
    return next(found, None)


def _in_gguf(config: ModelConfig) -> ModelConfig:
    """Return a model as its GGUF files have it, with the heads of recurrent layers in another
    order, except those of Qwen3-Next.
    """
    if config.family == "qwen3_next":
        return config

    def stored(spec: LayerSpec) -> LayerSpec:
        if not isinstance(spec.mixer, DeltaNet):
            return spec
        return replace(spec, mixer=replace(spec.mixer, tiled_output=True))

    return replace(config, layers=tuple(map(stored, config.layers)))


def for_timing(config: ModelConfig) -> ModelConfig:
    """Return the shape with room for any context. For timing with random weights only."""
    return replace(config, trained_positions=max(config.trained_positions, _ANY_POSITIONS))


_ANY_POSITIONS = 1 << 18
