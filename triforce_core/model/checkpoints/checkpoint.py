"""Checkpoints: a directory, a hub id or a .gguf file, opened as a config and named tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_core.model.checkpoints.beside import (
    LAYER_PREFIXES,
    OF_LAYERS,
    UNUSED,
    of_drafts,
    of_reused_kv,
    text_alone,
)
from triforce_core.model.checkpoints.gguf_config import gguf_config
from triforce_core.model.checkpoints.mtp import (
    MtpHead,
    head_names,
    head_pieces,
    layer_prefix,
    like_head,
    mtp_config,
    shapes_of,
    without_index,
)
from triforce_core.model.checkpoints.naming.names import gguf_names, hf_names
from triforce_core.model.checkpoints.naming.pieces import (
    Piece,
    block_type,
    fits,
    stored_shapes,
    windowed,
)
from triforce_core.model.checkpoints.tables import faults_of_table, table_of
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.hf import from_file, quantised, reads_images
from triforce_core.model.found.folders import CONFIG, config_of
from triforce_core.model.sharing.share import Share
from triforce_offload.checkpoint.header import read_json
from triforce_offload.checkpoint.identity import sampled, state
from triforce_offload.checkpoint.safetensors import SafetensorsSource
from triforce_offload.checkpoint.source import WHOLE, TensorSource, Transposed
from triforce_offload.errors import (
    CannotSplitError,
    CheckpointError,
    UnsupportedModelError,
    UsageError,
)

if TYPE_CHECKING:
    import torch

    from triforce_core.model.parts.ngrams import NGramTable
    from triforce_core.model.parts.per_layer_inputs import PerLayerTable
    from triforce_kernels.weights.block_types import BlockType
    from triforce_kernels.weights.linear import Weight


class Checkpoint:
    """A model on disk: its config and its tensors under this runtime's names."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        source: TensorSource,
        names: Callable[[str], list[Piece]],
        rope_factors: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        unused: tuple[str, ...] = (),
        checked: bool = True,
    ) -> None:
        """rope_factors: name of the tensor of rope factors, if there is one
        metadata: metadata of a GGUF file, which contains the tokenizer
        unused: with what the names of tensors begin that the model does not use
        checked: whether to raise the first fault
        """
        self.path = path
        self.config = config
        self.metadata = metadata
        self._source = source
        self._names = names
        self._rope_factors = rope_factors
        self._unused = unused
        self._share: Share | None = None
        try:
            for fault in self.faults() if checked else ():
                raise fault
            self._opened = {path: state(path) for path in source.files}
        except BaseException:
            source.close()
            raise

    @property
    def stored_dtype(self) -> str | None:
        """The dtype of the layers' matrices, None if they are quantised."""
        return self._source.dtype(self._names("layers.0.o")[0].name)

    @property
    def files(self) -> Sequence[Path]:
        """Files that contain the tensors."""
        return self._source.files

    @property
    def fingerprint(self) -> str:
        """Identity of the checkpoint: its config, its files' sizes and some of their bytes."""
        return f"{self.config!r} {' '.join(map(sampled, sorted(self.files)))}"

    def read_layer(self, layer: int, views: Mapping[str, Weight]) -> None:
        """Read every tensor of a layer into `views`, named and shaped as in `LayerSpec.shapes`.

        Raises CheckpointError, also if a file has changed, or, after reading all tensors,
        CannotSplitError.
        """
        for path, status in self._opened.items():
            if state(path) not in (status, None):
                raise CheckpointError(f"{path} was changed while it was in use")
        dense: set[str] = set()
        for part, view in views.items():
            try:
                self.read(f"layers.{layer}.{part}", view)
            except CannotSplitError as error:
                dense |= error.names
        if dense:
            raise CannotSplitError(self.path, dense)

    def rope_factors(self) -> torch.Tensor | None:
        """Return divisors of the inverse frequencies, [head_dim / 2], or None. GGUF stores them for
        Llama 3.
        """
        if self._rope_factors is None:
            return None
        # Imported here, because headers are read without torch.
        import torch

        factors = torch.empty(self._source.shape(self._rope_factors))
        self._source.read(self._rope_factors, factors)
        return factors

    def ngram_table(self) -> NGramTable | None:
        """Return the table of n-gram embeddings, which is read while the checkpoint is open; None
        without any. Raises CheckpointError.
        """
        spec = self.config.ngrams
        return spec and table_of(self._source, spec, self._tables)

    def per_layer_table(self) -> PerLayerTable | None:
        """Return the table of per-layer embeddings, which is read while the checkpoint is open;
        None without one.
        """
        from triforce_core.model.parts.per_layer_inputs import PerLayerTable

        if (inputs := self.config.per_layer_inputs) is None:
            return None
        (piece,) = self._names("per_layer_table")
        return PerLayerTable(inputs.width, self._source.rows(piece.name))

    @property
    def _tables(self) -> list[str]:
        return [piece.name for piece in self._names("ngrams")] if self.config.ngrams else []

    def reopened(self) -> Checkpoint:
        """Open the same checkpoint, or share, again independently. Raises CheckpointError."""
        checkpoint = open_checkpoint(self.path)
        return checkpoint.shared(self._share) if self._share else checkpoint

    def shared(self, share: Share) -> Checkpoint:
        """Return a view of a rank's share: all its methods concern the share alone. Closing either
        checkpoint closes both.
        """
        checkpoint = copy.copy(self)
        checkpoint.config = share.config
        checkpoint._share = share
        return checkpoint

    @cached_property
    def mtp_head(self) -> MtpHead | None:
        """The model's MTP head, None if the files have none that is known, or only parts of one."""
        if not self.config.kv_layers:
            return None
        held, config = self._source.names(), mtp_config(self.config)
        names = head_names(held, len(self.config.layers), shapes_of(config))
        if names is None:
            return None
        full, naming = like_head(self.config), hf_names if self.metadata is None else gguf_names
        prefix = layer_prefix(self._names, full)
        # Experts of the head may be stored otherwise than the model's.
        of_layers = prefix[: prefix.rindex(f"{full}.")]
        renamed = [name for name in held if not name.startswith(of_layers)]
        renamed += [
            prefix + name.removeprefix(names.layer) for name in held if name.startswith(names.layer)
        ]
        like = naming(without_index(self.config), renamed)
        head = MtpHead(self, config, head_pieces(like, full, names, shapes_of(config)))
        complete = all(
            name in held and fits(self._source.shape(name), shape)
            for name, shape in head.stored_shapes()
        )
        return head if complete else None

    def close(self) -> None:
        self._source.close()

    def pieces(self, name: str) -> list[tuple[int, BlockType | None]]:
        """Return the pieces of `embedding`, `head` or `layers.N.PART`: the rows of each, and the
        block type it is stored in, or None. Numbers of 16 bits are blocks of one (`NARROW`).
        """

        def whole(name: str) -> list[tuple[int, BlockType | None]]:
            return self.kinds(self._names(name))

        return whole(name) if self._share is None else self._share.pieces(whole)(name)

    def kinds(self, pieces: Sequence[Piece]) -> list[tuple[int, BlockType | None]]:
        """Return the rows of pieces, and the block types that they can be kept in, or None."""
        return [(piece.rows, block_type(self._source, piece)) for piece in pieces]

    def read(self, name: str, into: Weight) -> None:
        """Read `embedding`, `head`, `norm` or `layers.N.PART` into a tensor.

        Raises CheckpointError or CannotSplitError.
        """
        pieces = self._names(name)
        if self._share is not None:
            pieces = windowed(pieces, self._share.windows(name, len(pieces)))
        self.read_pieces(name, pieces, into)

    def read_pieces(self, name: str, pieces: Sequence[Piece], into: Weight) -> None:
        """Read the pieces of a tensor, whose name errors give. Raises as `read`."""
        from triforce_kernels.weights.linear import rows_of
        from triforce_kernels.weights.split_bf16 import SplitError
        from triforce_offload.checkpoint.reading import read_into

        first = 0
        for piece in chain.from_iterable(piece.following() for piece in pieces):
            part = rows_of(into, first, first + piece.rows)
            first += piece.rows
            try:
                if piece.transposed:
                    turned = Transposed(self._source, piece.corner)
                    read_into(turned, piece.name, part, WHOLE)
                elif piece.change:
                    _read_changed(self._source, piece, part)
                else:
                    where = piece.corner, piece.order, piece.column_ranges
                    read_into(self._source, piece.name, part, *where)
            except SplitError as error:
                raise CannotSplitError(self.path, [name]) from error

    def faults(self) -> Iterator[CheckpointError]:
        """Yield the differences between the headers and the config: missing tensors, wrong shapes,
        and tensors that the model does not use.
        """
        config, layers = self.config, len(self.config.layers)
        held = self._source.names()
        if any(piece.name not in held for piece in self._names(f"layers.{layers - 1}.o")):
            yield CheckpointError(
                f"{self.path} does not hold the last of the {layers} layers of its config"
            )
        expected, tables = dict(self._expected()), self._tables
        yield from faults_of_table(self._source, config, tables)
        missing = sorted(expected.keys() - held)
        if missing:
            yield CheckpointError(f"{self.path} lacks {missing[0]} ({len(missing)} missing in all)")
        unused = sorted(
            name
            for name in held - expected.keys()
            if name.startswith(OF_LAYERS)
            and not name.endswith(UNUSED)
            and not name.startswith(self._unused)
            and name not in tables
            and not self._source.without_effect(name)
        )
        if unused:
            yield UnsupportedModelError(
                f"{self.path} holds {unused[0]}, which a {config.family} model does not use "
                f"({len(unused)} such tensors)"
            )
        for name, shape in expected.items():
            if name in held and not fits(stored := self._source.shape(name), shape):
                yield CheckpointError(
                    f"{self.path}: {name} has shape {list(stored)}, its config says {list(shape)}"
                )

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the model in float32, with its name in the files.

        Raises CheckpointError.
        """
        import torch

        for name in sorted(self._source.names() & dict(self._expected()).keys()):
            numbers = torch.empty(self._source.shape(name))
            self._source.read(name, numbers)
            yield name, numbers

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config = self.config
        shapes = {
            "embedding": (config.vocab, config.hidden),
            **config.last_shapes,
        }
        if config.per_layer_inputs:
            shapes["per_layer_table"] = (config.vocab, config.per_layer_columns)
        if not config.tied:
            shapes["head"] = (config.vocab, config.hidden)
        for layer, spec in enumerate(config.layers):
            parts = spec.shapes(config.hidden)
            shapes.update({f"layers.{layer}.{part}": shape for part, shape in parts.items()})
        for name, shape in shapes.items():
            yield from stored_shapes(self._names(name), shape)
        if self._rope_factors is not None:
            yield self._rope_factors, (config.attention.head_dim // 2,)


def _read_changed(source: TensorSource, piece: Piece, into: torch.Tensor) -> None:
    """Read a piece whose stored numbers are not the model's. What they become is rounded."""
    import torch

    from triforce_offload.checkpoint.reading import read_into

    shape = into.shape if piece.columns is None else (into.shape[0], piece.columns)
    numbers = torch.empty(shape)
    read_into(source, piece.name, numbers, piece.corner, piece.order)
    into.copy_(piece.change(numbers))


def is_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file, by its suffix or its first bytes: files of Ollama have
    no suffix.
    """
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def open_checkpoint(path: Path, *, checked: bool = True) -> Checkpoint:
    """Open a model on disk and check it.

    Raises CheckpointError, UnsupportedModelError or UsageError.
    """
    if path.is_dir():
        raw = config_of(path)
        config = from_file(path / CONFIG, raw, _optional_json(path / "generation_config.json"))
        source = SafetensorsSource(path, quantised(raw))
        if reads_images(raw):
            config = text_alone(path, config, source.names())
        names = hf_names(config, source.names())
        further = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers"))
        drafts = of_drafts(config, further, LAYER_PREFIXES)
        drafts += of_reused_kv(config)
        return Checkpoint(path, config, source, names, unused=drafts, checked=checked)
    if not is_gguf(path):
        raise UsageError(f"{path} is neither a directory nor a .gguf file")
    # Imported here, because only GGUF files need the package.
    from triforce_offload.checkpoint.gguf import GGUFSource

    source = GGUFSource(path)
    try:
        config = gguf_config(source)
    except BaseException:
        source.close()
        raise
    factors = "rope_freqs.weight" if "rope_freqs.weight" in source.names() else None
    names = gguf_names(config, source.names())
    further = source.metadata.get(f"{source.metadata['general.architecture']}.nextn_predict_layers")
    drafts = of_drafts(config, further, ("blk.",))
    return Checkpoint(
        path,
        config,
        source,
        names,
        factors,
        source.metadata,
        unused=drafts + of_reused_kv(config),
        checked=checked,
    )


def _optional_json(path: Path) -> dict:
    return read_json(path) if path.exists() else {}
