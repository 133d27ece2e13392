"""How a model's mixers, with one class for each kind, and its MLPs are divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

from triforce_core.model.feed_forward import MLP, Experts, ExpertsBeside
from triforce_core.model.layers import (
    Attention,
    DeltaNet,
    LatentAttention,
    Mamba2,
    Mixer,
    ShortConv,
)
from triforce_offload.errors import UsageError


class Window(NamedTuple):
    """Rows and columns of a stored tensor; None for all. Columns may be several ranges, which do
    not follow one another.
    """

    rows: range | None = None
    columns: range | tuple[range, ...] | None = None


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

    def windows(self, part: str, rank: int) -> list[Window]:
        """Return the window of each piece of a tensor that a rank has."""


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

    def windows(self, part: str, rank: int) -> list[Window]:
        """Divided.windows."""
        whole = self.whole
        queries, keys = (_columns(own[rank], whole.head_dim) for own in self.heads)
        if part in ("qkv", "qkv_bias"):
            first = queries
            if whole.output_gate:
                first = _columns(self.heads.queries[rank], 2 * whole.head_dim)
            found = [Window(first), Window(keys), Window(keys)][: 2 + whole.projects_values]
            return [*found, Window(self.heads.queries[rank])] if whole.head_gate else found
        if part == "sinks":
            return [Window(self.heads.queries[rank])]
        if whole.norm_over_heads and part in ("q_norm", "k_norm"):
            return [Window(queries if part == "q_norm" else keys)]
        return [Window(None, queries if part == "o" else None)]


@dataclass(frozen=True)
class _DividedLinearAttention:
    """Linear attention, divided by heads: value heads as `queries`, and their key heads."""

    whole: DeltaNet | Mamba2
    heads: Heads

    def mixer(self, rank: int) -> Mixer:
        """Divided.mixer."""
        values, keys = (len(own[rank]) for own in self.heads)
        return replace(self.whole, key_heads=keys, value_heads=values)

    def windows(self, part: str, rank: int) -> list[Window]:
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
    """Mamba-2, divided by groups: their heads as `queries`. The norm is of groups, too."""

    whole: Mamba2

    def windows(self, part: str, rank: int) -> list[Window]:
        """Divided.windows."""
        if part == "head_norm":
            return [Window(self._values(rank))]
        return super().windows(part, rank)


@dataclass(frozen=True)
class DividedShortConv:
    """A short convolution, divided by channels, each of which counts as a head."""

    whole: ShortConv
    heads: Heads

    def mixer(self, rank: int) -> ShortConv:
        """Divided.mixer. Every rank would add the output's bias, so models with one are refused."""
        return replace(self.whole, channels=len(self.heads.keys[rank]))

    def windows(self, part: str, rank: int) -> list[Window]:
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
        case LatentAttention() if ranks > 1:
            raise UsageError(
                "models with latent attention run on one GPU only: all heads share the one vector "
                "that a token keeps, and vectors cannot be divided over GPUs yet"
            )
        case Attention():
            return DividedAttention(mixer, Heads.divided(mixer.heads, mixer.kv_heads, ranks))
        case DeltaNet():
            heads = Heads.divided(mixer.value_heads, mixer.key_heads, ranks)
            return DividedDeltaNet(mixer, heads)
        case Mamba2():
            if mixer.key_heads < ranks:
                # Of a group there is one norm, which would need its sums over ranks.
                raise UsageError(
                    f"Mamba-2 layers do not spread over {ranks} GPUs: groups of heads stay whole, "
                    f"and there are {mixer.key_heads}"
                )
            heads = Heads.divided(mixer.value_heads, mixer.key_heads, ranks)
            return DividedMamba2(mixer, heads)
        case ShortConv():
            if mixer.bias and ranks > 1:
                raise UsageError(f"convolutions with a bias do not spread over {ranks} GPUs")
            return DividedShortConv(mixer, Heads.divided(mixer.channels, mixer.channels, ranks))


def check_divides(mlp: MLP, ranks: int) -> None:
    """Raise UsageError for an MLP that ranks cannot share: norms of its parts would need their sums
    over ranks, or all would add its biases.
    """
    if ranks > 1 and isinstance(mlp, ExpertsBeside):
        raise UsageError(f"experts beside a dense MLP (Gemma 4) do not spread over {ranks} GPUs")
    if ranks > 1 and isinstance(mlp, Experts) and mlp.biases:
        raise UsageError(f"experts with biases (gpt-oss) do not spread over {ranks} GPUs")


def mlp_share(mlp: MLP, columns: Callable[[int], range]) -> MLP:
    """Return a rank's part of an MLP: some columns of each expert, and the whole router.

    columns: returns the rank's columns of an MLP of some width
    """
    if not mlp.width:
        return mlp
    own = replace(mlp, width=len(columns(mlp.width)))
    if isinstance(mlp, Experts) and mlp.shared:
        own = replace(own, shared=len(columns(mlp.shared)))
    return own


def mlp_windows(mlp: MLP, part: str, columns: Callable[[int], range]) -> list[Window]:
    """Return the window of each piece of a tensor of an MLP that a rank has. See `mlp_share`."""
    if isinstance(mlp, Experts):
        own = columns(mlp.width)
        if part == "experts_gate_up":
            return [Window(own)] * (mlp.activation.projections * mlp.count)
        if part == "experts_down":
            return [Window(None, own)] * mlp.count
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
