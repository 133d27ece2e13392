"""How a model's mixers, with one class for each kind, and its MLPs are divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

from triforce_core.model.feed_forward import MLP, Experts
from triforce_core.model.layers import Attention, LatentAttention, Mixer
from triforce_core.model.parts.recurrent import DeltaNet, Mamba2, ShortConv
from triforce_offload.errors import UsageError


class Window(NamedTuple):
    """Rows and columns of a piece of a stored tensor; None for all. Columns may be several ranges,
    which do not follow one another.

    matrices: number of matrices whose rows alternate in the piece; `rows` are those of each
    """

    rows: range | None = None
    columns: range | tuple[range, ...] | None = None
    matrices: int = 1

    def height(self, whole: int) -> int:
        """Return how many rows of the piece, which has `whole`, are in the window."""
        return whole if self.rows is None else self.matrices * len(self.rows)


_NOTHING = Window(range(0))


class Heads(NamedTuple):
    """Query heads and key-value heads of each rank. Every query head is on one rank, together with
    its key-value head. If there are fewer key-value heads than ranks, several ranks have the same
    one.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]

    @classmethod
    def divided(cls, heads: int, kv_heads: int, ranks: int) -> Heads:
        """Divide `heads` heads, of which a group shares each of `kv_heads`, evenly; the first ranks
        get more. Raises UsageError if a rank would get nothing.
        """
        group = heads // kv_heads
        if ranks <= kv_heads:
            keys = spread(kv_heads, ranks)
            return cls(tuple(range(kv.start * group, kv.stop * group) for kv in keys), tuple(keys))
        queries, keys = [], []
        # Heads with fewer ranks come first.
        for kv, sharing in enumerate(reversed(spread(ranks, kv_heads))):
            if len(sharing) > group:
                raise UsageError(
                    f"{heads} attention heads over {kv_heads} key-value heads do not "
                    f"spread over {ranks} GPUs: {len(sharing)} of them would share {group}"
                )
            keys += [range(kv, kv + 1)] * len(sharing)
            first = kv * group
            parts = spread(group, len(sharing))
            queries += [range(first + part.start, first + part.stop) for part in parts]
        return cls(tuple(queries), tuple(keys))


class Divided(Protocol):
    """A mixer that ranks share.

    heads: the heads of each rank
    """

    heads: Heads

    def mixer(self, rank: int) -> Mixer:
        """Return a rank's part of the mixer."""

    def windows(self, part: str, rank: int, pieces: int) -> list[Window]:
        """Return the window that a rank has of each of the pieces of a tensor."""


@dataclass(frozen=True)
class DividedAttention:
    """Attention, divided by heads."""

    whole: Attention
    heads: Heads

    def mixer(self, rank: int) -> Attention:
        """Divided.mixer."""
        return replace(
            self.whole,
            heads=len(self.heads.queries[rank]),
            kv_heads=len(self.heads.keys[rank]),
            # Only one rank adds the bias, before the sum over ranks.
            output_bias=self.whole.output_bias and rank == 0,
        )

    def windows(self, part: str, rank: int, pieces: int) -> list[Window]:
        """Divided.windows."""
        whole = self.whole
        queries, keys = (_columns(own[rank], whole.head_dim) for own in self.heads)
        if part in ("qkv", "qkv_bias"):
            if pieces > whole.projections + bool(whole.head_gate):
                # One piece of the queries of each head and one of its gates, by turns.
                own = self.heads.queries[rank]
                parts = [None if head in own else range(0) for head in range(whole.heads)]
                first = [Window(rows) for rows in parts for _ in range(2)]
                return [*first, Window(keys), Window(keys)]
            first = queries
            if whole.output_gate:
                first = _columns(self.heads.queries[rank], 2 * whole.head_dim)
            found = [Window(first), Window(keys), Window(keys)][: whole.projections]
            return [*found, Window(self.heads.queries[rank])] if whole.head_gate else found
        if part == "sinks":
            return [Window(self.heads.queries[rank])]
        if whole.norm_over_heads and part in ("q_norm", "k_norm"):
            return [Window(queries if part == "q_norm" else keys)]
        return [Window(None, queries if part == "o" else None)]


@dataclass(frozen=True)
class DividedLatent:
    """Latent attention, divided by query heads. Every rank keeps the latent vectors of all
    tokens.
    """

    whole: LatentAttention
    heads: Heads

    def mixer(self, rank: int) -> LatentAttention:
        """Divided.mixer."""
        return replace(self.whole, heads=len(self.heads.queries[rank]))

    def windows(self, part: str, rank: int, pieces: int) -> list[Window]:
        """Divided.windows."""
        whole, own = self.whole, self.heads.queries[rank]
        queries = Window(_columns(own, whole.key_dim + whole.rope_dim))
        match part:
            case "qkv":
                first = Window() if whole.query_rank else queries
                return [first, *[Window()] * (pieces - 1)]
            case "q_up":
                return [queries]
            case "k_up" if pieces > 1:
                return [Window() if head in own else _NOTHING for head in range(whole.heads)]
            case "k_up":
                return [Window(_columns(own, whole.latent))]
            case "v_up":
                return [Window(_columns(own, whole.value_dim))]
            case "o":
                return [Window(None, _columns(own, whole.value_dim))]
            case _:
                return [Window()]


@dataclass(frozen=True)
class _DividedLinearAttention:
    """Linear attention, divided by heads: value heads as `queries`, and their key heads."""

    whole: DeltaNet | Mamba2
    heads: Heads

    def mixer(self, rank: int) -> Mixer:
        """Divided.mixer."""
        values, keys = (len(own[rank]) for own in self.heads)
        return replace(self.whole, key_heads=keys, value_heads=values)

    def windows(self, part: str, rank: int, pieces: int) -> list[Window]:
        """Divided.windows."""
        own, values = self.heads.queries[rank], self._values(rank)
        keys = _columns(self.heads.keys[rank], self.whole.key_dim)
        channels = [Window(keys), Window(keys), Window(values)]
        match part:
            case "qkv":
                return [*channels, Window(values), *self._gates(own)]
            case "conv" | "conv_bias":
                return channels
            case "decay" | "decay_bias" | "skip":
                return [Window(own)]
            case "o":
                return [Window(None, self._columns(rank))]
            case _:
                return [Window(None)]

    def _values(self, rank: int) -> range:
        return _columns(self.heads.queries[rank], self.whole.value_dim)

    def _gates(self, own: range) -> list[Window]:
        """Return the windows of the last pieces of "qkv", which have a row for each value head."""
        return [Window(own)]

    def _columns(self, rank: int) -> range | tuple[range, ...]:
        """Return the columns of "o" that belong to a rank's value heads."""
        return self._values(rank)


class DividedDeltaNet(_DividedLinearAttention):
    """Gated DeltaNet, divided by heads."""

    whole: DeltaNet

    def _gates(self, own: range) -> list[Window]:
        return [Window(own), Window(own)]

    def _columns(self, rank: int) -> range | tuple[range, ...]:
        whole, own, keys = self.whole, self.heads.queries[rank], self.heads.keys[rank]
        if not whole.tiled_output:
            return self._values(rank)
        # Of each key head the first value heads come first, then the second ones, ...
        first = own.start % (whole.value_heads // whole.key_heads)
        starts = [(first + each) * whole.key_heads for each in range(len(own) // len(keys))]
        return tuple(
            _columns(range(start + keys.start, start + keys.stop), whole.value_dim)
            for start in starts
        )


class DividedMamba2(_DividedLinearAttention):
    """Mamba-2, divided by groups; a single group is divided by its heads. `heads.queries` are the
    value heads, and `heads.keys` the groups, each of which has a norm.
    """

    whole: Mamba2

    def mixer(self, rank: int) -> Mixer:
        """Divided.mixer."""
        mixer = super().mixer(rank)
        return replace(mixer, divided_group=len(self.heads.keys) > self.whole.key_heads)

    def windows(self, part: str, rank: int, pieces: int) -> list[Window]:
        """Divided.windows."""
        if part == "head_norm":
            return [Window(self._values(rank))]
        return super().windows(part, rank, pieces)


@dataclass(frozen=True)
class DividedShortConv:
    """A short convolution, divided by channels, each of which counts as a head."""

    whole: ShortConv
    heads: Heads

    def mixer(self, rank: int) -> ShortConv:
        """Divided.mixer. Every rank would add the output's bias, so models with one are refused."""
        return replace(self.whole, channels=len(self.heads.keys[rank]))

    def windows(self, part: str, rank: int, pieces: int) -> list[Window]:
        """Divided.windows."""
        own = self.heads.keys[rank]
        if part in ("qkv", "qkv_bias"):
            return [Window(own)] * 3
        if part in ("conv", "conv_bias"):
            return [Window(own)]
        return [Window(None, own if part == "o" else None)]


@cache
def divided(mixer: Mixer, ranks: int) -> Divided:
    """Divide a mixer over ranks. Raises UsageError if a rank would get nothing."""
    match mixer:
        case LatentAttention():
            return DividedLatent(mixer, Heads.divided(mixer.heads, 1, ranks))
        case Attention():
            if mixer.index and ranks > 1:
                raise UsageError(
                    f"layers whose tokens choose their keys do not spread over {ranks} GPUs yet"
                )
            return DividedAttention(mixer, Heads.divided(mixer.heads, mixer.kv_heads, ranks))
        case DeltaNet():
            heads = Heads.divided(mixer.value_heads, mixer.key_heads, ranks)
            return DividedDeltaNet(mixer, heads)
        case Mamba2():
            if 1 < mixer.key_heads < ranks:
                raise UsageError(
                    f"Mamba-2 layers with {mixer.key_heads} groups of heads do not spread over "
                    f"{ranks} GPUs"
                )
            heads = Heads.divided(mixer.value_heads, mixer.key_heads, ranks)
            return DividedMamba2(mixer, heads)
        case ShortConv():
            if mixer.bias and ranks > 1:
                raise UsageError(f"convolutions with a bias do not spread over {ranks} GPUs")
            return DividedShortConv(mixer, Heads.divided(mixer.channels, mixer.channels, ranks))


def mlp_share(mlp: MLP, columns: Callable[[int], range], rank: int) -> MLP:
    """Return a rank's part of an MLP: some columns of each expert, and the whole router.

    columns: returns the rank's columns of an MLP of some width
    """
    if not mlp.width:
        return mlp
    own = replace(mlp, width=len(columns(mlp.width)))
    if isinstance(mlp, Experts):
        # Only one rank adds the biases of outputs, before the sum over ranks.
        shared = len(columns(mlp.shared)) if mlp.shared else 0
        return replace(own, shared=shared, output_bias=rank == 0)
    return own


def mlp_windows(mlp: MLP, part: str, columns: Callable[[int], range], pieces: int) -> list[Window]:
    """Return the window that a rank has of each of the pieces of a tensor of an MLP. See
    `mlp_share`.
    """
    if isinstance(mlp, Experts):
        own = columns(mlp.width)
        if part == "experts_gate_up":
            # One piece may have the gate and the up projection of an expert.
            return [Window(own, None, mlp.activation.projections * mlp.count // pieces)] * pieces
        if part in ("experts_down", "experts_gate_bias", "experts_up_bias"):
            return [Window(None, own)] * pieces
    dense = mlp.shared if isinstance(mlp, Experts) else mlp.width
    if part == "gate_up":
        return [Window(columns(dense))] * mlp.activation.projections
    return [Window(None, columns(dense) if part == "down" else None)]


def spread(count: int, over: int) -> list[range]:
    """Divide `count` items into `over` ranges that are as even as possible, larger ones first."""
    each, more = divmod(count, over)
    ends = [(i + 1) * each + min(i + 1, more) for i in range(over)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _columns(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)
