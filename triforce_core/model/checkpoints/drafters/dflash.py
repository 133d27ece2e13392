"""Configs of DFlash drafters, as their authors publish them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from triforce_core.model.checkpoints.naming.names import blocks
from triforce_core.model.config import ModelConfig, RopeConfig
from triforce_core.model.families.hf import SOURCE, from_hf
from triforce_core.model.families.reading.fields import Fields, layer_count
from triforce_core.model.families.reading.windows import FULL, SLIDING
from triforce_core.model.feed_forward import DenseMLP
from triforce_core.model.heads.joins import Convolutions, DFlash, Selector
from triforce_core.model.layers import Attention, LayerSpec
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# Number of tokens that a drafter without windows attends to: longer contexts take memory, and lower
# acceptance (z-lab/dflash, issue 66).
_CONTEXT = 2048
# Fields of a layer of Qwen3, as which all layers are computed.
_OF_LAYERS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "hidden_act", "attention_bias", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
OF_QWEN3 = {"model_type": "qwen3", "architectures": None}
# By how many tokens vocabularies differ that models pad to different sizes.
PADDING = 512
# Of a typical drafter, that of DFlash 2 for Qwen3.8-27B: its layers, its heads, and the rows of a
# block.
_TYPICAL_LAYERS, _TYPICAL_ROWS = 5, 8
_TYPICAL_HEADS = Attention(heads=32, kv_heads=8, head_dim=128, qk_norm=True)


def is_dflash(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a DFlash drafter."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return (isinstance(first, str) and "dflash" in first.lower()) or "dflash_config" in raw


def dflash_config(raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """Return the config of a drafter from a parsed config.json.

    target: config of the model that it drafts for

    Raises UnsupportedModelError or CheckpointError.
    """
    fields = _fields(raw)
    _refuse_unknown(fields, target)
    layers = layer_count(fields, "num_hidden_layers")
    taps = _tapped(fields, layers, target)
    kept = {name: raw[name] for name in _OF_LAYERS if raw.get(name) is not None}
    of_model = {"vocab_size": target.vocab, "tie_word_embeddings": False}
    config = from_hf({**kept, **OF_QWEN3, **of_model, "num_hidden_layers": layers}, {})
    _check_target(fields, config, target)
    kinds = fields.of_layers("layer_types", layers, [None] * layers)
    if other := sorted({str(each) for each in kinds} - {SLIDING, FULL, "None"}):
        raise UnsupportedModelError(f"{SOURCE}: layer_types {other[0]!r} is not supported")
    join = DFlash(
        taps,
        target.hidden,
        fields.whole("block_size", least=2),
        _mask(fields, target),
        _context(fields, kinds),
        tuple(_causal(fields, kind) for kind in kinds),
        _convolutions(fields, config.hidden),
        _selector(fields, target),
    )
    cap = fields.get("final_logit_softcapping")
    return replace(
        config,
        layers=tuple(replace(spec, joins=join) for spec in config.layers),
        embedding_scale=_embedding_scale(fields, join, target),
        logit_scale=fields.real("output_multiplier", fields.real("logit_scale", 1.0)),
        logit_cap=fields.real("final_logit_softcapping") if cap else None,
    )


def _check_target(fields: Fields, config: ModelConfig, target: ModelConfig) -> None:
    """Raise CheckpointError if the drafter is for another model."""
    if config.hidden != target.hidden:
        raise CheckpointError(
            f"{SOURCE}: the drafter is {config.hidden} wide, and the model {target.hidden}"
        )
    said = {
        "target_hidden_size": target.hidden,
        "num_target_layers": len(target.layers),
    }
    for name, ours in said.items():
        # Some files have 0 or null where they say nothing.
        if fields.get(name) and (theirs := fields.whole(name)) != ours:
            raise CheckpointError(
                f"{SOURCE}: {name} is {theirs}, and {ours} for the model: the drafter was made for "
                "another one"
            )
    tokens = fields.whole("vocab_size", target.vocab)
    if abs(tokens - target.vocab) > PADDING:
        raise CheckpointError(
            f"{SOURCE}: the drafter knows {tokens} tokens, and the model {target.vocab}"
        )


def typical_dflash(target: ModelConfig) -> ModelConfig:
    """Return the config of a DFlash 2 drafter of the published shape: five layers with an MLP as
    wide as a dense model's own, or 3 times as wide as its states, and drafts of 7 tokens.

    Raises UnsupportedModelError for a model for which there can be none.
    """
    _refuse_unknown(Fields({}, SOURCE), target)
    mlps = [spec.mlp for spec in target.layers]
    width = 3 * target.hidden if any(mlp.active for mlp in mlps) else mlps[0].width
    join = DFlash(
        tuple(each + 1 for each in _usual_taps(len(target.layers), _TYPICAL_LAYERS)),
        target.hidden,
        _TYPICAL_ROWS,
        0,
        _CONTEXT,
        (False,) * _TYPICAL_LAYERS,
        Convolutions(2, 16),
        Selector(16, 256),
    )
    layer = LayerSpec(_TYPICAL_HEADS, DenseMLP(width), joins=join)
    shape = (layer,) * _TYPICAL_LAYERS, target.hidden, target.vocab
    return ModelConfig("qwen3", *shape, 1e-6, target.positions, RopeConfig())


def _fields(raw: Mapping[str, Any]) -> Fields:
    """Return the fields of a config, those of its `dflash_config` among them."""
    inner = raw.get("dflash_config")
    return Fields({**raw, **(inner if isinstance(inner, Mapping) else {})}, SOURCE)


def _refuse_unknown(fields: Fields, target: ModelConfig) -> None:
    """Raise UnsupportedModelError for what changes the computation and is not known here."""
    if blocks(target.family, target.layers)[-1] > len(target.layers) or target.streams:
        raise UnsupportedModelError(f"DFlash drafters do not draft for {target.family} models")
    if fields.get("speculators_model_type") is not None:
        raise UnsupportedModelError("DFlash drafters that speculators wrote are not supported")
    fields.only("model_type", "qwen3", "dflash")
    fields.only("sample_from_anchor", False)
    fields.only("use_aux_hidden_state", True)
    fields.only("attention_sink_bias", False)
    fields.only("add_swa_attention_sink_bias", False)
    fields.only("attention_value_scale", 1, 1.0)
    fields.only("is_neox_style", True)
    vocab = fields.get("draft_vocab_size")
    if vocab not in (None, fields.get("vocab_size")):
        raise UnsupportedModelError(
            f"{SOURCE}: a DFlash drafter with a vocabulary of its own ({vocab} tokens) is not "
            "supported"
        )


def _tapped(fields: Fields, layers: int, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose input the drafter takes. Its files name those whose output it is."""
    found, count = fields.get("target_layer_ids"), len(target.layers)
    if found is None:
        found = _usual_taps(count, layers)
    known = isinstance(found, list) and found
    if not known or not all(type(each) is int and 0 <= each < count for each in found):
        raise CheckpointError(
            f"{SOURCE}: a drafter takes the output of layers {found} of a model with {count} layers"
        )
    return tuple(each + 1 for each in found)


def _usual_taps(count: int, drafting: int) -> list[int]:
    """Return the layers whose output a drafter takes that does not name them, as its authors'
    `build_target_layer_ids` does.
    """
    if drafting == 1:
        return [count // 2]
    span = count - 4
    return [round(1 + i * span / (drafting - 1)) for i in range(drafting)]


def _mask(fields: Fields, target: ModelConfig) -> int:
    mask = fields.whole("mask_token_id", least=0)
    if mask >= target.vocab:
        raise CheckpointError(
            f"{SOURCE}: mask_token_id {mask} is none of the model's {target.vocab} tokens"
        )
    return mask


def _causal(fields: Fields, kind: str | None) -> bool:
    """Return whether a row of a layer sees only the rows before it. The config decides; without a
    field, layers with a window are causal (vLLM's `qwen3_dflash`).
    """
    for name in ("is_causal", "causal"):
        if fields.get(name) is not None:
            return fields.flag(name, False)
    return kind == SLIDING


def _context(fields: Fields, kinds: list[str | None]) -> int:
    """Return the number of tokens that all layers attend to."""
    slides = SLIDING in kinds or fields.flag("use_swa", False)
    window = fields.get("swa_window_size") or fields.get("sliding_window")
    if not slides:
        return _CONTEXT
    return min(_CONTEXT, Fields({"sliding_window": window}, SOURCE).whole("sliding_window"))


def _embedding_scale(fields: Fields, join: DFlash, target: ModelConfig) -> float:
    """Return the factor of embeddings: what the config says, else that of the model, as the
    authors' code embeds tokens. DFlash 2 takes the numbers of the embedding as they are.
    """
    usual = 1.0 if join.selector else target.embedding_scale
    return fields.real("input_embedding_scale", usual)


def _convolutions(fields: Fields, hidden: int) -> Convolutions | None:
    if not fields.get("conv_kernel_size"):
        return None
    found = Convolutions(fields.whole("conv_kernel_size"), fields.whole("conv_group_size"))
    if hidden % found.group:
        raise CheckpointError(
            f"{SOURCE}: conv_group_size {found.group} does not divide {hidden} channels"
        )
    return found


def _selector(fields: Fields, target: ModelConfig) -> Selector | None:
    if not fields.get("selector_rank"):
        return None
    found = Selector(fields.whole("selector_top_k"), fields.whole("selector_rank"))
    if found.candidates > target.vocab:
        raise CheckpointError(
            f"{SOURCE}: selector_top_k {found.candidates} is more than the model's {target.vocab} "
            "tokens"
        )
    return found
