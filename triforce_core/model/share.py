"""One rank's share of a model: heads, MLP columns and vocabulary rows. No tensors are created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import Attention, LayerSpec
from triforce_kernels.weights.block_types import BlockType
from triforce_offload.errors import UsageError

# Columns of the MLP are divided in multiples of this, so that groups of an int4 copy stay whole.
_UNIT = 64

# Maps a tensor's name to its pieces: the rows of each, and the block type it is stored in or None.
Pieces = Callable[[str], Sequence[tuple[int, BlockType | None]]]


class Window(NamedTuple):
    """Rows and columns of a stored tensor; None for all."""

    rows: range | None = None
    columns: range | None = None


class Heads(NamedTuple):
    """Query heads and key-value heads of each rank. Every query head is on one rank, together with
    its key-value head. If there are fewer key-value heads than ranks, several ranks have the same
    one.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]

    @classmethod
    def divided(cls, mixer: Attention, ranks: int) -> Heads:
        """Divide the heads of a mixer evenly; the first ranks get more. Raises UsageError if a rank
        would get nothing.
        """
        group = mixer.heads // mixer.kv_heads
        if ranks <= mixer.kv_heads:
            keys = spread(mixer.kv_heads, ranks)
            return cls(tuple(range(kv.start * group, kv.stop * group) for kv in keys), tuple(keys))
        queries, keys = [], []
        # Heads with fewer ranks come first.
        for kv, sharing in enumerate(reversed(spread(ranks, mixer.kv_heads))):
            if len(sharing) > group:
                raise UsageError(
                    f"{mixer.heads} attention heads over {mixer.kv_heads} key-value heads do not "
                    f"spread over {ranks} GPUs: {len(sharing)} of them would share {group}"
                )
            keys += [range(kv, kv + 1)] * len(sharing)
            first = kv * group
            parts = spread(group, len(sharing))
            queries += [range(first + part.start, first + part.stop) for part in parts]
        return cls(tuple(queries), tuple(keys))


@dataclass(frozen=True)
class Share:
    """The part of a model that one rank has (tensor parallelism; Megatron-LM, Shoeybi et al.,
    2019).

    whole: config of the whole model
    full, windowed: the heads of each rank in full-attention layers, and in layers with a window
    mlp: the MLP columns of each rank
    vocab: the vocabulary rows of each rank
    """

    whole: ModelConfig
    rank: int
    full: Heads
    windowed: Heads
    mlp: tuple[range, ...]
    vocab: tuple[range, ...]

    @classmethod
    def of(cls, config: ModelConfig, rank: int, ranks: int, unit: int = _UNIT) -> Share:
        """Divide a model over ranks, and return the share of `rank`.

        Numbers that do not divide evenly are spread unevenly; the first ranks get more.

        unit: multiples in which MLP columns are divided, if there are enough columns
        Raises UsageError if a rank would get nothing.
        """
        mlp_width = config.layers[0].mlp.width
        uneven = ranks > config.attention.kv_heads and ranks % config.attention.kv_heads
        if uneven and config.attention.norm_over_heads:
            raise UsageError(
                f"{config.family} models have a norm over all heads, and {ranks} GPUs would have "
                f"some of {config.attention.kv_heads} key-value heads more often than others"
            )
        full = Heads.divided(config.attention, ranks)
        windowed = Heads.divided(config.windowed, ranks) if config.windowed else full
        if min(mlp_width, config.vocab) < ranks:
            raise UsageError(
                f"an MLP of {mlp_width} columns and a vocabulary of {config.vocab} do not spread "
                f"over {ranks} GPUs"
            )
        while -(-mlp_width // unit) < ranks:
            unit //= 2
        units = spread(-(-mlp_width // unit), ranks)
        mlp = [range(part.start * unit, min(part.stop * unit, mlp_width)) for part in units]
        return cls(config, rank, full, windowed, tuple(mlp), tuple(spread(config.vocab, ranks)))

    @property
    def ranks(self) -> int:
        return len(self.mlp)

    @property
    def config(self) -> ModelConfig:
        """Config of the model with only this share's heads, columns and rows."""
        layers = tuple(map(self._layer, self.whole.layers))
        return replace(self.whole, layers=layers, shared_vocab=len(self.vocab[self.rank]))

    def _layer(self, whole: LayerSpec) -> LayerSpec:
        rank, heads = self.rank, self._heads(whole.mixer)
        mixer = replace(
            whole.mixer,
            heads=len(heads.queries[rank]),
            kv_heads=len(heads.keys[rank]),
            # Only one rank adds the bias, before the sum over ranks.
            output_bias=whole.mixer.output_bias and rank == 0,
        )
        return replace(whole, mixer=mixer, mlp=replace(whole.mlp, width=len(self.mlp[rank])))

    def _heads(self, mixer: Attention) -> Heads:
        return self.full if mixer.window is None else self.windowed

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of vocabulary rows of each rank."""
        return tuple(len(part) for part in self.vocab)

    def of_machine(self, local: int, here: int) -> float:
        """Return this rank's share of the memory of a machine with `here` ranks, from 0 to 1.

        The share is proportional to the key-value heads, as most of the memory is.

        local: index of this rank on its machine
        """
        first = self.rank - local
        sizes = [len(kv) for kv in self.full.keys[first : first + here]]
        return sizes[local] / sum(sizes)

    def windows(self, name: str) -> list[Window]:
        """Return the window of each piece of a tensor that is in the share.

        name: `embedding`, `head` or `layers.N.PART`
        """
        *layer, part = name.split(".")
        rank = self.rank
        if not layer:
            return [Window(self.vocab[rank])] if part in ("embedding", "head") else [Window()]
        mixer = self.whole.layers[int(layer[1])].mixer
        queries, keys = (
            range(own[rank].start * mixer.head_dim, own[rank].stop * mixer.head_dim)
            for own in self._heads(mixer)
        )
        if part in ("qkv", "qkv_bias"):
            return [Window(queries), Window(keys), Window(keys)][: 2 + mixer.projects_values]
        if part == "gate_up":
            return [Window(self.mlp[rank])] * 2
        if mixer.norm_over_heads and part in ("q_norm", "k_norm"):
            return [Window(queries if part == "q_norm" else keys)]
        columns = {"o": queries, "down": self.mlp[rank]}
        return [Window(None, columns.get(part))]

    def pieces(self, pieces: Pieces) -> Pieces:
        """Return the share's part of a model's pieces. If its columns would cut blocks in two, the
        piece counts as dense.
        """

        def shared(name: str) -> list[tuple[int, BlockType | None]]:
            found = []
            for (rows, kind), window in zip(pieces(name), self.windows(name), strict=True):
                if window.rows is not None:
                    rows = len(window.rows)
                if kind and window.columns is not None and not _whole_blocks(window.columns, kind):
                    kind = None
                found.append((rows, kind))
            return found

        return shared


def spread(count: int, over: int) -> list[range]:
    """Divide `count` items into `over` ranges that are as even as possible, larger ones first."""
    each, more = divmod(count, over)
    ends = [(i + 1) * each + min(i + 1, more) for i in range(over)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def mlp_unit(config: ModelConfig, pieces: Pieces) -> int:
    """Return the unit in which a model's MLP columns are divided: whole blocks of their type."""
    kinds = {kind for i in range(len(config.layers)) for _, kind in pieces(f"layers.{i}.down")}
    return max([_UNIT, *(kind.elements for kind in kinds if kind)])


def _whole_blocks(columns: range, kind: BlockType) -> bool:
    return not columns.start % kind.elements and not columns.stop % kind.elements
