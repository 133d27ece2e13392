"""What a checkpoint says its model is, checked: one frozen description for every source format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from triforce_core.model.layers import Attention, DenseMLP, LayerSpec
from triforce_offload.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: a type of ROPE_TYPES and its parameters under transformers' names."""

    type: str = "default"
    theta: float = 10000.0
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """A model: what each of its layers computes, and what stands before and behind them.

    layers: of each layer, in order
    hidden: width of the model
    positions: longest context the checkpoint declares, rope scaling included
    trained_positions: max_position_embeddings, which some rope types scale by
    shared_vocab: rows of embedding and output matrix in a rank's share (`share`), if this is one
    """

    family: str
    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab: int
    norm_eps: float
    trained_positions: int
    rope: RopeConfig
    tied: bool = False
    eos_token_ids: tuple[int, ...] = ()
    shared_vocab: int | None = None

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError if stores of KV could not hold all full-attention layers."""
        attentions = {layer.mixer for layer in self.layers}
        if len({(each.kv_heads, each.head_dim) for each in attentions}) != 1:
            raise UnsupportedModelError(
                "full-attention layers with different key-value heads are not supported"
            )

    @property
    def attention(self) -> Attention:
        """The mixer of the first full-attention layer; KV has one shape in all of them."""
        return self.layers[self.kv_layers[0]].mixer

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The full-attention layers. Stores of KV, scores of chunks and retrieval caches count
        these alone: their layer i is layer kv_layers[i] of the model.
        """
        return tuple(i for i, each in enumerate(self.layers) if isinstance(each.mixer, Attention))

    @cached_property
    def distinct_layers(self) -> tuple[LayerSpec, ...]:
        """One of each kind of layer, in the order in which they first occur."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def vocab_rows(self) -> int:
        """Of embedding and output matrix."""
        return self.vocab if self.shared_vocab is None else self.shared_vocab

    @property
    def in_words(self) -> str:
        """What tells models of different shapes apart, whatever file they come from."""
        mixer, mlp = self.attention, self.layers[0].mlp
        return (
            f"{len(self.layers)} layers of {self.hidden} and {mlp.width}, {mixer.heads} heads over "
            f"{mixer.kv_heads} of {mixer.head_dim}, vocabulary of {self.vocab}"
        )

    @property
    def positions(self) -> int:
        """As vLLM derives it: a scaled rope multiplies the positions it was trained on."""
        factor = self.rope.parameters.get("factor", 1.0)
        if self.rope.type in ("linear", "dynamic"):
            return int(self.trained_positions * factor)
        if self.rope.type == "yarn":
            original = self.rope.parameters["original_max_position_embeddings"]
            return max(self.trained_positions, int(original * factor))
        return self.trained_positions


def from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """From a parsed config.json and generation_config.json (which may be empty).

    Raises UnsupportedModelError, naming what is not supported, or CheckpointError, naming the
    field.
    """
    fields = Fields(raw, "config.json")
    family = _family(raw)
    _refuse_unsupported(raw, family)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    positions = fields.whole("max_position_embeddings")
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    attention = Attention(
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", 128 if family == "qwen3" else hidden // heads or 1),
        # Qwen2 has biases on q, k and v without saying so; the others say.
        qkv_bias=family == "qwen2" or fields.flag("attention_bias", False),
        output_bias=family != "qwen2" and fields.flag("attention_bias", False),
        qk_norm=family == "qwen3",
    )
    layer = LayerSpec(attention, DenseMLP(fields.whole("intermediate_size")))
    return ModelConfig(
        family=family,
        layers=(layer,) * layer_count(fields, "num_hidden_layers"),
        hidden=hidden,
        vocab=fields.whole("vocab_size"),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        trained_positions=positions,
        rope=_hf_rope(raw, positions),
        tied=fields.flag("tie_word_embeddings", False),
        eos_token_ids=token_ids(eos, "eos_token_id"),
    )


@dataclass(frozen=True)
class Fields:
    """Typed access to the fields of a parsed header; every mistake names the field."""

    raw: Mapping[str, Any]
    source: str

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
            raise CheckpointError(f"{self.source}: {name} must be a positive number, got {value!r}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise CheckpointError(f"{self.source}: {name} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {name} must be true or false, got {value!r}")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        return value


def layer_count(fields: Fields, name: str) -> int:
    """How many layers a header says there are. Raises CheckpointError."""
    count = fields.whole(name)
    if count > _MAX_LAYERS:
        raise CheckpointError(f"{count} layers are more than {_MAX_LAYERS}")
    return count


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """None, an id or a list of ids, as a tuple. Raises CheckpointError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
        raise CheckpointError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def check_rope(rope: RopeConfig, source: str) -> RopeConfig:
    """The same rope, once its type is known and its parameters are numbers that it can use."""
    if rope.type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{source}: rope type {rope.type!r} is not supported (only {', '.join(ROPE_TYPES)})"
        )
    required = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }.get(rope.type, ())
    fields = Fields(rope.parameters, f"{source}: rope of type {rope.type}")
    for name in required:
        fields.real(name)
    optional = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    for name in optional:
        if rope.parameters.get(name) is not None:
            fields.real(name)
    if rope.parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{source}: partial_rotary_factor other than 1 is not supported"
        )
    return rope


def _family(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) and architectures else [None]
    if not isinstance(names[0], str) and raw.get("model_type") in ARCHITECTURES.values():
        return raw["model_type"]
    if not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
        named = names[0] or raw.get("model_type")
        what = f"architecture {named!r} is" if named else "a config that names no architecture is"
        raise UnsupportedModelError(f"{what} not supported (only {', '.join(ARCHITECTURES)})")
    return ARCHITECTURES[names[0]]


def _refuse_unsupported(raw: Mapping[str, Any], family: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"hidden_act {raw['hidden_act']!r} is not supported (only silu)"
        )
    if raw.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias is not supported")
    _refuse_quantised(raw.get("quantization_config"))
    experts = [
        name for name in ("num_local_experts", "num_experts", "n_routed_experts") if raw.get(name)
    ]
    if experts:
        raise UnsupportedModelError(f"mixture of experts ({experts[0]}) is not supported")
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModelError("layer_types other than full_attention are not supported")
    # Qwen carries a window that counts only with its switch; Mistral's counts whenever it is set,
    # and transformers sets 4096 where a Mistral config does not speak of it.
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)
    active = raw.get("use_sliding_window", family not in ("qwen2", "qwen3"))
    positions = raw.get("max_position_embeddings")
    if (
        active
        and window
        and not (isinstance(window, int) and isinstance(positions, int) and window >= positions)
    ):
        raise UnsupportedModelError(f"an active sliding_window ({window!r}) is not supported")


def _refuse_quantised(quantised: Any) -> None:
    """But for FP8 with a scale for each 128 by 128 numbers, as Qwen3 and others are published."""
    if not quantised:
        return
    asked = quantised if isinstance(quantised, Mapping) else {}
    method, blocks = asked.get("quant_method"), asked.get("weight_block_size")
    if method != "fp8" or asked.get("fmt", "e4m3") != "e4m3" or blocks != [128, 128]:
        raise UnsupportedModelError(
            f"quantization_config of method {method!r} with blocks of {blocks} is not supported "
            "(only fp8, e4m3, with blocks of 128 by 128); use a GGUF file instead"
        )


def _hf_rope(raw: Mapping[str, Any], positions: int) -> RopeConfig:
    """transformers 5 writes rope_parameters; older checkpoints rope_scaling and rope_theta."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: rope scaling must be an object, got {scaling!r}")
    parameters = {
        name: value
        for name, value in scaling.items()
        if name not in ("rope_type", "type", "rope_theta")
    }
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("yarn", "llama3"):
        parameters.setdefault(
            "original_max_position_embeddings",
            raw.get("original_max_position_embeddings", positions),
        )
    theta = Fields({"rope_theta": scaling.get("rope_theta", raw.get("rope_theta"))}, "config.json")
    rope = RopeConfig(str(kind), theta.real("rope_theta", 10000.0), MappingProxyType(parameters))
    return check_rope(rope, "config.json")
