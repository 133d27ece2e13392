"""Files of DFlash drafters, as their authors publish them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from triforce_core.model.checkpoints.checkpoint import Checkpoint
from triforce_core.model.checkpoints.naming.names import blocks, hf_names
from triforce_core.model.checkpoints.naming.pieces import Piece, stored_shapes
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.hf import SOURCE, from_hf, quantised
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.heads.joins import Convolutions, DFlash, Selector
from triforce_offload.checkpoint.header import read_json
from triforce_offload.checkpoint.safetensors import SafetensorsSource
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# Number of tokens that a drafter without windows attends to: longer contexts take memory, and make
# drafts worse (z-lab/dflash, issue 66).
_CONTEXT = 2048
_SLIDING = "sliding_attention"
# Fields of a layer of Qwen3, as which all layers are computed.
_OF_LAYERS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "hidden_act", "attention_bias", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
_QWEN3 = {"model_type": "qwen3", "architectures": None}
_ENDS = {
    "norm": "norm.weight",
    "state_norm": "hidden_norm.weight",
    "fc": "fc.weight",
    "before": "candidate_selector.predecessor_codebook",
    "after": "candidate_selector.successor_codebook",
    "gate": "candidate_selector.hidden_projection.weight",
}
_CONVOLUTIONS = {
    "mixer_conv": "attention_conv.base_kernel",
    "mixer_conv_from": "attention_conv.kernel_projection.weight",
    "mlp_conv": "mlp_conv.base_kernel",
    "mlp_conv_from": "mlp_conv.kernel_projection.weight",
}
_BUFFER = "rotary_emb.inv_freq"
# Of a typical drafter: the shape that is published for Qwen3.8-27B.
_TYPICAL = {"heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 5, "rows": 8}


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
    taps = _tapped(fields, target)
    layers = fields.whole("num_hidden_layers")
    kept = {name: raw[name] for name in _OF_LAYERS if raw.get(name) is not None}
    of_model = {"vocab_size": target.vocab, "tie_word_embeddings": False}
    config = from_hf({**kept, **_QWEN3, **of_model, "num_hidden_layers": layers}, {})
    width = fields.whole("target_hidden_size", target.hidden)
    if config.hidden != target.hidden or width != target.hidden:
        raise CheckpointError(
            f"{SOURCE}: the drafter is {config.hidden} wide, for a model of {width}, and this "
            f"model is {target.hidden} wide"
        )
    kinds = fields.of_layers("layer_types", layers, [None] * layers)
    join = DFlash(
        taps,
        target.hidden,
        fields.whole("block_size", least=2),
        _mask(fields, target),
        _context(fields, kinds),
        tuple(_causal(fields, kind) for kind in kinds),
        _convolutions(fields, config.hidden),
        _selector(fields),
    )
    cap = fields.get("final_logit_softcapping")
    return replace(
        config,
        layers=tuple(replace(spec, joins=join) for spec in config.layers),
        embedding_scale=fields.real("input_embedding_scale", 1.0),
        logit_scale=fields.real("output_multiplier", fields.real("logit_scale", 1.0)),
        logit_cap=fields.real("final_logit_softcapping") if cap else None,
    )


def _fields(raw: Mapping[str, Any]) -> Fields:
    """Return the fields of a config, those of its `dflash_config` among them."""
    inner = raw.get("dflash_config")
    return Fields({**raw, **(inner if isinstance(inner, Mapping) else {})}, SOURCE)


def _refuse_unknown(fields: Fields, target: ModelConfig) -> None:
    """Raise UnsupportedModelError for what changes the computation and is not known here."""
    if blocks(target.family, target.layers)[-1] > len(target.layers) or target.streams:
        raise UnsupportedModelError(f"DFlash drafters do not draft for {target.family} models")
    vocab = fields.get("draft_vocab_size")
    if vocab not in (None, fields.get("vocab_size")):
        raise UnsupportedModelError(
            f"{SOURCE}: a DFlash drafter with a vocabulary of its own ({vocab} tokens) is not "
            "supported"
        )
    fields.only("model_type", "qwen3", "dflash")
    fields.only("use_aux_hidden_state", True)
    fields.only("attention_sink_bias", False)
    fields.only("add_swa_attention_sink_bias", False)
    fields.only("is_neox_style", True)


def _tapped(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose input the drafter takes. Its files name those whose output it is."""
    found, count = fields.get("target_layer_ids"), len(target.layers)
    if found is None:
        found = _usual_taps(count, fields.whole("num_hidden_layers"))
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
    """Return whether a row of a layer sees only the rows before it (vLLM's `qwen3_dflash`): what a
    config says, else whether the layer is named as one with a window.
    """
    for name in ("is_causal", "causal"):
        if fields.get(name) is not None:
            return fields.flag(name, False)
    return kind == _SLIDING


def _context(fields: Fields, kinds: list[str | None]) -> int:
    """Return the number of tokens that all layers attend to."""
    slides = _SLIDING in kinds or fields.flag("use_swa", False)
    window = fields.get("swa_window_size") or fields.get("sliding_window")
    if not slides:
        return _CONTEXT
    return min(_CONTEXT, Fields({"sliding_window": window}, SOURCE).whole("sliding_window"))


def _convolutions(fields: Fields, hidden: int) -> Convolutions | None:
    if not fields.get("conv_kernel_size"):
        return None
    found = Convolutions(fields.whole("conv_kernel_size"), fields.whole("conv_group_size"))
    if hidden % found.group:
        raise CheckpointError(
            f"{SOURCE}: conv_group_size {found.group} does not divide {hidden} channels"
        )
    return found


def _selector(fields: Fields) -> Selector | None:
    if not fields.get("selector_rank"):
        return None
    return Selector(fields.whole("selector_top_k"), fields.whole("selector_rank"))


class DFlashCheckpoint(Checkpoint):
    """The files of a drafter. See `ReadableHead`."""

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config = self.config
        shapes = config.joins.ends(config.hidden, config.vocab)
        for index, spec in enumerate(config.layers):
            parts = spec.shapes(config.hidden)
            shapes |= {f"layers.{index}.{part}": shape for part, shape in parts.items()}
        for name, shape in shapes.items():
            yield from stored_shapes(self._names(name), shape)

    def faults(self) -> Iterator[CheckpointError]:
        """Checkpoint.faults, and tensors that no DFlash drafter is known to have."""
        yield from super().faults()
        known = dict(self._expected()).keys()
        others = sorted(name for name in self._source.names() - known if _BUFFER not in name)
        if others:
            yield UnsupportedModelError(
                f"{self.path} holds {others[0]}, which is not known of DFlash drafters"
            )

    def tokens(self) -> None:
        """ReadableHead.tokens: the model's own."""


def open_dflash(path: Path, target: ModelConfig) -> DFlashCheckpoint:
    """Open the directory of a drafter. target: config of the model that it drafts for

    Raises CheckpointError or UnsupportedModelError.
    """
    raw = read_json(path / SOURCE)
    config = dflash_config(raw, target)
    source = SafetensorsSource(path, quantised({**raw, **_QWEN3}))
    return DFlashCheckpoint(path, config, source, _names(config))


def _names(config: ModelConfig) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor of the drafter."""
    of_model, join = hf_names(config), config.joins

    def pieces(name: str) -> list[Piece]:
        if name in _ENDS:
            rows = join.ends(config.hidden, config.vocab)[name][0]
            return [Piece(_ENDS[name], rows)]
        prefix, _, part = name.rpartition(".")
        if part in _CONVOLUTIONS:
            rows = config.layers[0].shapes(config.hidden)[part][0]
            return [Piece(f"{prefix}.{_CONVOLUTIONS[part]}", rows)]
        found = of_model(name)
        return [replace(piece, name=piece.name.removeprefix("model.")) for piece in found]

    return pieces
