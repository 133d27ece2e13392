"""One rank's share of a model: heads, MLP columns and vocabulary rows. No tensors are created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import LayerSpec, Mixer
from triforce_core.model.sharing.divided import (
    Heads,
    Window,
    divided,
    mlp_share,
    mlp_windows,
    spread,
)
from triforce_kernels.weights.block_types import BlockType
from triforce_offload.errors import UsageError

# Columns of the MLP are divided in multiples of this, so that groups of a draft copy stay whole.
_UNIT = 64

# Maps a tensor's name to its pieces: the rows of each, and the block type it is stored in or None.
Pieces = Callable[[str], Sequence[tuple[int, BlockType | None]]]


@dataclass(frozen=True)
class Share:
    """The part of a model that one rank has (tensor parallelism; Megatron-LM, Shoeybi et al.,
    2019).

    whole: config of the whole model
    unit: multiples in which MLP columns are divided, if there are enough columns
    vocab: the vocabulary rows of each rank
    """

    whole: ModelConfig
    rank: int
    unit: int
    vocab: tuple[range, ...]

    @classmethod
    def of(cls, config: ModelConfig, rank: int, ranks: int, unit: int = _UNIT) -> Share:
        """Divide a model over ranks, and return the share of `rank`.

        Numbers that do not divide evenly are spread unevenly; the first ranks get more.

        Raises UsageError if a rank would get nothing.
        """
        uneven = ranks > config.attention.kv_heads and ranks % config.attention.kv_heads
        if uneven and config.attention.norm_over_heads:
            raise UsageError(
                f"{config.family} models have a norm over all heads, and {ranks} GPUs would have "
                f"some of {config.attention.kv_heads} key-value heads more often than others"
            )
        for spec in config.distinct_layers:
            divided(spec.mixer, ranks)
        narrowest = min(spec.mlp.width for spec in config.distinct_layers if spec.mlp.width)
        if min(narrowest, config.vocab) < ranks:
            raise UsageError(
                f"an MLP of {narrowest} columns and a vocabulary of {config.vocab} do not spread "
                f"over {ranks} GPUs"
            )
        return cls(config, rank, unit, tuple(spread(config.vocab, ranks)))

    @property
    def ranks(self) -> int:
        return len(self.vocab)

    def columns(self, width: int) -> range:
        """Return this rank's columns of an MLP, or of an expert."""
        unit = self.unit
        while -(-width // unit) < self.ranks:
            unit //= 2
        part = spread(-(-width // unit), self.ranks)[self.rank]
        return range(part.start * unit, min(part.stop * unit, width))

    @property
    def config(self) -> ModelConfig:
        """Config of the model with only this share's heads, columns and rows."""
        layers = tuple(map(self._layer, self.whole.layers))
        return replace(self.whole, layers=layers, shared_vocab=len(self.vocab[self.rank]))

    def _layer(self, whole: LayerSpec) -> LayerSpec:
        mixer = divided(whole.mixer, self.ranks).mixer(self.rank)
        return replace(whole, mixer=mixer, mlp=mlp_share(whole.mlp, self.columns, self.rank))

    def heads(self, mixer: Mixer) -> Heads:
        """Return the heads of each rank in layers with this mixer of the whole model."""
        return divided(mixer, self.ranks).heads

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
        sizes = [len(kv) for kv in self.heads(self.whole.attention).keys[first : first + here]]
        return sizes[local] / sum(sizes)

    def windows(self, name: str, pieces: int) -> list[Window]:
        """Return the window of each piece of a tensor that is in the share.

        name: `embedding`, `head` or `layers.N.PART`
        pieces: number of pieces
        """
        *layer, part = name.split(".")
        rank = self.rank
        if not layer:
            return [Window(self.vocab[rank])] if part in ("embedding", "head") else [Window()]
        spec = self.whole.layers[int(layer[1])]
        if part in spec.mlp.shapes(self.whole.hidden):
            return mlp_windows(spec.mlp, part, self.columns, pieces)
        return divided(spec.mixer, self.ranks).windows(part, rank, pieces)

    def pieces(self, pieces: Pieces) -> Pieces:
        """Return the share's part of a model's pieces. If its columns would cut blocks in two, the
        piece counts as dense.
        """
        if self.ranks == 1:
            # A file may have a matrix in fewer pieces than it is divided into.
            return pieces

        def shared(name: str) -> list[tuple[int, BlockType | None]]:
            found, whole = [], pieces(name)
            for (rows, kind), window in zip(whole, self.windows(name, len(whole)), strict=True):
                if kind and window.columns is not None and not _whole_blocks(window.columns, kind):
                    kind = None
                found.append((window.height(rows), kind))
            return [(rows, kind) for rows, kind in found if rows]

        return shared


def mlp_unit(config: ModelConfig, pieces: Pieces) -> int:
    """Return the unit in which a model's MLP columns are divided: whole blocks of their type."""
    kinds: set[BlockType | None] = set()
    for index, spec in enumerate(config.layers):
        for part in {"down", "experts_down"} & spec.mlp.shapes(config.hidden).keys():
            kinds.update(kind for _, kind in pieces(f"layers.{index}.{part}"))
    return max([_UNIT, *(kind.elements for kind in kinds if kind)])


def _whole_blocks(columns: range | tuple[range, ...], kind: BlockType) -> bool:
    ranges = columns if isinstance(columns, tuple) else (columns,)
    return not any(each.start % kind.elements or each.stop % kind.elements for each in ranges)
