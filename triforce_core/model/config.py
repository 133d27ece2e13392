"""Model configs: one frozen, validated description for every checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from triforce_core.model.feed_forward import Described, Shapes
from triforce_core.model.heads.joins import Join
from triforce_core.model.layers import Attention, LayerSpec, Mixer, NormKind, Recurrent
from triforce_core.model.parts.specs import Keeps, NGrams, PerLayerInputs, Streams
from triforce_offload.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: a type from ROPE_TYPES, and its parameters under transformers' names."""

    type: str = "default"
    theta: float = 10000.0
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Parameters may be lists, which have no hash."""
        return hash((self.type, self.theta))

    @property
    def query_growth(self) -> tuple[float, float] | None:
        """How queries grow with their position: by what factor of the logarithm, and in steps of
        how many positions; None if they do not.
        """
        beta = self.parameters.get("llama_4_scaling_beta")
        return (beta, self.parameters["original_max_position_embeddings"]) if beta else None

    def variant(self, context: int) -> str:
        """Return what tells contexts apart whose keys are rotated otherwise, though the model is
        the same: longrope has other frequencies in engines for long contexts. "" for other types.
        """
        if self.type != "longrope":
            return ""
        return f" long={context > self.parameters['original_max_position_embeddings']}"

    def rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated; the others come after them in files.

        "proportional" rotates whole heads: the last frequencies are 0.
        """
        if self.type == "proportional":
            return head_dim
        # As transformers rounds it, but for the rounding of a quotient of whole numbers.
        return int(head_dim * (self.parameters.get("partial_rotary_factor") or 1.0) + 1e-6)


# A rotary embedding, None for layers that do not rotate, and the size of a head.
RotationKind = tuple[RopeConfig | None, int]


@dataclass(frozen=True, repr=False)
class ModelConfig(Described):
    """A model: its layers, and what comes before and after them.

    layers: specification of each layer, in order
    hidden: width of the model
    vocab: number of tokens of the vocabulary
    positions: longest context that the checkpoint declares, rope scaling included
    trained_positions: max_position_embeddings, which some rope types scale
    tied: whether the embedding is also the output matrix
    shared_vocab: rows of embedding and output matrix in a rank's share (see `sharing`); None for a
        whole model
    embedding_scale, logit_scale: factors of the embeddings and of the logits
    window_rope: rotary embedding of the layers with a window; None if it is that of the others
    norm_kind: how every norm of the model is computed
    logit_cap: logits x become cap * tanh(x / cap); None for no cap
    """

    _NEWER = frozenset({"embedding_scale", "logit_scale", "window_rope", "norm_kind", "logit_cap"})

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
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    window_rope: RopeConfig | None = None
    norm_kind: NormKind = NormKind.RMS
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError if the KV of the layers differs in shape, or if no layer
        attends.
        """
        full = [self.layers[layer].mixer for layer in self.kv_layers]
        windows = [self.layers[layer].mixer for layer in self.window_layers]
        if not full and not windows:
            raise UnsupportedModelError("a recurrence in every layer is not supported")
        for kind, mixers in (("full-attention layers", full), ("layers with a window", windows)):
            kept = {(each.sides, each.kv_heads, each.head_dim, each.window) for each in mixers}
            if len(kept) > 1:
                raise UnsupportedModelError(
                    f"{kind} with different key-value heads or windows are not supported"
                )
        if len({self.layers[layer].mixer for layer in self.recurrent_layers}) > 1:
            raise UnsupportedModelError("recurrent layers that differ are not supported")

    @property
    def attention(self) -> Attention:
        """The mixer of the first full-attention layer, or of the first layer if all have a window;
        KV has one shape in all of them.
        """
        return self.layers[(*self.kv_layers, *self.window_layers)[0]].mixer

    @property
    def windowed(self) -> Attention | None:
        """The mixer of the first layer with a window, None if there is none; KV has one shape in
        all of them.
        """
        return self.layers[self.window_layers[0]].mixer if self.window_layers else None

    @property
    def caps_scores(self) -> bool:
        """Whether scores of attention have a cap."""
        return any(each.score_cap for each in (self.attention, self.windowed) if each)

    @property
    def recurrent(self) -> Recurrent | None:
        """The mixer of the recurrent layers, None if there are none."""
        return self.layers[self.recurrent_layers[0]].mixer if self.recurrent_layers else None

    @property
    def stored_mixers(self) -> tuple[Mixer, ...]:
        """The mixer `attention`, then those of layers with a window and of recurrent layers, if the
        model has them.
        """
        return (self.attention, *filter(None, (self.windowed, self.recurrent)))

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers. KV stores, chunk scores and retrieval caches number
        only these: their layer i is layer kv_layers[i] of the model.
        """
        return self._layers_of(Keeps.KV)

    @cached_property
    def window_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a window, which stores of windows number likewise."""
        return self._layers_of(Keeps.WINDOW)

    @cached_property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the recurrent layers, which stores of states number likewise."""
        return self._layers_of(Keeps.STATE)

    @cached_property
    def kv_places(self) -> tuple[int, ...]:
        """Index of each layer among the full-attention layers, among those with a window, or among
        the recurrent ones.
        """
        kinds = self.kv_layers, self.window_layers, self.recurrent_layers
        places = {layer: i for kind in kinds for i, layer in enumerate(kind)}
        return tuple(places[layer] for layer in range(len(self.layers)))

    @property
    def as_drafter(self) -> ModelConfig:
        """The model as it drafts: over so few tokens that its windows hide none or hardly any, all
        layers attend to all of them. Raises UnsupportedModelError if their KV differs in shape.
        """
        if self.recurrent_layers:
            raise UnsupportedModelError(
                f"a {self.family} model cannot draft as a model of its own: its recurrent layers "
                "cannot forget the oldest tokens"
            )
        heads = {(each.mixer.kv_heads, each.mixer.head_dim) for each in self.layers}
        if len(heads) > 1:
            raise UnsupportedModelError(
                f"a {self.family} model cannot draft as a model of its own: heads of its layers "
                "with a window differ from those of the others"
            )
        layers = [replace(layer, mixer=replace(layer.mixer, window=None)) for layer in self.layers]
        return replace(self, layers=tuple(layers))

    @cached_property
    def distinct_layers(self) -> tuple[LayerSpec, ...]:
        """One of each kind of layer, in the order in which they first occur."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def joins(self) -> Join | None:
        """What it joins with hidden states of another model, if it is a head. See `LayerSpec`."""
        return self.layers[0].joins

    @property
    def own_ends(self) -> Shapes:
        """Shapes of the tensors that a head has outside its layers."""
        return self.joins.ends(self.hidden, self.vocab, self.vocab_rows)

    @property
    def streams(self) -> Streams | None:
        """The residual streams, None if there is one. All layers have the same."""
        return self.layers[0].streams

    @property
    def width(self) -> int:
        """Numbers of a token's hidden states between layers, in all residual streams."""
        return self.hidden * (self.streams.count if self.streams else 1)

    @property
    def last_shapes(self) -> Shapes:
        """Shapes of the tensors between the last layer and the output matrix: of a norm, or of the
        gated mean of residual streams.
        """
        return (
            self.streams.of_mean(self.hidden, "last") if self.streams else {"norm": (self.hidden,)}
        )

    @property
    def ngrams(self) -> NGrams | None:
        """The n-gram embeddings, None without any. One layer has them."""
        return next((spec.ngrams for spec in self.layers if spec.ngrams), None)

    @property
    def per_layer_inputs(self) -> PerLayerInputs | None:
        """The per-layer embeddings, None without any. All layers have them."""
        return self.layers[0].per_layer_inputs

    @property
    def per_layer_columns(self) -> int:
        """Numbers of a token in the table of `per_layer_inputs`, 0 without one."""
        return len(self.layers) * self.per_layer_inputs.width if self.per_layer_inputs else 0

    @property
    def looks_up(self) -> bool:
        """Whether forwards read tables that stay in files."""
        return bool(self.ngrams or self.per_layer_inputs)

    @cached_property
    def kv_reusing_layers(self) -> tuple[int, ...]:
        """Indices of the layers that use the keys and values of earlier ones."""
        mixers = [spec.mixer for spec in self.layers]
        return tuple(
            i for i, each in enumerate(mixers) if isinstance(each, Attention) and each.reuses_kv
        )

    @property
    def chooses_keys(self) -> bool:
        """Whether tokens choose the keys that they attend to, by an index."""
        return self.attention.index is not None

    @property
    def index_rope(self) -> RopeConfig:
        """Rotary embedding of an index: it rotates as many numbers as of a head."""
        mixer = self.attention
        share = self.rope.rotated(mixer.head_dim) / mixer.index.dim
        return replace(
            self.rope, parameters={**self.rope.parameters, "partial_rotary_factor": share}
        )

    def rope_of(self, mixer: Attention) -> RopeConfig | None:
        """Return the rotary embedding of a mixer, None if it does not rotate."""
        if not mixer.rotated:
            return None
        return self.window_rope if mixer.window_rope else self.rope

    def rotation_of(self, mixer: Mixer) -> RotationKind | None:
        """Return what tells apart layers that need other cosines and sines, None for layers that
        need none.
        """
        return (self.rope_of(mixer), mixer.head_dim) if isinstance(mixer, Attention) else None

    @property
    def index_rotation(self) -> RotationKind | None:
        """Likewise, of an index of keys, None without one."""
        return (self.index_rope, self.attention.index.dim) if self.attention.index else None

    @cached_property
    def rotations(self) -> tuple[RotationKind, ...]:
        """The different kinds of cosines and sines that the layers need."""
        kinds = [self.rotation_of(spec.mixer) for spec in self.distinct_layers]
        kinds.append(self.index_rotation)
        return tuple(dict.fromkeys(kind for kind in kinds if kind))

    def _layers_of(self, keeps: Keeps) -> tuple[int, ...]:
        return tuple(i for i, spec in enumerate(self.layers) if spec.mixer.keeps is keeps)

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and output matrix."""
        return self.vocab if self.shared_vocab is None else self.shared_vocab

    @property
    def in_words(self) -> str:
        """The model's shape in words, which does not depend on the file format."""
        mixer, mlp = self.attention, next(spec.mlp for spec in self.layers[::-1] if spec.mlp.width)
        return (
            f"{len(self.layers)} layers of {self.hidden} and {mlp.in_words}, {mixer.heads} heads "
            f"over {mixer.kv_heads} of {mixer.head_dim}, vocabulary of {self.vocab}"
        )

    @property
    def positions(self) -> int:
        """Longest context, derived as in vLLM: rope scaling multiplies the trained positions.

        Models with another rotary embedding for windows (Gemma 3) declare the product.
        """
        if self.window_rope is not None:
            return self.trained_positions
        factor = self.rope.parameters.get("factor", 1.0)
        if self.rope.type in ("linear", "dynamic"):
            return int(self.trained_positions * factor)
        if self.rope.type == "yarn":
            original = self.rope.parameters["original_max_position_embeddings"]
            return max(self.trained_positions, int(original * factor))
        return self.trained_positions
