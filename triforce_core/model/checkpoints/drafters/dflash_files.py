"""Files of DFlash drafters: safetensors, and GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_core.model.checkpoints.drafters.dflash import OF_QWEN3, dflash_config
from triforce_core.model.checkpoints.drafters.files import LEARNED, DrafterCheckpoint
from triforce_core.model.checkpoints.naming.names import gguf_names, hf_names
from triforce_core.model.checkpoints.naming.pieces import Piece
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.hf import SOURCE, quantised
from triforce_core.model.families.reading.windows import FULL, SLIDING
from triforce_offload.checkpoint.safetensors import SafetensorsSource
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from triforce_kernels.weights.block_types import BlockType

ARCHITECTURE = "dflash"
# Names outside the layers, in safetensors and in GGUF.
_ENDS = {
    "norm": ("norm.weight", "output_norm.weight"),
    "state_norm": ("hidden_norm.weight", "enc.output_norm.weight"),
    "fc": ("fc.weight", "fc.weight"),
    "before": ("candidate_selector.predecessor_codebook", "selector_predecessor.weight"),
    "after": ("candidate_selector.successor_codebook", "selector_successor.weight"),
    "gate": ("candidate_selector.hidden_projection.weight", "selector_hidden.weight"),
}
_CONVOLUTIONS = {
    "mixer_conv": ("attention_conv.base_kernel", "attn_conv_base"),
    "mixer_conv_from": ("attention_conv.kernel_projection.weight", "attn_conv_proj.weight"),
    "mlp_conv": ("mlp_conv.base_kernel", "ffn_conv_base"),
    "mlp_conv_from": ("mlp_conv.kernel_projection.weight", "ffn_conv_proj.weight"),
}
# Fields of a config.json, and what GGUF calls them.
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "output_multiplier": "logit_scale",
    "input_embedding_scale": "embedding_scale",
    "hidden_act": "hidden_activation",
    **{
        name: name
        for name in (
            *("block_size", "conv_kernel_size", "conv_group_size", "sample_from_anchor"),
            *("selector_rank", "selector_top_k", "final_logit_softcapping"),
        )
    },
}
# Without these there is no drafter; others have defaults.
_NEEDED = (
    *("embedding_length", "feed_forward_length", "block_count", "attention.head_count"),
    *("attention.head_count_kv", "block_size", "target_layers"),
)
# Fields that no drafter is known to have, and that would change what it computes.
_UNKNOWN = ("rope.scaling.type", "attention.scale", "attention.value_scale")


def fields_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that a GGUF file's metadata have.

    Raises CheckpointError or UnsupportedModelError, which name the field as the file does.
    """
    own = {
        name.removeprefix(f"{ARCHITECTURE}."): value
        for name, value in metadata.items()
        if name.startswith(f"{ARCHITECTURE}.")
    }
    for name in _NEEDED:
        if name not in own:
            raise CheckpointError(f"{ARCHITECTURE}.{name} is missing")
    for name in _UNKNOWN:
        if own.get(name) not in (None, "none", 1.0):
            raise UnsupportedModelError(
                f"{ARCHITECTURE}.{name} {own[name]!r} is not supported for a DFlash drafter"
            )
    slides = _whole_numbers(own, "attention.sliding_window_pattern")
    taps = _whole_numbers(own, "target_layers")
    for name in _FIELDS.values():
        if hasattr(own.get(name), "values"):
            raise CheckpointError(f"{ARCHITECTURE}.{name} must be one number, got a list")
    fields = {
        "architectures": ["DFlashDraftModel"],
        **{name: own.get(theirs) for name, theirs in _FIELDS.items()},
        "mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
        # GGUF files name the layers whose input it is.
        "target_layer_ids": [each - 1 for each in taps],
        "is_causal": own.get("attention.causal", False),
        "layer_types": [SLIDING if each else FULL for each in slides] or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _whole_numbers(own: Mapping[str, Any], name: str) -> list[int]:
    """Return a list of whole numbers or of truth values, empty without the field.

    Raises CheckpointError.
    """
    if name not in own:
        return []
    # None if it is no list, or a list of lists.
    values = getattr(own[name], "values", None)
    numbers = [None] if values is None else getattr(values, "tolist", lambda: list(values))()
    if not all(isinstance(each, int) for each in numbers):
        raise CheckpointError(f"{ARCHITECTURE}.{name} must be a list of whole numbers")
    return numbers


class DFlashCheckpoint(DrafterCheckpoint):
    """The files of a DFlash drafter."""

    def pieces(self, name: str) -> list[tuple[int, BlockType | None]]:
        """Checkpoint.pieces."""
        found = super().pieces(name)
        return [(rows, None) for rows, _ in found] if name.endswith(LEARNED) else found


def open_dflash(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> DFlashCheckpoint:
    """Open the directory or the GGUF file of a drafter.

    raw: its config.json, or what `fields_of_gguf` returned
    target: config of the model that it drafts for

    Raises CheckpointError or UnsupportedModelError.
    """
    try:
        config = dflash_config(raw, target)
    except CheckpointError as error:
        raise type(error)(f"{path}: {str(error).removeprefix(f'{SOURCE}: ')}") from error
    if path.is_dir():
        source = SafetensorsSource(path, quantised({**raw, **OF_QWEN3}))
        return DFlashCheckpoint(path, config, source, _names(config, in_gguf=False))
    from triforce_offload.checkpoint.gguf import GGUFSource

    return DFlashCheckpoint(path, config, GGUFSource(path), _names(config, in_gguf=True))


def _names(config: ModelConfig, *, in_gguf: bool) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor of the drafter."""
    of_model = (gguf_names if in_gguf else hf_names)(config)

    def pieces(name: str) -> list[Piece]:
        if name in _ENDS:
            rows = config.own_ends[name][0]
            return [Piece(_ENDS[name][in_gguf], rows)]
        layer, _, part = name.rpartition(".")
        if part in _CONVOLUTIONS:
            rows = config.layers[0].shapes(config.hidden)[part][0]
            prefix = layer.replace("layers.", "blk.") if in_gguf else layer
            return [Piece(f"{prefix}.{_CONVOLUTIONS[part][in_gguf]}", rows)]
        found = of_model(name)
        return [replace(piece, name=piece.name.removeprefix("model.")) for piece in found]

    return pieces
