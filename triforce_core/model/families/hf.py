"""Model configs from config.json files, as Hugging Face's transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triforce_core.model.config import ModelConfig
from triforce_core.model.families.dense import FAMILIES
from triforce_core.model.families.family import EXPERT_COUNTS, Family
from triforce_core.model.families.latent import latent_rope, of_rope
from triforce_core.model.families.reading.fields import Fields, layer_count, token_ids
from triforce_core.model.families.reading.ropes import hf_ropes
from triforce_core.model.families.reading.windows import FULL, with_own_rope
from triforce_core.model.layers import Attention, LayerSpec
from triforce_offload.checkpoint.quantised.methods import Method, Quantisation, quantisation
from triforce_offload.errors import CheckpointError, UnsupportedModelError

SOURCE = "config.json"
ARCHITECTURES = {f"{family.hf_class}ForCausalLM": family for family in FAMILIES.values()}
# As its first configs were written.
ARCHITECTURES["Ernie4_5_ForCausalLM"] = FAMILIES["ernie4_5"]
# A Llama under another name.
ARCHITECTURES["IQuestCoderForCausalLM"] = FAMILIES["llama"]
# Models that also read images, and the family of their language model, which `text_config`
# describes; None if it names its family itself. Text alone has the same position in each of the
# dimensions in which Qwen's models rotate, and is rotated as in Qwen2 and Qwen3.
_AROUND_TEXT = {
    "Mistral3ForConditionalGeneration": None,
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp_text",
}
# Fields that `text_config` may leave to the config around it.
_OUTER = ("quantization_config", "compression_config", "tie_word_embeddings", "eos_token_id")
# Fields of what is not computed here, if they are set.
_UNSUPPORTED = ("mlp_bias", "use_bias", "clip_qkv")


def from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the config from a parsed config.json and generation_config.json (may be empty).

    Raises UnsupportedModelError, which names the unsupported feature, or CheckpointError, which
    names the field.
    """
    raw, family = _text_of(raw)
    raw = family.completed(raw)
    _refuse_unsupported(raw, family)
    fields = Fields(raw, SOURCE)
    hidden = fields.whole("hidden_size")
    positions = fields.whole("max_position_embeddings")
    count = layer_count(fields, "num_hidden_layers")
    layers = family.layers(fields, count)
    scales = family.scales(fields)
    _refuse_unread(fields, family, positions, count)
    rope, window_rope = hf_ropes(
        *(of_rope(raw, layers), positions, _head_dims(layers)),
        unscaled_windows=family.unscaled_windows,
    )
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    return ModelConfig(
        family=family.name,
        layers=layers if window_rope is None else with_own_rope(layers),
        hidden=hidden,
        vocab=fields.whole("vocab_size"),
        norm_eps=fields.real(family.norm_eps, 1e-6),
        trained_positions=positions,
        rope=latent_rope(rope, layers),
        window_rope=window_rope,
        norm_kind=family.norm_kind,
        tied=fields.flag("tie_word_embeddings", False),
        eos_token_ids=token_ids(eos, "eos_token_id"),
        **scales,
    )


def _head_dims(layers: Sequence[LayerSpec]) -> tuple[int, int]:
    """Return the size of the heads of layers without a window and with one; the other's if there
    are none.
    """
    mixers = [each.mixer for each in layers if isinstance(each.mixer, Attention)]
    kinds = {each.window is None: each.head_dim for each in mixers}
    first = next(iter(kinds.values()), 2)
    return kinds.get(True, first), kinds.get(False, first)


def quantised(raw: Mapping[str, Any]) -> Quantisation | None:
    """Return how a config.json says that weights are quantised. Raises UnsupportedModelError."""
    return quantisation(_quantised(_text_of(raw)[0]))


def _quantised(raw: Mapping[str, Any]) -> Any:
    """The second name is that of early files of compressed-tensors."""
    return raw.get("quantization_config") or raw.get("compression_config")


def reads_images(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model around a language model."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return isinstance(first, str) and first in _AROUND_TEXT


def from_file(path: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return `from_hf` of what a config.json holds. Its errors name the file.

    path: the config.json
    """
    try:
        return from_hf(raw, generation)
    except CheckpointError as error:
        said = str(error).removeprefix(f"{SOURCE}: ")
        raise type(error)(f"{path}: {said}") from error


def _text_of(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Family]:
    """Return the config of the language model, and its family."""
    if reads_images(raw):
        # The first configs of Qwen2.5-VL have the fields of the language model beside the others.
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise CheckpointError(f"{SOURCE}: text_config must be an object, got {text!r}")
        outer = {name: raw.get(name) for name in _OUTER if text.get(name) is None}
        inner = {"architectures": None, "text_config": None}
        inner["model_type"] = _AROUND_TEXT[raw["architectures"][0]] or text.get("model_type")
        return _text_of({**text, **outer, **inner})
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) and architectures else [None]
    name, kind = names[0], raw.get("model_type")
    if isinstance(name, str) and name in ARCHITECTURES:
        return raw, ARCHITECTURES[name]
    if not isinstance(name, str) and isinstance(kind, str) and kind in FAMILIES:
        return raw, FAMILIES[kind]
    named = name or kind
    refuse_drafters(named)
    what = f"architecture {named!r} is" if named else "a config that names no architecture is"
    raise UnsupportedModelError(f"{what} not supported; docs/models.md lists those that are")


def refuse_drafters(architecture: object, where: str = "") -> None:
    """Raise UnsupportedModelError for the architecture of a head or a drafter.

    where: with what the message begins
    """
    kinds = {
        "eagle3": "an EAGLE-3 head",
        "dflash": "a DFlash drafter",
        "assistant": "an assistant of Gemma 4",
    }
    for drafts, what in kinds.items():
        if drafts in str(architecture).lower():
            raise UnsupportedModelError(
                f"{where}{what} is no model of its own: it drafts for one (--draft)"
            )


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise UnsupportedModelError(f"{name} is not supported")
    found = quantisation(_quantised(raw))
    if found and found.method is Method.MXFP4 and family.name != "gpt_oss":
        raise UnsupportedModelError(f"MXFP4 is not supported for a {family.name} model")


def _refuse_unread(fields: Fields, family: Family, positions: int, count: int) -> None:
    """Raise UnsupportedModelError for a field that changes what a model computes, and that its
    family does not have.
    """
    window = fields.raw.get("sliding_window")
    longest = isinstance(window, int) and window >= positions
    kinds = fields.raw.get("layer_types")
    said = {
        "sliding_window": window and not longest and fields.raw.get("use_sliding_window", True),
        "layer_types": kinds is not None and kinds != [FULL] * count,
        "query_pre_attn_scalar": fields.raw.get("query_pre_attn_scalar"),
        "final_logit_softcapping": fields.raw.get("final_logit_softcapping"),
        "attn_logit_softcapping": fields.raw.get("attn_logit_softcapping"),
        "use_bidirectional_attention": fields.raw.get("use_bidirectional_attention"),
    }
    if fields.read.isdisjoint(EXPERT_COUNTS):
        said |= {name: fields.raw.get(name) for name in EXPERT_COUNTS}
    for name, active in said.items():
        if active and name not in fields.read:
            raise UnsupportedModelError(
                f"{SOURCE}: {name} ({fields.raw[name]!r}) is not supported in a {family.name} model"
            )
