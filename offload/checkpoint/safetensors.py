"""Safetensors: one file, or shards with an index."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from triforce_offload.checkpoint.header import read_json
from triforce_offload.checkpoint.opened import Stored, TensorsFile
from triforce_offload.checkpoint.quantised.floats import SCALE_SUFFIX, SCALE_SUFFIXES
from triforce_offload.checkpoint.quantised.methods import Quantisation
from triforce_offload.checkpoint.quantised.tensors import quantised_tensors
from triforce_offload.checkpoint.rows import StoredRows
from triforce_offload.checkpoint.source import WHOLE, Corner
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from triforce_kernels.weights.block_types import BlockType

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": None, "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TORCH_NAMES = _DTYPES | {
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "I32": "int32",
}
# Dtypes of tensors that are not quantised or have one scale for several numbers.
_NUMBERS = (*_DTYPES, "F8_E4M3")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_WHOLE_NUMBERS = {"I64": "int64", "I32": "int32", "I16": "int16"}
# Number of elements that are read at a time when they are converted.
_CHUNK_ELEMENTS = 4 << 20


class SafetensorsSource:
    """A directory with model.safetensors, or with shards and their index. Files stay open."""

    def __init__(self, directory: Path, quantised: Quantisation | None = None) -> None:
        """quantised: how matrices are quantised, if some are integers

        Raises CheckpointError if a file is missing or damaged.
        """
        self._stack = ExitStack()
        self._tensors: dict[str, tuple[TensorsFile, Stored]] = {}
        try:
            wanted = _shards(directory)
            for path, names in wanted.items():
                file = TensorsFile(path)
                self._stack.callback(file.close)
                absent = sorted((names or set()) - file.stored.keys())
                if absent:
                    raise CheckpointError(
                        f"{path} does not hold {absent[0]}, which the index names"
                    )
                self._tensors.update(
                    (name, (file, file.stored[name])) for name in names or file.stored
                )
        except BaseException:
            self._stack.close()
            raise
        self._stored = {name: stored for name, (_, stored) in self._tensors.items()}
        self._quantised = quantised_tensors(self._stored, quantised)

    @property
    def files(self) -> list[Path]:
        return sorted({file.path for file, _ in self._tensors.values()})

    def names(self) -> frozenset[str]:
        parts = {
            part for name, each in self._quantised.items() for part in each.parts if part != name
        }
        # Scales of FP8 have names that are known to belong to others.
        hidden = {part for part in parts if not part.endswith(SCALE_SUFFIX)}
        return frozenset(self._tensors.keys() - hidden | self._quantised.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        if found := self._quantised.get(name):
            return found.shape(self._stored, self._tensors[found.parts[0]][0].path)
        file, stored = self._tensors[name]
        if stored.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"{file.path}: {name} is {stored.dtype}, supported are {', '.join(_NUMBERS)}"
            )
        return stored.shape

    def dtype(self, name: str) -> str | None:
        return None if name in self._quantised else _DTYPES.get(self._tensors[name][1].dtype)

    def blocks(self, name: str) -> BlockType | None:
        found = self._quantised.get(name)
        return found and found.kind

    def without_effect(self, name: str) -> bool:
        """TensorSource.without_effect: biases of zeros, which GPTQ writes beside every matrix."""
        matrix = name.removesuffix("bias") + "weight"
        if not name.endswith(".bias") or matrix not in self._quantised:
            return False
        file, stored = self._tensors[name]
        raw = bytearray(prod(stored.shape) * _ITEM_BYTES.get(stored.dtype, 0))
        file.fill(memoryview(raw), stored.start, name)
        return bool(raw) and not any(raw)

    def read_blocks(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        self._quantised[name].read_blocks(self._read_plain, into, corner)

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        kind = self.blocks(name)
        if kind is None:
            self._read_plain(name, into, corner)
            return
        import torch

        from triforce_kernels.weights.blocks import decode

        columns = into.shape[-1]
        into = into.view(-1, columns)
        rows = len(into)
        before = corner.column % kind.elements
        count = -(-(before + columns) // kind.elements)
        blocks = torch.empty(rows, count * kind.nbytes, dtype=torch.uint8)
        self.read_blocks(name, blocks, Corner(corner.row, corner.column - before))
        step = max(1, _CHUNK_ELEMENTS // columns)
        for part, target in zip(blocks.split(step), into.split(step), strict=True):
            decoded = decode(part, kind, into.dtype)
            target.copy_(decoded[:, before : before + columns])

    def rows(self, name: str) -> StoredRows:
        """TensorSource.rows."""
        file, stored = self._tensors[name]
        dtype = _TORCH_NAMES.get(stored.dtype)
        if len(stored.shape) != 2 or stored.dtype not in _NUMBERS:
            raise UnsupportedModelError(
                f"{file.path}: rows of {name} ({stored.dtype}) are not read"
            )
        row_bytes = stored.nbytes // stored.shape[0]
        scale = self._scale_of_all(name)
        return StoredRows(file, stored.shape, stored.start, row_bytes, None, dtype, name, scale)

    def _scale_of_all(self, name: str) -> float:
        """Return the only scale of a matrix of numbers in 8 bits, 1 if it has none."""
        import torch

        found = next((name + end for end in SCALE_SUFFIXES if name + end in self._stored), None)
        if found is None:
            return 1.0
        shape = self._stored[found].shape
        if prod(shape) != 1:
            raise UnsupportedModelError(
                f"{self._tensors[found][0].path}: {found} has {prod(shape)} scales; rows of a file "
                "are read with one for all"
            )
        scale = torch.empty(shape)
        self._read_plain(found, scale, WHOLE)
        return float(scale)

    def whole_numbers(self, name: str) -> torch.Tensor:
        """Return a list of whole numbers, [count] int64. Raises CheckpointError for others."""
        import torch

        file, stored = self._tensors[name]
        if len(stored.shape) != 1 or stored.dtype not in _WHOLE_NUMBERS:
            raise CheckpointError(f"{file.path}: {name} is no list of whole numbers")
        dtype = getattr(torch, _WHOLE_NUMBERS[stored.dtype])
        raw = bytearray(stored.shape[0] * dtype.itemsize)
        if not raw:
            return torch.empty(0, dtype=torch.int64)
        file.fill(memoryview(raw), stored.start, name)
        return torch.frombuffer(raw, dtype=dtype).long()

    def _read_plain(
        self, name: str, into: torch.Tensor, corner: Corner, columns: int | None = None
    ) -> None:
        """columns: number of columns of the tensor, if its last dimension is not a whole row"""
        # The header is read without torch, which takes longer to load than a small model.
        import torch

        file, stored = self._tensors[name]
        dtype = getattr(torch, _TORCH_NAMES[stored.dtype])
        # Columns of the whole tensor, and of the part that is read.
        shape = stored.shape
        whole, width = (columns or shape[-1], into.shape[-1]) if len(shape) > 1 else (1, 1)
        count = into.numel() // width
        row_bytes, start = whole * dtype.itemsize, corner.column * dtype.itemsize
        start += stored.start + corner.row * row_bytes
        file.expect(start, count * row_bytes)
        whole_rows = width == whole

        def fill(raw: memoryview, first: int) -> None:
            """Read rows into the buffer, from row `first` on, as many as it has room for."""
            if whole_rows:
                file.fill(raw, start + first * row_bytes, name)
                return
            size = width * dtype.itemsize
            for row in range(len(raw) // size):
                part = raw[row * size : (row + 1) * size]
                file.fill(part, start + (first + row) * row_bytes, name)

        if into.is_contiguous() and into.dtype == dtype and into.device.type == "cpu":
            fill(memoryview(into.view(-1).view(torch.uint8).numpy()), 0)
            return
        # A step is a whole number of indices of the first dimension.
        rows = into if into.dim() > 1 else into.view(1, -1)
        each = rows[0].numel() // width
        step = max(1, _CHUNK_ELEMENTS // rows[0].numel())
        for first in range(0, rows.shape[0], step):
            part = rows[first : first + step]
            raw = bytearray(part.numel() * dtype.itemsize)
            fill(memoryview(raw), first * each)
            part.copy_(torch.frombuffer(raw, dtype=dtype).view(part.shape))

    def close(self) -> None:
        self._tensors.clear()
        self._stack.close()


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Return each file and the tensors that the index places in it; None stands for all."""
    index = directory / _INDEX
    if (directory / _SINGLE).exists():
        return {directory / _SINGLE: None}
    if not index.exists():
        others = sorted(path.name for path in directory.glob("*.bin"))
        held = f"; {others[0]} is not read: save the model as safetensors" if others else ""
        raise CheckpointError(f"{directory} holds neither {_SINGLE} nor {_INDEX}{held}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    shards: dict[Path, set[str] | None] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} places {name} in {file!r}, which is no file name")
        shards.setdefault(directory / file, set()).add(name)
    return shards
