"""Layouts of a model's weights in memory. No tensors are created here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import prod

from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import EXPERT_PARTS, EXPERT_TENSORS
from triforce_core.model.layers import FLOAT32_PARTS
from triforce_core.model.sharing.share import Pieces
from triforce_kernels import limits
from triforce_kernels.weights.block_types import BlockType
from triforce_offload.weights.formats import (
    FLOAT32,
    Dense,
    ElementType,
    Format,
    Groups,
    Read,
    dtype_name,
    matrix,
)
from triforce_offload.weights.layouts import FlatLayout
from triforce_offload.weights.split_formats import SplitBF16, SplitExperts, when_split

# Columns of a group of a draft copy, by its bits; the first number that divides a row is taken.
# SmolLM2-135M accepted .937 of the tokens that its copy in 4 bits drafted with groups of 64, and
# .891 with groups of 192.
_GROUPS = {4: (64, 32), 3: (64,)}


# Returns the format for a matrix's name and shape.
MatrixFormat = Callable[[str, tuple[int, ...]], Format]


def matrices(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the matrices of each distinct layer; one expert's stand for all."""
    shapes = (spec.products(config.hidden).values() for spec in config.distinct_layers)
    return tuple((s[0], s[1]) for s in chain.from_iterable(shapes))


def copy_layouts(config: ModelConfig, dtype: ElementType, bits: int) -> tuple[FlatLayout, ...]:
    """Return the layout of each layer in 3 or 4 bits. A matrix is dense if its rows are no whole
    groups.
    """
    layouts = {
        spec: FlatLayout.of(
            {
                name: _grouped(name, shape, dtype, bits)
                for name, shape in spec.shapes(config.hidden).items()
            }
        )
        for spec in config.distinct_layers
    }
    return tuple(layouts[spec] for spec in config.layers)


def _grouped(name: str, shape: tuple[int, ...], dtype: ElementType, bits: int) -> Format:
    group = next((group for group in _GROUPS[bits] if shape[-1] % group == 0), 0)
    if _is_matrix(name, shape) and group:
        return Groups(*shape, group, dtype, bits)
    return _dense_tensor(name, shape, dtype)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may have another format than dense."""
    return len(shape) == 2 and name not in FLOAT32_PARTS


def _dense_tensor(name: str, shape: tuple[int, ...], dtype: ElementType) -> Dense:
    """Return the format of a dense tensor, by its name in a layer."""
    return Dense(shape, FLOAT32 if name in FLOAT32_PARTS else dtype)


def _dense(shapes: Mapping[str, tuple[int, ...]], dtype: ElementType) -> FlatLayout:
    formats = {name: _dense_tensor(name, shape, dtype) for name, shape in shapes.items()}
    return FlatLayout.of(formats, EXPERT_TENSORS)


@dataclass(frozen=True)
class Layouts:
    """Layouts of all weights of a model.

    layers: layout of each layer
    head: layout of the final norm and the output matrix
    embedding: layout of the embedding; None if it is the output matrix
    """

    layers: tuple[FlatLayout, ...]
    head: FlatLayout
    embedding: FlatLayout | None

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(layout.nbytes for layout in self._all())

    @property
    def layers_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layout.nbytes for layout in self.layers)

    @cached_property
    def decoded_numbers(self) -> int:
        """Elements of the largest matrix that has to be decoded, 0 if all are dense."""
        parts = (part for layout in self._all() for part in layout.decoded())
        return max((part.rows * part.columns for part in parts), default=0)

    @cached_property
    def undivided_numbers(self) -> int:
        """The same of matrices that are not split."""
        parts = (part for layout in self._all() for part in layout.decoded() if not part.split)
        return max((part.rows * part.columns for part in parts), default=0)

    @cached_property
    def split(self) -> bool:
        """Whether some matrices are split, or experts are, each for itself."""
        return any(part.split for layout in self._all() for part in layout.decoded())

    @cached_property
    def joins_blocks(self) -> bool:
        """Whether some of the split matrices are joined to blocks, which products then decode."""
        parts = (part for layout in self._all() for part in layout.decoded())
        return any(part.split and part.block_type for part in parts)

    @cached_property
    def experts_apart(self) -> bool:
        """Whether experts are split, each for itself."""
        return any(each.experts_apart for each in self.experts)

    @cached_property
    def block_types(self) -> frozenset[BlockType]:
        """Block types in which matrices are stored."""
        parts = (part for layout in self._all() for part in layout.decoded())
        return frozenset(part.block_type for part in parts if part.block_type)

    @cached_property
    def experts(self) -> frozenset[Format]:
        """Formats of the matrices of experts."""
        return frozenset(
            layer.formats[part]
            for layer in self.layers
            for part in EXPERT_PARTS
            if part in layer.formats
        )

    def _all(self) -> Iterator[FlatLayout]:
        yield from filter(None, (*self.layers, self.head, self.embedding))


def dense_layouts(config: ModelConfig, dtype: ElementType) -> Layouts:
    """Return layouts with every tensor dense in `dtype`."""
    hidden, ends = config.hidden, (config.vocab_rows, config.hidden)
    # Equal layers share a layout, because planning creates many layouts.
    layers = {spec: _dense(spec.shapes(hidden), dtype) for spec in config.distinct_layers}
    return Layouts(
        tuple(layers[spec] for spec in config.layers),
        _dense({**config.last_shapes, "head": ends}, dtype),
        None if config.tied else _dense({"embedding": ends}, dtype),
    )


def drafter_layouts(
    config: ModelConfig, dtype: ElementType, pieces: Pieces | None = None
) -> Layouts:
    """Return layouts of what a draft model has of its own: heads use parts of the model that they
    continue.

    pieces: pieces of its matrices that are kept quantised, of a head those of its layers; None for
        dense ones
    """
    layouts, joins = dense_layouts(config, dtype), config.joins
    if joins is None:
        return layouts if pieces is None else stored_layouts(config, dtype, pieces)
    ends = config.own_ends
    head = _dense(ends, dtype)
    if pieces is not None:
        stored = _as_stored(pieces, dtype)
        if joins.in_own_files:
            head = _layout(ends, dtype, stored)
        layers = tuple(
            _layout(spec.shapes(config.hidden), dtype, stored, f"layers.{index}.")
            for index, spec in enumerate(config.layers)
        )
        layouts = replace(layouts, layers=layers)
    embedding = joins.embedding(config.hidden)
    embedded = _dense(embedding, dtype) if embedding else None
    return replace(layouts, head=head, embedding=embedded)


def stored_layouts(config: ModelConfig, dtype: ElementType, pieces: Pieces) -> Layouts:
    """Return layouts with matrices as the checkpoint stores them, and all else in `dtype`."""
    return _layouts(config, dtype, _as_stored(pieces, dtype))


def _as_stored(pieces: Pieces, dtype: ElementType) -> MatrixFormat:
    return lambda name, shape: matrix(pieces(name), shape[1], dtype)


def split_layouts(
    config: ModelConfig,
    dtype: ElementType,
    unsplit: Collection[str] = (),
    pieces: Pieces | None = None,
) -> Layouts:
    """Return layouts with split matrices: those in blocks that can be split bit for bit, others in
    bfloat16 if that is `dtype`. All else is in `dtype`.

    Matrices with an odd number of columns stay as they are, experts in blocks, blocks of other
    types, and matrices that have too many numbers (experts of the largest models).

    unsplit: names of other matrices that stay as they are: `head`, `embedding` or `layers.N.PART`
    pieces: pieces of quantised matrices, if there are any
    """

    def split(name: str, shape: tuple[int, ...]) -> Format:
        made = pieces(name) if pieces else ()
        if any(kind is not None for _, kind in made):
            stored = matrix(made, shape[1], dtype)
            # Rows of an embedding are looked up, and each expert is multiplied by itself.
            whole = "." not in name or name.rpartition(".")[2] in EXPERT_PARTS
            return stored if whole or name in unsplit else when_split(stored)
        small = prod(shape) <= limits.MOST_SPLIT_NUMBERS and name not in unsplit
        if shape[1] % 2 or not small or dtype_name(dtype) != "bfloat16":
            return Dense(shape, dtype)
        return SplitBF16(*shape)

    return _layouts(config, dtype, split)


def split_experts_layouts(
    config: ModelConfig, dtype: ElementType, dense: Collection[str] = ()
) -> Layouts:
    """Return layouts with the matrices of experts split, each for itself, and all else in `dtype`,
    which is bfloat16. dense: names of matrices that stay so
    """
    counts = {
        f"layers.{index}.{part}": spec.mlp.count
        for index, spec in enumerate(config.layers)
        if spec.mlp.active
        for part in EXPERT_PARTS
    }

    def split(name: str, shape: tuple[int, ...]) -> Format:
        count = counts.get(name)
        if count is None or shape[1] % 2 or name in dense:
            return Dense(shape, dtype)
        return SplitExperts(count, SplitBF16(shape[0] // count, shape[1]))

    return _layouts(config, dtype, split)


def _layout(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: ElementType,
    matrix_format: MatrixFormat,
    prefix: str = "",
) -> FlatLayout:
    """Return the layout of some tensors, with all else than matrices in `dtype`.

    prefix: with what the names begin that `matrix_format` is given
    """
    formats: dict[str, Format] = {
        name: matrix_format(prefix + name, shape)
        if _is_matrix(name, shape)
        else _dense_tensor(name, shape, dtype)
        for name, shape in shapes.items()
    }
    return FlatLayout.of(formats, EXPERT_TENSORS)


def _layouts(config: ModelConfig, dtype: ElementType, matrix_format: MatrixFormat) -> Layouts:
    """Return layouts with all else than matrices in `dtype`."""
    layout = partial(_layout, dtype=dtype, matrix_format=matrix_format)
    hidden, ends = config.hidden, (config.vocab_rows, config.hidden)
    return Layouts(
        tuple(
            layout(spec.shapes(hidden), prefix=f"layers.{i}.")
            for i, spec in enumerate(config.layers)
        ),
        layout({**config.last_shapes, "head": ends}),
        None if config.tied else layout({"embedding": ends}),
    )


@dataclass(frozen=True)
class MatrixBytes:
    """Bytes of the matrices that a forward reads, for an average layer.

    qkv: bytes before the attention of a layer
    rest: bytes after it, without experts
    experts: bytes of all experts
    head: bytes of the output matrix, once per forward
    decoded: whether some of them have to be decoded
    layer_read, experts_read, head_read: how the matrices of a layer, its experts and the output
        matrix are read
    """

    qkv: float
    rest: float
    experts: float
    head: float
    decoded: bool = False
    layer_read: Read = Read.AS_STORED
    experts_read: Read = Read.AS_STORED
    head_read: Read = Read.AS_STORED

    @classmethod
    def of(cls, layouts: Layouts) -> MatrixBytes:
        head = layouts.head.formats["head"]
        reads = *_reads(layouts.layers), head.read
        sizes = _sizes(layouts.layers)
        return cls(*sizes, head.nbytes, bool(layouts.decoded_numbers), *reads)

    def with_layers(self, layers: Sequence[FlatLayout]) -> MatrixBytes:
        """Return these bytes with other layers, which have to be decoded, and the same head."""
        reads = *_reads(layers), self.head_read
        sizes = _sizes(layers)
        return MatrixBytes(*sizes, self.head, True, *reads)

    def with_high_bits(self, layers: Sequence[FlatLayout]) -> MatrixBytes:
        """Return these bytes with only the high bits of the layers, and the same head."""
        reads = *_reads(layers, drafts=True), self.head_read
        sizes = _sizes(layers, drafts=True)
        return MatrixBytes(*sizes, self.head, True, *reads)


def _reads(layers: Sequence[FlatLayout], *, drafts: bool = False) -> tuple[Read, Read]:
    """Return how the matrices of a layer are read, and those of experts: like these, if there are
    none. If some blocks are split, all matrices are taken to be, which joining makes slower.
    """
    own = layers[0].formats["qkv"]
    experts = next(
        (each.formats[EXPERT_PARTS[0]] for each in layers if EXPERT_PARTS[0] in each.formats), own
    )
    if drafts:
        return own.draft_read, experts.draft_read
    formats = (each for layer in layers for each in layer.formats.values())
    if any(each.read is Read.SPLIT_BLOCKS for each in formats):
        return Read.SPLIT_BLOCKS, experts.read
    return own.read, experts.read


def _sizes(layers: Sequence[FlatLayout], *, drafts: bool = False) -> tuple[float, float, float]:
    """Return the bytes of an average layer before its attention, after it, and of its experts.

    drafts: count what products for drafts read
    """

    def size(each: Format) -> int:
        return each.draft_bytes if drafts else each.nbytes

    def whole(layer: FlatLayout) -> int:
        return sum(map(size, layer.formats.values())) if drafts else layer.nbytes

    qkv = _mean(size(layer.formats["qkv"]) for layer in layers)
    experts = _mean(
        sum(size(layer.formats[part]) for part in EXPERT_PARTS if part in layer.formats)
        for layer in layers
    )
    return qkv, _mean(map(whole, layers)) - qkv - experts, experts


def _mean(numbers: Iterable[int]) -> float:
    counted = list(numbers)
    return sum(counted) / len(counted)
