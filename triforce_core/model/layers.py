"""Specifications of layers: the mixer, the MLP, and the shapes of their tensors.

No tensors are created here. Each kind of mixer is a class in this module, and its computation is in
`mixers`; for MLPs these are `feed_forward` and `mlps`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from triforce_core.model.feed_forward import MLP, Described, Shapes
from triforce_core.model.heads.joins import Join
from triforce_core.model.parts.recurrent import DeltaNet, Mamba2, ShortConv
from triforce_core.model.parts.specs import Indexer, Keeps, NGrams, PerLayerInputs, Streams
from triforce_offload.errors import CheckpointError

_MAX_HEAD_DIM = 1024


class HeadGate(Enum):
    """The function of a head's gate."""

    SOFTPLUS = "softplus"
    SIGMOID = "sigmoid"

    def __repr__(self) -> str:
        """The first was the only one, and `head_gate` was True: a repr is a part of the identity of
        saved contexts.
        """
        return str(self is HeadGate.SOFTPLUS or self.value)


@dataclass(frozen=True, repr=False)
class Attention(Described):
    """Attention: each token attends to itself and to the tokens before it, all or the last ones.

    heads: number of query heads
    kv_heads: number of key-value heads; a group of query heads shares each
    head_dim: size of a head
    qkv_bias: whether queries, keys and values have a bias
    output_bias: whether the output has a bias
    qk_norm: whether queries and keys are normalised
    norm_over_heads: whether that norm is one over all heads, not one for each head
    rotated: whether queries and keys are rotated by their positions
    scale: factor of the scores; None for head_dim ** -0.5
    window: number of tokens that a token attends to, itself included; None for all
    window_rope: whether it rotates as `ModelConfig.window_rope` says
    value_norm: whether values are normalised, by a norm without weights
    projects_values: whether values have a projection of their own; else they are the keys as
        projected
    projects_keys: whether there are keys and values; else they are those of another layer, or of a
        layer of another model
    output_gate: whether the output is multiplied by the sigmoid of a gate, which is projected with
        the queries: in "qkv" the gate of each head follows its query
    head_gate: by which function of a number the output of each head is multiplied, None for none;
        the numbers are projected too: in "qkv" those of all heads come last
    sinks: whether the softmax of each head has one more column, without a value
    score_cap: scores x become score_cap * tanh(x / score_cap); None for no cap
    index: by which a token chooses what it attends to; None if it attends to all. In "qkv" its rows
        come last
    shares_kv: whether later layers use its keys and values: those with a window if it has one, and
        those without if it has none
    reuses_kv: whether it uses the keys and values of an earlier layer. Caches keep these once more
    """

    _NEWER = frozenset(
        {
            *("norm_over_heads", "rotated", "scale", "window", "window_rope"),
            *("value_norm", "projects_values", "output_gate", "head_gate", "sinks", "score_cap"),
            *("index", "projects_keys", "shares_kv", "reuses_kv"),
        }
    )

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norm_over_heads: bool = False
    rotated: bool = True
    scale: float | None = None
    window: int | None = None
    window_rope: bool = False
    value_norm: bool = False
    projects_values: bool = True
    projects_keys: bool = True
    output_gate: bool = False
    head_gate: HeadGate | None = None
    sinks: bool = False
    score_cap: float | None = None
    index: Indexer | None = None
    shares_kv: bool = False
    reuses_kv: bool = False

    def __post_init__(self) -> None:
        """Raise CheckpointError if the numbers of heads or their size are impossible."""
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads"
            )
        if self.head_dim % 2 or self.head_dim > _MAX_HEAD_DIM:
            raise CheckpointError(
                f"head_dim {self.head_dim} is not an even number up to {_MAX_HEAD_DIM}"
            )

    @property
    def keeps(self) -> Keeps:
        return Keeps.KV if self.window is None else Keeps.WINDOW

    @property
    def sides(self) -> int:
        """Vectors that a token keeps for each key-value head: its key and its value."""
        return 2

    @property
    def kept(self) -> int:
        """Number of columns that a token keeps."""
        return self.sides * self.keys

    @property
    def queries(self) -> int:
        """Number of columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Number of columns of all key heads; all value heads have as many."""
        return self.kv_heads * self.head_dim

    @property
    def projections(self) -> int:
        """How many of queries, keys and values have a projection: the first ones."""
        return 1 + (1 + self.projects_values if self.projects_keys else 0)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the mixer's tensors. hidden: width of the model"""
        qkv = self.queries * (1 + self.output_gate) + self.keys * (self.projections - 1)
        qkv += self.heads if self.head_gate else 0
        qkv += self.index.rows if self.index else 0
        shapes: Shapes = {"qkv": (qkv, hidden)}
        if self.qkv_bias:
            shapes["qkv_bias"] = (qkv,)
        if self.qk_norm:
            whole = self.norm_over_heads
            shapes["q_norm"] = (self.queries if whole else self.head_dim,)
            if self.projects_keys:
                shapes["k_norm"] = (self.keys if whole else self.head_dim,)
        if self.index:
            shapes |= {"index_q_norm": (self.index.dim,), "index_k_norm": (self.index.dim,)}
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        shapes["o"] = (hidden, self.queries)
        if self.output_bias:
            shapes["o_bias"] = (hidden,)
        return shapes


@dataclass(frozen=True, repr=False)
class LatentAttention(Attention):
    """Latent attention (MLA; DeepSeek-V2, 2024): a token keeps one vector for all heads, of
    `latent` numbers, which are its value, and of others that are rotated. All of them are its key.

    "k_up" projects a head's query into the space of these vectors, and "v_up" what it attended to
    into that of its output; both have the matrices of all heads, one above the other. `kv_heads` is
    1, and `head_dim` is the size of the vector.

    latent: size of the value
    key_dim: size of a head's query without what is rotated
    value_dim: size of a head's output
    query_rank: columns that hidden states have before "q_up" projects them to queries; 0 without
    """

    latent: int = 0
    key_dim: int = 0
    value_dim: int = 0
    query_rank: int = 0

    @property
    def sides(self) -> int:
        """Attention.sides."""
        return 1

    @property
    def rope_dim(self) -> int:
        """How many numbers of a vector are rotated."""
        return self.head_dim - self.latent

    def shapes(self, hidden: int) -> Shapes:
        """Attention.shapes."""
        queries = self.heads * (self.key_dim + self.rope_dim)
        shapes: Shapes = {"qkv": ((self.query_rank or queries) + self.head_dim, hidden)}
        if self.query_rank:
            shapes |= {"q_norm": (self.query_rank,), "q_up": (queries, self.query_rank)}
        return shapes | {
            "k_norm": (self.latent,),
            "k_up": (self.heads * self.latent, self.key_dim),
            "v_up": (self.heads * self.value_dim, self.latent),
            "o": (hidden, self.heads * self.value_dim),
        }


# Mixers that keep a state instead of the KV of tokens.
Recurrent = DeltaNet | Mamba2 | ShortConv
Mixer = Attention | Recurrent
# Small tensors that are kept in float32, whatever the dtype and the format of the others.
FLOAT32_PARTS = frozenset(
    {
        *("decay", "decay_bias", "skip", "router", "router_bias", "shared_gate"),
        *("router_scale", "expert_scale", "sinks"),
        *("router_linear_bias", "experts_gate_bias", "experts_up_bias", "experts_down_bias"),
    }
)


class Norms(Enum):
    """Where a layer has norms: before the mixer and before the MLP, after each, or both."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"

    @property
    def before(self) -> bool:
        return self is not Norms.AFTER

    @property
    def after(self) -> bool:
        return self is not Norms.BEFORE


class NormKind(Enum):
    """How norms are computed: RMS norms whose factors are the weights, the same with the product in
    float32, with factors of 1 + the weights, or layer norms without a bias.
    """

    RMS = "rms"
    RMS_FLOAT32 = "rms_float32"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


@dataclass(frozen=True, repr=False)
class LayerSpec(Described):
    """A layer: a mixer and an MLP, each with norms and a residual connection.

    norms: where the norms are
    residual_scale: factor of what the mixer and the MLP add to the hidden states
    parallel: whether the MLP has the same input and norm as the mixer, and does not follow it
    output_scale: whether the hidden states after the layer are multiplied by a number of its own
    joins: how it joins tokens with hidden states of another model, if the layer is a head
    streams: the residual streams, if there are several, in place of norms
    ngrams: embeddings that are added before the mixer, or None
    per_layer_inputs: the per-layer embeddings, which are added after the MLP, or None
    """

    _NEWER = frozenset(
        {
            *("norms", "residual_scale", "parallel", "output_scale", "joins", "streams", "ngrams"),
            "per_layer_inputs",
        }
    )

    mixer: Mixer
    mlp: MLP
    norms: Norms = Norms.BEFORE
    residual_scale: float = 1.0
    parallel: bool = False
    output_scale: bool = False
    joins: Join | None = None
    streams: Streams | None = None
    ngrams: NGrams | None = None
    per_layer_inputs: PerLayerInputs | None = None

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the layer's tensors, in the order in which they are used.

        hidden: width of the model
        """
        before = (hidden,) if self.norms.before and not self.streams else None
        after = (hidden,) if self.norms.after else None
        around = {part: {} for part in ("mixer", "mlp")}
        if self.streams:
            around = {part: self.streams.shapes(hidden, part) for part in around}
        shapes = {
            **(self.ngrams.shapes(hidden) if self.ngrams else {}),
            **around["mixer"],
            "input_norm": before,
            **self.mixer.shapes(hidden),
            "mixer_norm": after,
            "post_norm": None if self.parallel or not self.mlp.width else before,
            **around["mlp"],
            **self.mlp.shapes(hidden),
            "mlp_norm": after if self.mlp.width else None,
            **(self.per_layer_inputs.shapes(hidden) if self.per_layer_inputs else {}),
            "output_scale": (1,) if self.output_scale else None,
        }
        found = {name: shape for name, shape in shapes.items() if shape is not None}
        return self.joins.of_layer(found, hidden) if self.joins else found

    def products(self, hidden: int) -> Shapes:
        """Return the shapes of the matrices that a token is multiplied by, by tensor: of experts
        that of one, which a token is multiplied by `mlp.active` times.
        """
        shapes = self.shapes(hidden) | self.mlp.products(hidden)
        return {name: shape for name, shape in shapes.items() if len(shape) == 2}
