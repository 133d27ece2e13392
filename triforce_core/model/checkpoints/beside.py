"""What the files of a model hold beside the model itself."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from triforce_core.model.checkpoints.naming.families import HF_PREFIXES
from triforce_core.model.checkpoints.naming.names import blocks
from triforce_core.model.checkpoints.tables import COMPUTED
from triforce_core.model.config import ModelConfig
from triforce_offload.checkpoint.safetensors import SCALE_SUFFIX

# Names of tensors of layers begin so; names of tensors that read images contain one of these.
LAYER_PREFIXES = tuple(f"{prefix}layers." for prefix, _ in HF_PREFIXES)
OF_LAYERS = ("blk.", *LAYER_PREFIXES)
_OF_IMAGES = ("vision", "visual", "multi_modal")
# No model has more layers that only draft.
_MOST_DRAFTING = 16
# Scales of KV in 8 bits, in which it is not kept here.
_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".output_scale")
# Old checkpoints contain buffers that are computed here; scales are read with the tensor they
# belong to.
UNUSED = ("rotary_emb.inv_freq", SCALE_SUFFIX, *_KV_SCALES, *COMPUTED)


def of_drafts(config: ModelConfig, further: object, prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return with what the names of tensors begin in layers that only draft, behind the others.

    further: number of such layers, as a header gives it
    """
    first = blocks(config.family, config.layers)[-1]
    count = further if isinstance(further, int) else 0
    layers = range(first, first + min(max(count, 0), _MOST_DRAFTING))
    return tuple(f"{prefix}{layer}." for prefix in prefixes for layer in layers)


def of_reused_kv(config: ModelConfig) -> tuple[str, ...]:
    """Return with what the names of keys and values begin in layers that use those of others. Some
    files hold them.
    """
    names = [f"{prefix}{{}}.self_attn.{part}" for prefix in LAYER_PREFIXES for part in ("k_", "v_")]
    names += ["blk.{}.attn_k", "blk.{}.attn_v"]
    return tuple(name.format(layer) for layer in config.kv_reusing_layers for name in names)


def text_alone(path: Path, config: ModelConfig, held: Collection[str]) -> ModelConfig:
    """Return the config of the language model in the files of a model that also reads images, and
    warn that the rest is not loaded.

    Whether the embedding is the output matrix is read from the files: configs of such models
    contradict themselves.
    """
    others = sum(any(part in name for part in _OF_IMAGES) for name in held)
    warnings.warn(
        f"{path}: the part that reads images ({others} tensors) is not loaded",
        RuntimeWarning,
        stacklevel=3,
    )
    return replace(config, tied=not any(name.endswith("lm_head.weight") for name in held))
