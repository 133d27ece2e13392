"""Model configs: one frozen, validated description for every checkpoint format."""

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
    """Rotary embedding: a type from ROPE_TYPES, and its parameters under transformers' names."""

    type: str = "default"
    theta: float = 10000.0
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """A model: its layers, and what comes before and after them.

    layers: specification of each layer, in order
    hidden: width of the model
    vocab: number of tokens of the vocabulary
    positions: longest context that the checkpoint declares, rope scaling included
    trained_positions: max_position_embeddings, which some rope types scale
    tied: whether the embedding is also the output matrix
    shared_vocab: rows of embedding and output matrix in a rank's share (see `share`); None for a
        whole model
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
        """Raise UnsupportedModelError if the KV of the layers differs in shape."""
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
        """Indices of the full-attention layers. KV stores, chunk scores and retrieval caches number
        only these: their layer i is layer kv_layers[i] of the model.
        """
        return tuple(i for i, each in enumerate(self.layers) if isinstance(each.mixer, Attention))

    @cached_property
    def distinct_layers(self) -> tuple[LayerSpec, ...]:
        """One of each kind of layer, in the order in which they first occur."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and output matrix."""
        return self.vocab if self.shared_vocab is None else self.shared_vocab

    @property
    def in_words(self) -> str:
        """The model's shape in words, which does not depend on the file format."""
        mixer, mlp = self.attention, self.layers[0].mlp
        return (
            f"{len(self.layers)} layers of {self.hidden} and {mlp.width}, {mixer.heads} heads over "
            f"{mixer.kv_heads} of {mixer.head_dim}, vocabulary of {self.vocab}"
        )

    @property
    def positions(self) -> int:
        """Longest context, derived as in vLLM: rope scaling multiplies the trained positions."""
        factor = self.rope.parameters.get("factor", 1.0)
        if self.rope.type in ("linear", "dynamic"):
            return int(self.trained_positions * factor)
        if self.rope.type == "yarn":
            original = self.rope.parameters["original_max_position_embeddings"]
            return max(self.trained_positions, int(original * factor))
        return self.trained_positions


def from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the config from a parsed config.json and generation_config.json (may be empty).

    Raises UnsupportedModelError, which names the unsupported feature, or CheckpointError, which
    names the field.
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
        # Qwen2 always has biases on q, k and v; the other families have a config field for them.
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
    """Typed access to the fields of a parsed header. Every error names the field."""

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
    """Return the number of layers in a header. Raises CheckpointError."""
    count = fields.whole(name)
    if count > _MAX_LAYERS:
        raise CheckpointError(f"{count} layers are more than {_MAX_LAYERS}")
    return count


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Convert None, an id or a list of ids to a tuple. Raises CheckpointError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
        raise CheckpointError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def check_rope(rope: RopeConfig, source: str) -> RopeConfig:
    """Return `rope` after checking its type and parameters.

    Raises UnsupportedModelError or CheckpointError.
    """
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
    # Qwen's window is active only if use_sliding_window is set; Mistral's is always active, and
    # transformers uses 4096 if a Mistral config has no such field.
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
    """Raise UnsupportedModelError for quantised weights, except FP8 with one scale for each 128 by
    128 numbers, the format in which Qwen3 and others are published.
    """
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
    """Parse rope_parameters (transformers 5), or rope_scaling and rope_theta (earlier versions)."""
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
