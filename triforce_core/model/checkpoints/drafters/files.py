"""Files of drafters that have several layers, which ranks divide as they divide a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from triforce_core.model.checkpoints.beside import UNUSED
from triforce_core.model.checkpoints.checkpoint import Checkpoint
from triforce_core.model.checkpoints.naming.pieces import stored_shapes
from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import Shapes
from triforce_core.model.known.mixes import pieces_of
from triforce_core.model.sharing.share import Pieces, Share, mlp_unit
from triforce_kernels.weights.block_types import BlockType
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# Learned weights of convolutions, which are no matrices.
LEARNED = ("mixer_conv", "mlp_conv")


def shapes_of(config: ModelConfig) -> Shapes:
    """Return the shapes of all tensors of a drafter."""
    shapes = config.own_ends
    for index, spec in enumerate(config.layers):
        parts = spec.shapes(config.hidden)
        shapes |= {f"layers.{index}.{part}": shape for part, shape in parts.items()}
    return shapes


def share_of(config: ModelConfig, rank: int, ranks: int, pieces: Pieces) -> Share:
    """Return a rank's share of a drafter, whose layers are divided as those of a model are.

    pieces: of its matrices. Raises UsageError.
    """
    return Share.of(config, rank, ranks, mlp_unit(config, pieces))


def typical_pieces(config: ModelConfig, mix: str) -> Pieces:
    """Return the pieces of each matrix of a typical drafter in a quantisation mix of GGUF files.

    Raises UsageError.
    """
    ends = config.own_ends
    of_model = pieces_of(config, mix)
    (_, usual), *_ = of_model("layers.0.o")

    def pieces(name: str) -> Sequence[tuple[int, BlockType | None]]:
        if name in ends and name != "head":
            rows, columns = ends[name]
            return [(rows, usual if usual and columns % usual.elements == 0 else None)]
        found = of_model(name)
        return [(rows, None) for rows, _ in found] if name.endswith(LEARNED) else found

    return pieces


class DrafterCheckpoint(Checkpoint):
    """The files of a drafter. See `ReadableHead`.

    further: with what the names of tensors begin that it has and that are not used
    """

    further: ClassVar[tuple[str, ...]] = ()

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in shapes_of(self.config).items():
            yield from stored_shapes(self._names(name), shape)

    def shared(self, share: Share) -> DrafterCheckpoint:
        """Return a view of a rank's share. share: of the model that it drafts for"""
        return super().shared(share_of(self.config, share.rank, share.ranks, self.pieces))

    def faults(self) -> Iterator[CheckpointError]:
        """Checkpoint.faults, and tensors that no drafter of this kind is known to have."""
        yield from super().faults()
        others = sorted(
            name
            for name in self._source.names() - dict(self._expected()).keys()
            if not name.endswith(UNUSED)
            and not name.startswith(self.further)
            and not self._source.without_effect(name)
        )
        if others:
            kind = self.config.joins.in_words
            yield UnsupportedModelError(
                f"{self.path} holds {others[0]}, which is not known of {kind}s"
            )

    def tokens(self) -> None:
        """ReadableHead.tokens: the model's own."""
