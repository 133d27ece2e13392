"""Model configs from GGUF headers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from triforce_core.model.config import ModelConfig, RopeConfig
from triforce_core.model.families.fields import Fields, layer_count, token_ids
from triforce_core.model.families.ropes import check_rope
from triforce_core.model.layers import Attention, DenseMLP, LayerSpec
from triforce_offload.errors import UnsupportedModelError

if TYPE_CHECKING:
    from triforce_offload.checkpoint.gguf import GGUFSource

_GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def gguf_config(source: GGUFSource) -> ModelConfig:
    """Return the config of a GGUF file.

    Raises UnsupportedModelError or CheckpointError, which names the field.
    """
    where = str(source.path)
    architecture = source.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _GGUF_FAMILIES:
        raise UnsupportedModelError(
            f"{where}: architecture {architecture!r} is not supported "
            f"(only {', '.join(_GGUF_FAMILIES)})"
        )
    prefix = architecture + "."
    own = {k.removeprefix(prefix): v for k, v in source.metadata.items() if k.startswith(prefix)}
    if own.get("expert_count"):
        raise UnsupportedModelError(f"{where}: mixture of experts (expert_count) is not supported")
    fields = Fields(own, where)
    hidden = fields.whole("embedding_length")
    heads = fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", hidden // heads or 1)
    positions = fields.whole("context_length")
    window = own.get("attention.sliding_window")
    if window and not (isinstance(window, int) and window >= positions):
        raise UnsupportedModelError(f"{where}: an active sliding_window is not supported")
    if fields.whole("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{where}: rotating a part of each head is not supported")
    if fields.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{where}: values of another size than keys are not supported")
    family = _GGUF_FAMILIES[architecture]
    names = source.names()
    vocab = source.metadata.get("tokenizer.ggml.tokens")
    attention = Attention(
        heads=heads,
        kv_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
    )
    layer = LayerSpec(attention, DenseMLP(fields.whole("feed_forward_length")))
    return ModelConfig(
        family=family,
        layers=(layer,) * layer_count(fields, "block_count"),
        hidden=hidden,
        vocab=fields.whole("vocab_size", getattr(vocab, "length", None)),
        norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        trained_positions=positions,
        rope=_gguf_rope(own, fields, positions, head_dim, where),
        tied="output.weight" not in names,
        eos_token_ids=_gguf_eos(source.metadata),
    )


def _gguf_rope(
    own: Mapping[str, Any], fields: Fields, positions: int, head_dim: int, where: str
) -> RopeConfig:
    kind = own.get("rope.scaling.type", "none")
    parameters: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        parameters["factor"] = fields.real("rope.scaling.factor")
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = fields.whole(
            "rope.scaling.original_context_length", positions
        )
    rope = RopeConfig(
        "default" if kind == "none" else str(kind),
        fields.real("rope.freq_base", 10000.0),
        MappingProxyType(parameters),
    )
    return check_rope(rope, where, head_dim)


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ids += token_ids(metadata.get(f"tokenizer.ggml.{name}"), name)
    return tuple(dict.fromkeys(ids))
