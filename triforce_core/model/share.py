"""One rank's share of a model: heads, columns of the MLP and rows of the vocabulary. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from triforce_core.model.config import ModelConfig
from triforce_core.model.layers import LayerSpec
from triforce_kernels.weights.block_types import BlockType
from triforce_offload.errors import UsageError

# Columns of the MLP are shared in multiples of this, so that groups of an int4 copy stay whole.
_UNIT = 64

# Of a tensor, by name: the rows of its pieces, and the block types they are stored in.
Pieces = Callable[[str], Sequence[tuple[int, BlockType | None]]]


class Window(NamedTuple):
    """Rows and columns of a stored tensor, all of them if None."""

    rows: range | None = None
    columns: range | None = None


@dataclass(frozen=True)
class Share:
    """What one of several ranks has of a model (tensor parallelism; Megatron-LM, Shoeybi et al.,
    2019). Every query head is on one rank, with the key-value head that it attends to: that is on
    several ranks where there are fewer such heads than ranks.

    whole: the model
    heads, kv_heads, mlp, vocab: of each rank, which of them it has
    """

    whole: ModelConfig
    rank: int
    heads: tuple[range, ...]
    kv_heads: tuple[range, ...]
    mlp: tuple[range, ...]
    vocab: tuple[range, ...]

    @classmethod
    def of(cls, config: ModelConfig, rank: int, ranks: int, unit: int = _UNIT) -> Share:
        """unit: multiples in which the MLP's columns are shared, where there are enough.

        What does not divide is spread unevenly, the first ranks having more. Raises UsageError if
        a rank would have nothing.
        """
        attention, mlp_width = config.attention, config.layers[0].mlp.width
        group = attention.heads // attention.kv_heads
        if ranks <= attention.kv_heads:
            kv_heads = spread(attention.kv_heads, ranks)
            heads = [range(kv.start * group, kv.stop * group) for kv in kv_heads]
        else:
            kv_heads, heads = [], []
            # Those that fewer ranks share come first.
            for kv, sharing in enumerate(reversed(spread(ranks, attention.kv_heads))):
                if len(sharing) > group:
                    raise UsageError(
                        f"{attention.heads} attention heads over {attention.kv_heads} key-value "
                        f"heads do not spread over {ranks} GPUs: {len(sharing)} of them would "
                        f"share {group}"
                    )
                kv_heads += [range(kv, kv + 1)] * len(sharing)
                first = kv * group
                parts = spread(group, len(sharing))
                heads += [range(first + part.start, first + part.stop) for part in parts]
        if min(mlp_width, config.vocab) < ranks:
            raise UsageError(
                f"an MLP of {mlp_width} columns and a vocabulary of {config.vocab} do not spread "
                f"over {ranks} GPUs"
            )
        while -(-mlp_width // unit) < ranks:
            unit //= 2
        units = spread(-(-mlp_width // unit), ranks)
        mlp = [range(part.start * unit, min(part.stop * unit, mlp_width)) for part in units]
        vocab = spread(config.vocab, ranks)
        return cls(config, rank, tuple(heads), tuple(kv_heads), tuple(mlp), tuple(vocab))

    @property
    def ranks(self) -> int:
        return len(self.heads)

    @property
    def config(self) -> ModelConfig:
        """The model with this share's heads, columns and rows alone."""
        layers = tuple(map(self._layer, self.whole.layers))
        return replace(self.whole, layers=layers, shared_vocab=len(self.vocab[self.rank]))

    def _layer(self, whole: LayerSpec) -> LayerSpec:
        rank = self.rank
        mixer = replace(
            whole.mixer,
            heads=len(self.heads[rank]),
            kv_heads=len(self.kv_heads[rank]),
            # Added once, before the sum.
            output_bias=whole.mixer.output_bias and rank == 0,
        )
        return LayerSpec(mixer, replace(whole.mlp, width=len(self.mlp[rank])))

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of the vocabulary of each rank."""
        return tuple(len(part) for part in self.vocab)

    def of_machine(self, local: int, here: int) -> float:
        """What of the memory that `here` ranks of one machine have this one should have: most is KV
        and what is as large as a head's part of a layer. local: which of those it is
        """
        first = self.rank - local
        sizes = [len(kv) for kv in self.kv_heads[first : first + here]]
        return sizes[local] / sum(sizes)

    def windows(self, name: str) -> list[Window]:
        """Of `embedding`, `head` or `layers.N.PART`: what of each of its pieces is in the share."""
        part, rank, size = name.rsplit(".", 1)[-1], self.rank, self.whole.attention.head_dim

        def heads(of: range) -> range:
            return range(of.start * size, of.stop * size)

        queries, keys = heads(self.heads[rank]), heads(self.kv_heads[rank])
        if part in ("qkv", "qkv_bias"):
            return [Window(queries), Window(keys), Window(keys)]
        if part == "gate_up":
            return [Window(self.mlp[rank])] * 2
        if part in ("embedding", "head"):
            return [Window(self.vocab[rank])]
        columns = {"o": queries, "down": self.mlp[rank]}
        return [Window(None, columns.get(part))]

    def pieces(self, pieces: Pieces) -> Pieces:
        """The share of a model's pieces. What is stored in blocks that its columns would cut is
        said to be dense.
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
    """`count` things in `over` runs as even as can be, the larger ones first."""
    each, more = divmod(count, over)
    ends = [(i + 1) * each + min(i + 1, more) for i in range(over)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def mlp_unit(config: ModelConfig, pieces: Pieces) -> int:
    """Multiples in which the columns of a model's MLP are shared: whole blocks of its type."""
    kinds = {kind for i in range(len(config.layers)) for _, kind in pieces(f"layers.{i}.down")}
    return max([_UNIT, *(kind.elements for kind in kinds if kind)])


def _whole_blocks(columns: range, kind: BlockType) -> bool:
    return not columns.start % kind.elements and not columns.stop % kind.elements
