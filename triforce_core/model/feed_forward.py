"""Specifications of MLPs: dense ones, and mixtures of experts. Their computation is in `mlps`.

The base class of all specifications is here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import ClassVar

from triforce_offload.errors import CheckpointError

# Shapes of a layer's tensors by name, in the order in which they are used.
Shapes = dict[str, tuple[int, ...]]
# Tensors in which the matrices of all experts stand one above the other.
EXPERT_PARTS = ("experts_gate_up", "experts_down")
# All tensors of the experts, which may be elsewhere than the rest of their layer.
EXPERT_TENSORS = frozenset(
    (*EXPERT_PARTS, "experts_gate_bias", "experts_up_bias", "experts_down_bias")
)


class Described:
    """A frozen dataclass whose repr leaves out what newer versions added, while it has its default.

    The repr is a part of the identity of a checkpoint, and so of contexts that older versions
    saved. Fields are newer if their name is in `_NEWER`.
    """

    _NEWER: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.repr
            if field.name not in self._NEWER or getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


class Activation(Enum):
    """Activations of an MLP's gate, by their names in config.json files."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    # Of gpt-oss, which calls it "silu" too: clamped, and the up projection is increased by 1.
    CLAMPED = "clamped"
    # The square of what is above 0, of an up projection without a gate.
    RELU2 = "relu2"

    @property
    def gated(self) -> bool:
        """Whether it is of a gate, which multiplies the up projection."""
        return self is not Activation.RELU2

    @property
    def projections(self) -> int:
        """Number of projections that an MLP has before it: gate and up, or up alone."""
        return 1 + self.gated


@dataclass(frozen=True, repr=False)
class DenseMLP(Described):
    """An MLP over every token, usually a gated one (Shazeer, 2020).

    width: number of columns of the gate, and of the up projection
    activation: what the gate goes through before it multiplies the up projection; without a gate,
        what the up projection goes through, which "gate_up" then is alone
    """

    _NEWER = frozenset({"activation"})

    width: int
    activation: Activation = Activation.SILU

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the MLP's tensors. hidden: width of the model"""
        rows = self.activation.projections * self.width
        return {"gate_up": (rows, hidden), "down": (hidden, self.width)}

    def products(self, hidden: int) -> Shapes:
        """Return the shapes of the matrices that a token is multiplied by, by tensor."""
        return self.shapes(hidden)

    @property
    def active(self) -> int:
        """How often a token is multiplied by a matrix of experts."""
        return 0

    @property
    def columns(self) -> int:
        """Number of columns that a token has in the MLP: of gates, and of up projections."""
        return self.width

    @property
    def in_words(self) -> str:
        return f"{self.width}"


@dataclass(frozen=True)
class NoMLP:
    """No MLP: the mixer of the next layer follows (Nemotron-H)."""

    width: ClassVar[int] = 0
    active: ClassVar[int] = 0
    columns: ClassVar[int] = 0
    activation: ClassVar[Activation] = Activation.SILU
    in_words: ClassVar[str] = "no MLP"

    def shapes(self, hidden: int) -> Shapes:
        """DenseMLP.shapes."""
        return {}

    def products(self, hidden: int) -> Shapes:
        """DenseMLP.products."""
        return {}


class Scores(Enum):
    """What the products of a router go through."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Router:
    """How a token chooses its experts. Everything is computed in float32.

    The softmax of the chosen products alone (Granite, gpt-oss) is the same as one of all products,
    normalised.

    scores: what the products go through
    normalised: whether the scores of the chosen experts are divided by their sum
    biased: whether a bias is added to the scores for the choice alone (Wang et al., 2024)
    linear_bias: whether a bias is added to the products
    scale: factor of the scores of the chosen experts
    groups: number of groups of neighbouring experts
    chosen_groups: number of groups that experts are chosen from: those with the greatest sums of
        two scores (DeepSeek-V3, 2024)
    """

    scores: Scores = Scores.SOFTMAX
    normalised: bool = True
    biased: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    linear_bias: bool = False


@dataclass(frozen=True, repr=False)
class Experts(Described):
    """A mixture of experts (Shazeer et al., 2017): of `count` MLPs, a router chooses `active` for
    each token, whose outputs are summed with its weights.

    The matrices of all experts stand one above the other: "experts_gate_up" has the gate and the up
    projection of the first one, then those of the second, ... Activations without a gate have up
    projections alone, as in `DenseMLP`.

    width: number of columns of each expert
    shared: number of columns of the expert that every token goes through, 0 for none
    gated_shared: whether its output is multiplied by the sigmoid of a gate
    biases: whether the projections of experts have biases
    output_bias: whether down projections have theirs; of several ranks, only one has it
    latent: length of the vectors that experts take and return, which "latent_down" makes of hidden
        states and "latent_up" makes hidden states of (LatentMoE, Nemotron 3, 2025); 0 if these are
        hidden states
    """

    _NEWER = frozenset({"latent"})

    count: int
    active: int
    width: int
    router: Router = field(default_factory=Router)
    shared: int = 0
    gated_shared: bool = False
    activation: Activation = Activation.SILU
    biases: bool = False
    output_bias: bool = field(default=True, repr=False)
    latent: int = 0

    def __post_init__(self) -> None:
        """Raise CheckpointError if the numbers of experts or groups are impossible."""
        router = self.router
        if self.active > self.count:
            raise CheckpointError(f"{self.active} of {self.count} experts cannot be chosen")
        if self.count % router.groups or router.chosen_groups > router.groups:
            raise CheckpointError(
                f"{router.chosen_groups} of {router.groups} groups of {self.count} experts cannot "
                "be chosen"
            )
        if self.active > self.count // router.groups * router.chosen_groups:
            raise CheckpointError(
                f"{self.active} experts cannot be chosen of {router.chosen_groups} groups of "
                f"{self.count // router.groups}"
            )

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the MLP's tensors. hidden: width of the model"""
        shapes: Shapes = {"router": (self.count, hidden)}
        if self.router.biased:
            shapes["router_bias"] = (self.count,)
        inner = self.inner(hidden)
        if self.latent:
            shapes["latent_down"] = (inner, hidden)
        shapes["experts_gate_up"] = (self.count * self.rows, inner)
        shapes["experts_down"] = (self.count * inner, self.width)
        if self.latent:
            shapes["latent_up"] = (hidden, inner)
        if self.router.linear_bias:
            shapes["router_linear_bias"] = (self.count,)
        if self.biases:
            shapes["experts_gate_bias"] = (self.count, self.width)
            shapes["experts_up_bias"] = (self.count, self.width)
        if self.biases and self.output_bias:
            shapes["experts_down_bias"] = (self.count, inner)
        if self.shared:
            shapes |= DenseMLP(self.shared, self.activation).shapes(hidden)
        if self.gated_shared:
            shapes["shared_gate"] = (1, hidden)
        return shapes

    def products(self, hidden: int) -> Shapes:
        """DenseMLP.products, in which the tensors of the experts stand for one expert's."""
        inner = self.inner(hidden)
        return self.shapes(hidden) | {
            "experts_gate_up": (self.rows, inner),
            "experts_down": (inner, self.width),
        }

    def inner(self, hidden: int) -> int:
        """Return the length of the vectors that experts take. hidden: width of the model"""
        return self.latent or hidden

    @property
    def rows(self) -> int:
        """Number of rows that an expert has in "experts_gate_up"."""
        return self.activation.projections * self.width

    @property
    def columns(self) -> int:
        """DenseMLP.columns."""
        return self.active * self.width + self.shared

    @property
    def in_words(self) -> str:
        return f"{self.count} experts of {self.width}"

    def distinct(self, rows: int) -> float:
        """Return how many different experts `rows` tokens choose on average, if each chooses
        independently: an upper bound, since neighbouring tokens choose alike.
        """
        return self.count * (1 - (1 - self.active / self.count) ** rows)


@dataclass(frozen=True, repr=False)
class ExpertsBeside(Experts):
    """Experts beside a dense MLP of `shared` columns (Gemma 4): both have a norm of their own after
    them, and the experts one before. The router has a norm too, whose weights are "router_scale",
    and the weights of experts are multiplied by "expert_scale".
    """

    def shapes(self, hidden: int) -> Shapes:
        """DenseMLP.shapes."""
        return super().shapes(hidden) | {
            "router_scale": (hidden,),
            "expert_scale": (self.count,),
            "experts_norm": (hidden,),
            "experts_out_norm": (hidden,),
            "dense_out_norm": (hidden,),
        }


MLP = DenseMLP | Experts | NoMLP
