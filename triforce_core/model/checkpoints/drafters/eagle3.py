"""Files of EAGLE-3 heads, as EAGLE, SpecForge and speculators publish them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_core.model.checkpoints.checkpoint import Checkpoint
from triforce_core.model.checkpoints.naming.names import blocks, hf_names
from triforce_core.model.checkpoints.naming.pieces import Piece, stored_shapes
from triforce_core.model.config import ModelConfig, RopeConfig
from triforce_core.model.families.hf import SOURCE, from_hf
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.feed_forward import DenseMLP
from triforce_core.model.heads.joins import Eagle3, Join
from triforce_core.model.layers import Attention, LayerSpec
from triforce_offload.checkpoint.header import read_json
from triforce_offload.checkpoint.safetensors import SafetensorsSource
from triforce_offload.checkpoint.source import TensorSource
from triforce_offload.checkpoint.torch_files import TorchFiles
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.linear import Weight

# With what the names of the tensors of the layer begin.
_LAYERS = ("midlayer.", "layers.0.")
# For each token of the output, how far the model's token is from it.
_TO_MODEL = "d2t"
_EMBEDDING = "embed_tokens.weight"
# Tensors that are not needed: which of the model's tokens the head knows, and buffers.
_UNUSED = ("t2d", "rotary_emb.inv_freq")
_ENDS = {"norm": "norm.weight", "head": "lm_head.weight", "fc": "fc.weight"}
# Of a typical head.
_TYPICAL_TOKENS, _TYPICAL_POSITIONS = 32_000, 2048
_JOINS = {"token_norm": "input_layernorm.weight", "state_norm": "hidden_norm.weight"}


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an EAGLE-3 head."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    named = isinstance(first, str) and "eagle3" in first.lower()
    return named or _by_speculators(raw) or "draft_vocab_size" in raw


def _by_speculators(raw: Mapping[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "eagle3"


def eagle3_config(
    raw: Mapping[str, Any], target: ModelConfig, embedded: int | None = None
) -> ModelConfig:
    """Return the config of a head from a parsed config.json.

    target: config of the model that it drafts for
    embedded: number of tokens of its own embedding; None if it has none

    Raises UnsupportedModelError or CheckpointError.
    """
    layer = raw.get("transformer_layer_config", raw)
    if not isinstance(layer, Mapping):
        raise CheckpointError(f"{SOURCE}: transformer_layer_config must be an object")
    fields, count = Fields(_flat(raw), SOURCE), len(target.layers)
    vocab = fields.whole("draft_vocab_size", Fields(layer, SOURCE).whole("vocab_size"))
    # Heads attend to the recent tokens alone here, windows or not. Some configs have the number of
    # layers of the model.
    others = dict.fromkeys(("architectures", "sliding_window", "layer_types"))
    others |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "vocab_size": vocab}
    config = from_hf({**layer, **others}, {})
    tapped = _tapped(raw, target)
    if not all(type(each) is int and 0 <= each <= count for each in tapped):
        raise CheckpointError(
            f"{SOURCE}: a head takes the input of layers {list(tapped)} of a model with {count} "
            "layers"
        )
    if vocab > target.vocab:
        raise CheckpointError(
            f"{SOURCE}: the head has {vocab} tokens, more than the model's {target.vocab}"
        )
    if embedded is None and config.hidden != target.hidden:
        raise CheckpointError(
            f"the head is {config.hidden} wide and the model {target.hidden}, so it needs an "
            f"embedding of its own, {_EMBEDDING}"
        )
    join = Eagle3(
        tuple(tapped),
        target.hidden,
        embedded,
        fields.flag("norm_before_residual", _by_speculators(raw)),
        fields.flag("norm_output", False),
        _tap_norms(fields, len(tapped)),
    )
    return _with_join(config, join)


def _with_join(config: ModelConfig, join: Join) -> ModelConfig:
    return replace(config, layers=tuple(replace(spec, joins=join) for spec in config.layers))


def on_ranks(config: ModelConfig, count: int, vocab: int) -> ModelConfig:
    """Return the config of a head as several ranks have it, see `Join.on_ranks`."""
    return _with_join(config, config.joins.on_ranks(count, vocab))


def planned_eagle3(raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """Return the config of a head of which only the config.json is there. It is taken to have an
    embedding of its own if it needs one, or if speculators wrote it. Raises as `eagle3_config`.
    """
    layer = raw.get("transformer_layer_config", raw)
    wide = isinstance(layer, Mapping) and layer.get("hidden_size") == target.hidden
    embedded = None if wide and not _by_speculators(raw) else target.vocab
    return eagle3_config(raw, target, embedded)


def typical_eagle3(target: ModelConfig) -> ModelConfig:
    """Return the config of a head for a dense model as most are published: a layer like the model's
    own, 32,000 tokens, and the model's embedding.

    Raises UnsupportedModelError for a model with experts.
    """
    full = target.attention
    if target.streams:
        raise UnsupportedModelError(f"EAGLE-3 heads do not draft for {target.family} models")
    mlp = target.layers[0].mlp
    if any(spec.mlp.active for spec in target.layers):
        raise UnsupportedModelError(
            f"EAGLE-3 heads of {target.family} models have no typical shape: name a head's "
            "directory or hub id"
        )
    mixer = Attention(full.heads, full.kv_heads, full.head_dim)
    join = Eagle3(tuple(_tapped({}, target)), target.hidden)
    layer = LayerSpec(mixer, DenseMLP(mlp.width), joins=join)
    vocab = min(_TYPICAL_TOKENS, target.vocab)
    return ModelConfig(
        "llama", (layer,), target.hidden, vocab, 1e-6, _TYPICAL_POSITIONS, RopeConfig()
    )


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config, those of its `eagle_config` among them."""
    inner = raw.get("eagle_config")
    return {**(inner if isinstance(inner, Mapping) else {}), **raw}


def _tap_norms(fields: Fields, taps: int) -> int:
    """Return `Eagle3.tap_norms`."""
    whole, each = fields.flag("norm_before_fc", False), fields.flag("fc_norm", False)
    if whole and each:
        raise UnsupportedModelError(f"{SOURCE}: norm_before_fc and fc_norm together")
    return taps if each else int(whole)


def _tapped(raw: Mapping[str, Any], target: ModelConfig) -> Sequence[Any]:
    """Return the layers of the model whose input the head takes; without a field that says so,
    those of EAGLE-3's authors and of vLLM.
    """
    inner = raw.get("eagle_config")
    inner = inner if isinstance(inner, Mapping) else {}
    if inner.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            "EAGLE-3 heads that take the last hidden state alone are not supported"
        )
    field, layers = "eagle_aux_hidden_state_layer_ids", len(target.layers)
    if blocks(target.family, target.layers)[-1] > layers:
        # Their numbers are not those of layers here.
        raise UnsupportedModelError(
            f"EAGLE-3 heads do not draft for {target.family} models, which number mixers and MLPs"
        )
    if isinstance(found := raw.get(field), list) and found:
        return found
    if isinstance(found := inner.get(field), list) and found:
        # SpecForge names the layers whose output it is, others those whose input. The first begin
        # with 1, the others with 2 (SGLang, pull request 25454).
        after = found[0] == 1 and target.family != "gpt_oss"
        return [each + after if type(each) is int else each for each in found]
    return 2, layers // 2, layers - 3


class Eagle3Checkpoint(Checkpoint):
    """The files of a head. See `ReadableHead`."""

    _model: Checkpoint | None = None

    def on_ranks(self, count: int, model: Checkpoint) -> Eagle3Checkpoint:
        """Return the head as several ranks have it, see `Join.on_ranks`. model: the whole model"""
        join = self.config.joins
        if (own := join.on_ranks(count, model.config.vocab)) == join:
            return self
        head = copy.copy(self)
        head._model, head.config = model, _with_join(self.config, own)
        return head

    def read(self, name: str, into: Weight) -> None:
        """Checkpoint.read."""
        if name == "embedding" and self._model is not None:
            self._model.read(name, into)
        else:
            super().read(name, into)

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config, join = self.config, self.config.joins
        shapes = {
            **config.layers[0].shapes(config.hidden),
            **config.own_ends,
            **join.embedding(config.hidden),
        }
        for name, shape in shapes.items():
            yield from stored_shapes(self._names(name), shape)

    def faults(self) -> Iterator[CheckpointError]:
        """Checkpoint.faults, and tensors that no EAGLE-3 head is known to have."""
        yield from super().faults()
        known = dict(self._expected()).keys() | {_TO_MODEL}
        others = sorted(name for name in self._source.names() - known if not name.endswith(_UNUSED))
        if others:
            yield UnsupportedModelError(
                f"{self.path} holds {others[0]}, which is not known of EAGLE-3 heads"
            )

    def tokens(self) -> torch.Tensor | None:
        """ReadableHead.tokens. Raises CheckpointError."""
        if _TO_MODEL not in self._source.names():
            return None
        import torch

        further = self._source.whole_numbers(_TO_MODEL)
        if len(further) != self.config.vocab:
            raise CheckpointError(
                f"{self.path}: {_TO_MODEL} has {len(further)} numbers, and the head "
                f"{self.config.vocab} tokens"
            )
        return further + torch.arange(len(further))

    def check_tokens(self, vocab: int) -> None:
        """Raise CheckpointError if a token of the head is none of the model's.

        vocab: number of the model's tokens
        """
        tokens = self.tokens()
        if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise CheckpointError(
                f"{self.path}: {_TO_MODEL} names tokens that the model's {vocab} do not include"
            )


def open_eagle3(path: Path, target: ModelConfig) -> Eagle3Checkpoint:
    """Open the directory of a head. target: config of the model that it drafts for

    Raises CheckpointError or UnsupportedModelError.
    """
    raw = read_json(path / SOURCE)
    source = _source(path)
    try:
        held = source.names()
        config = eagle3_config(raw, target, _embedded(path, source))
        if _TO_MODEL not in held and config.vocab != target.vocab:
            raise CheckpointError(
                f"{path} has {config.vocab} tokens, and no {_TO_MODEL} says which of the model's "
                f"{target.vocab} they are"
            )
        head = Eagle3Checkpoint(path, config, source, _names(config, held))
        head.check_tokens(target.vocab)
        return head
    except BaseException:
        source.close()
        raise


def _embedded(path: Path, source: TensorSource) -> int | None:
    """Return the number of tokens of a head's own embedding; None if it has none."""
    if _EMBEDDING not in source.names():
        return None
    shape = source.shape(_EMBEDDING)
    if len(shape) != 2 or not shape[0]:
        raise CheckpointError(f"{path}: {_EMBEDDING} has shape {list(shape)}")
    return shape[0]


def _source(path: Path) -> SafetensorsSource | TorchFiles:
    if any(path.glob("*.safetensors")):
        return SafetensorsSource(path)
    return TorchFiles(path)


def _names(config: ModelConfig, held: frozenset[str]) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor of the head, by its name. held: names in its files"""
    layer = next((each for each in _LAYERS if f"{each}{_JOINS['state_norm']}" in held), _LAYERS[0])
    of_model, begin = hf_names(config, held), "layers.0."

    def pieces(name: str) -> list[Piece]:
        part, rows = name.removeprefix(begin), config.hidden
        if part == "embedding":
            return [Piece(_EMBEDDING, config.joins.embedded or 0)]
        if part == "tap_norm":
            join = config.joins
            if join.tap_norms == 1:
                return [Piece("input_norm.weight", join.tapped_width(rows))]
            return [Piece(f"fc_norm.{i}.weight", join.width) for i in range(join.tap_norms)]
        if part in _ENDS:
            return [Piece(_ENDS[part], config.vocab if part == "head" else rows)]
        if part in _JOINS:
            return [Piece(layer + _JOINS[part], rows)]
        found = of_model(begin + part)
        return [
            replace(piece, name=layer + piece.name[piece.name.index(begin) + len(begin) :])
            for piece in found
        ]

    return pieces
