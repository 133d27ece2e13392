"""Gemma 4 assistants: their config, and their files, safetensors or GGUF as llama.cpp's converter
writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_core.model.checkpoints.drafters.files import DrafterCheckpoint
from triforce_core.model.checkpoints.gguf_config import gguf_config
from triforce_core.model.checkpoints.naming.names import gguf_names, hf_names
from triforce_core.model.checkpoints.naming.pieces import Piece
from triforce_core.model.config import ModelConfig, RopeConfig
from triforce_core.model.families.hf import SOURCE, from_hf, quantised
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.feed_forward import Activation, DenseMLP
from triforce_core.model.heads.joins import Assistant
from triforce_core.model.layers import Attention, LayerSpec, Norms
from triforce_offload.checkpoint.safetensors import SafetensorsSource
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from triforce_offload.checkpoint.gguf import GGUFSource

ARCHITECTURE = "gemma4-assistant"
_CLASSES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_FAMILIES = ("gemma4_text", "gemma4_unified_text")
_TEXT = "text_config"
# Names outside the layers, in safetensors and in GGUF.
_ENDS = {
    "join": ("pre_projection.weight", "nextn.pre_projection.weight"),
    "state": ("post_projection.weight", "nextn.post_projection.weight"),
}
# Of the assistants of Gemma 4 31B and 26B-A4B, whose heads are the models' own.
_HIDDEN, _WIDTH, _LAYERS = 1024, 8192, 4


def is_assistant(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an assistant."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first in _CLASSES or (first is None and raw.get("model_type") in _TYPES)


def fields_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json by which `is_assistant` knows a GGUF file; its other
    metadata are read when it is opened.
    """
    return {"architectures": [_CLASSES[0]]}


def assistant_config(raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """Return the config of an assistant from a parsed config.json.

    target: config of the model that it drafts for

    Raises UnsupportedModelError or CheckpointError.
    """
    fields, text = Fields(raw, SOURCE), raw.get(_TEXT)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{SOURCE}: {_TEXT} must be an object, got {text!r}")
    _check_shared(text.get("num_kv_shared_layers"), text.get("num_hidden_layers"), SOURCE)
    tied = fields.flag("tie_word_embeddings", True)
    own = {"architectures": None, "num_kv_shared_layers": None, "tie_word_embeddings": tied}
    width = fields.whole("backbone_hidden_size", 1536)
    return _of_target(from_hf({**text, **own}, {}), width, target, SOURCE)


def _check_shared(shared: object, count: object, where: str) -> None:
    """Raise UnsupportedModelError unless all layers attend to the model's keys."""
    if shared not in (None, 0, count):
        raise UnsupportedModelError(
            f"{where}: an assistant with keys of its own ({shared} of {count} layers share the "
            "model's) is not supported"
        )


def _of_target(config: ModelConfig, width: int, target: ModelConfig, where: str) -> ModelConfig:
    """Return the config of an assistant for a model, from that of a model with its layers.

    width: width of the model that the files name
    where: the files, for errors

    Raises UnsupportedModelError or CheckpointError.
    """
    if target.family not in _FAMILIES or config.family not in _FAMILIES:
        raise UnsupportedModelError(
            f"{where}: assistants of Gemma 4 draft for Gemma 4, not for a {target.family} model"
        )
    if any(spec.mlp.active for spec in config.layers):
        raise UnsupportedModelError(f"{where}: an assistant with experts is not supported")
    if inputs := config.per_layer_inputs:
        raise UnsupportedModelError(
            f"{where}: hidden_size_per_layer_input ({inputs.width}) is not supported in an "
            "assistant"
        )
    if not config.tied:
        raise UnsupportedModelError(
            f"{where}: an assistant whose output matrix is not its embedding "
            "(tie_word_embeddings false) is not supported"
        )
    theirs = [
        ("backbone_hidden_size", width, target.hidden),
        ("vocab_size", config.vocab, target.vocab),
        *_rotations(config, target),
    ]
    kinds = [("full attention", config.attention, target.attention)]
    if config.windowed:
        kinds.append(("windows", config.windowed, target.windowed))
    for kind, ours, model in kinds:
        theirs.append((f"heads of {kind}", _heads(ours), model and _heads(model)))
    for name, said, needed in theirs:
        if said != needed:
            raise CheckpointError(
                f"{where}: {name} is {said}, and {needed} for the model: the assistant was made "
                "for another one"
            )
    # The last layers of each kind.
    keys = [target.kv_layers[-1], *([target.window_layers[-1]] if config.windowed else [])]
    kept = sum(target.layers[layer].mixer.kept for layer in keys)
    join = Assistant(target.hidden, tuple(keys), kept)
    return replace(
        config,
        layers=tuple(_sharing(spec, join) for spec in config.layers),
        rope=target.rope,
        window_rope=target.window_rope,
        embedding_scale=target.embedding_scale,
        logit_cap=None,
    )


def _heads(mixer: Attention) -> str:
    return f"{mixer.kv_heads} of {mixer.head_dim}"


def _rotations(config: ModelConfig, target: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield how an assistant and its model rotate heads, if they say it alike. A GGUF file of
    Gemma 4 has frequencies in a tensor instead.
    """
    for name in ("rope", "window_rope"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours is None or theirs is None:
            continue
        alike = {ours.type, theirs.type} == {"default", "proportional"} or ours == theirs
        yield "rope_theta", f"{ours.theta:g}", f"{theirs.theta:g}"
        if not alike:
            yield name, _of_rope(ours), _of_rope(theirs)


def _of_rope(rope: RopeConfig) -> str:
    return f"{rope.type} {dict(rope.parameters)}"


def _sharing(spec: LayerSpec, join: Assistant) -> LayerSpec:
    """Return a layer that attends to the model's keys."""
    mixer = replace(spec.mixer, projects_keys=False, projects_values=False, value_norm=False)
    return replace(spec, mixer=replace(mixer, shares_kv=False), joins=join)


def typical_assistant(target: ModelConfig) -> ModelConfig:
    """Return the config of an assistant of the published shape: three layers with a window and one
    without, of the model's heads.

    Raises UnsupportedModelError for a model that is none of Gemma 4.
    """
    if target.family not in _FAMILIES or target.windowed is None:
        raise UnsupportedModelError(f"there are assistants for Gemma 4, not for {target.family}")
    mlp = DenseMLP(_WIDTH, Activation.GELU_TANH)
    layers = [
        LayerSpec(
            replace(mixer, heads=target.attention.heads), mlp, Norms.AROUND, output_scale=True
        )
        for mixer in (*(target.windowed,) * (_LAYERS - 1), target.attention)
    ]
    config = replace(target, layers=tuple(layers), hidden=_HIDDEN)
    return _of_target(config, target.hidden, target, "an assistant")


class AssistantCheckpoint(DrafterCheckpoint):
    """The files of an assistant. Its output matrix is its own embedding, which nothing else uses;
    what chooses some of the tokens first is not used.
    """

    further = ("lm_head.", "masked_embedding.", "masked_embd", "rope_freqs.")


def open_assistant(path: Path, raw: Mapping[str, Any], target: ModelConfig) -> AssistantCheckpoint:
    """Open the directory or the GGUF file of an assistant.

    raw: its config.json; not used of a GGUF file
    target: config of the model that it drafts for

    Raises CheckpointError or UnsupportedModelError.
    """
    if path.is_dir():
        try:
            config = assistant_config(raw, target)
        except CheckpointError as error:
            raise type(error)(f"{path}: {str(error).removeprefix(f'{SOURCE}: ')}") from error
        kind = {"architectures": None, "model_type": config.family}
        source = SafetensorsSource(path, quantised({**raw, **kind}))
        return AssistantCheckpoint(path, config, source, _names(config, in_gguf=False))
    from triforce_offload.checkpoint.gguf import GGUFSource

    source = GGUFSource(path)
    try:
        own = gguf_config(_AsModel(source))
        shared = source.metadata.get(f"{ARCHITECTURE}.attention.shared_kv_layers")
        _check_shared(shared, len(own.layers), str(path))
        width = Fields(source.metadata, str(path)).whole(f"{ARCHITECTURE}.embedding_length_out")
        config = _of_target(own, width, target, str(path))
    except BaseException:
        source.close()
        raise
    return AssistantCheckpoint(path, config, source, _names(config, in_gguf=True))


@dataclass(frozen=True)
class _AsModel:
    """The header of an assistant's GGUF file, as that of a model with its layers would be."""

    source: GGUFSource

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def metadata(self) -> dict[str, Any]:
        own, model = f"{ARCHITECTURE}.", "gemma4."
        fields = {
            f"{model}{name.removeprefix(own)}" if name.startswith(own) else name: value
            for name, value in self.source.metadata.items()
        }
        fields.pop(f"{model}attention.shared_kv_layers", None)
        return fields | {"general.architecture": "gemma4"}

    def names(self) -> Set[str]:
        """Frequencies are the model's, whether the file has them or not."""
        return self.source.names() | {"rope_freqs.weight"}


def _names(config: ModelConfig, *, in_gguf: bool) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor of an assistant."""
    of_model, shapes = (gguf_names if in_gguf else hf_names)(config), config.own_ends

    def pieces(name: str) -> list[Piece]:
        if name in _ENDS:
            return [Piece(_ENDS[name][in_gguf], shapes[name][0])]
        return of_model(name)

    return pieces
