"""GGUF: metadata and (quantised) tensors, in one file or in several parts.

The header is parsed here, and every count and length is checked against the file size before
anything is sized by it: a 113-byte file can hang the reader of gguf 0.19. The gguf package provides
the quantisation types and dequantises.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from triforce_kernels.weights.block_types import BLOCK_TYPES, BlockType
from triforce_offload.checkpoint.opened import OpenedFile
from triforce_offload.checkpoint.rows import StoredRows
from triforce_offload.checkpoint.source import WHOLE, Corner
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
SUPPORTED = tuple(GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", *BLOCK_TYPES))
_PLAIN = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
# The end of the name of a part: its number and how many there are, both from 1.
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MOST_PARTS = 1000
# Number of bytes read at first, which include the headers of most small models.
_HEADER_BYTES = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 4
# Number of elements dequantised at a time, so that no large tensor exists in float32 as a whole.
_CHUNK_ELEMENTS = 2 << 20
# No vocabulary has more strings. Zeros in a damaged file may look like any number of empty strings.
_MOST_STRINGS = 4 << 20


@dataclass(frozen=True)
class _Entry:
    """A tensor, and where it is. start: its first byte in the file"""

    file: OpenedFile
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFArray:
    """A metadata array: its length and its values. `values` is None for an array of arrays."""

    length: int
    values: np.ndarray | list[str] | None


class GGUFSource:
    """A GGUF file, or several that are the parts of one model: `metadata`, which is the first
    part's, and tensors. The files stay open until `close`.
    """

    def __init__(self, path: Path) -> None:
        """path: the file, or the first of its parts

        Raises CheckpointError for anything that is not a valid GGUF file.
        """
        self.path = path
        self._files: list[OpenedFile] = []
        try:
            self.metadata, self._entries = self._opened(path)
            count = self.metadata.get("split.count", 1)
            for part in _further_parts(path, count, self.metadata.get("split.no", 0)):
                self._add_part(part)
        except BaseException:
            self.close()
            raise

    def _opened(self, path: Path) -> tuple[dict[str, Any], dict[str, _Entry]]:
        """Open a file and return its metadata and its tensors."""
        file = OpenedFile(path)
        self._files.append(file)
        return _Walker(file).header()

    def _add_part(self, path: Path) -> None:
        number = len(self._files)
        metadata, entries = self._opened(path)
        if metadata.get("split.no") != number:
            raise CheckpointError(f"{path} is not part {number + 1} of {self.path}")
        if twice := self._entries.keys() & entries.keys():
            raise CheckpointError(f"{path}: tensor {min(twice)} is in an earlier part too")
        self._entries |= entries

    @property
    def files(self) -> list[Path]:
        return [file.path for file in self._files]

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        entry = self._entries[name]
        if entry.kind not in SUPPORTED:
            raise UnsupportedModelError(f"{self.path}: {name} is {entry.kind.name}, not supported")
        return entry.shape

    def dtype(self, name: str) -> str | None:
        return _PLAIN.get(self._entries[name].kind)

    def blocks(self, name: str) -> BlockType | None:
        return BLOCK_TYPES.get(self._entries[name].kind.name)

    def without_effect(self, name: str) -> bool:
        """TensorSource.without_effect."""
        return False

    def rows(self, name: str) -> StoredRows:
        """TensorSource.rows."""
        entry, shape = self._entries[name], self.shape(name)
        row_bytes, dtype = entry.nbytes // shape[0], self.dtype(name) or ""
        return StoredRows(entry.file, shape, entry.start, row_bytes, self.blocks(name), dtype, name)

    def read_blocks(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        elements, nbytes = GGML_QUANT_SIZES[self._entries[name].kind]
        columns = into.shape[-1] // nbytes * elements
        self._read(name, into, columns, corner, lambda blocks: blocks)

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        kind = self._entries[name].kind
        self._read(name, into, into.shape[-1], corner, partial(_dequantise, kind=kind))

    def _read(
        self,
        name: str,
        into: torch.Tensor,
        columns: int,
        corner: Corner,
        converted: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """columns: number of the tensor's columns to read
        converted: converts raw bytes to numbers, in whole blocks
        """
        # The header is read without torch.
        import torch

        entry = self._entries[name]
        elements, nbytes = GGML_QUANT_SIZES[entry.kind]
        if into.dim() < 2:
            # A vector, which files may have in several rows.
            raw = np.empty(into.numel() // elements * nbytes, np.uint8)
            entry.file.fill(memoryview(raw), entry.start + corner.row // elements * nbytes, name)
            into.copy_(torch.from_numpy(converted(raw)).view(into.shape))
            return
        begin, end = corner.column // elements, -(-(corner.column + columns) // elements)
        before = corner.column - begin * elements
        row_bytes, width = entry.shape[-1] // elements * nbytes, (end - begin) * nbytes
        start = entry.start + corner.row * row_bytes
        entry.file.expect(start, into.numel() // into.shape[-1] * row_bytes)

        def read(row: int, count: int) -> np.ndarray:
            """Return the blocks of `count` rows from `row` on, [rows, width]."""
            raw = np.empty((count, width), np.uint8)
            at = start + row * row_bytes + begin * nbytes
            if width == row_bytes:
                entry.file.fill(memoryview(raw).cast("B"), at, name)
                return raw
            for index in range(count):
                entry.file.fill(memoryview(raw[index]), at + index * row_bytes, name)
            return raw

        # A step is a whole number of indices of the first dimension, so of rows and blocks too.
        each = into[0].numel() // into.shape[-1]
        step = max(1, _CHUNK_ELEMENTS // into[0].numel())
        for first in range(0, into.shape[0], step):
            part = into[first : first + step]
            rows = part.shape[0] * each
            made = torch.from_numpy(converted(read(first * each, rows)))
            made = made.view(rows, -1)[:, before : before + into.shape[-1]]
            part.copy_(made.reshape(part.shape))

    def close(self) -> None:
        self._entries = {}
        for file in self._files:
            file.close()


def _further_parts(path: Path, count: object, number: object) -> Iterator[Path]:
    """Yield the parts of a model after its first one, as llama.cpp names them.

    count, number: the file's `split.count` and `split.no`
    Raises CheckpointError.
    """
    if count in (0, 1):
        return
    if type(count) is not int or not 1 < count <= _MOST_PARTS:
        raise CheckpointError(f"{path}: split.count {count!r} is not a sound number")
    named = PART.search(path.name)
    if not named or int(named[2]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts, whose name should end with -00001-of-{count:05}.gguf"
        )
    if number != 0 or int(named[1]) != 1:
        first = path.with_name(f"{path.name[: named.start()]}-00001-of-{named[2]}.gguf")
        raise CheckpointError(f"{path} is a later part of a model: give its first part, {first}")
    for part in range(2, count + 1):
        yield path.with_name(f"{path.name[: named.start()]}-{part:05}-of-{count:05}.gguf")


def _dequantise(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    # Pass the data as one row, because gguf loops over groups of rows.
    return dequantize(raw.reshape(1, -1), kind)


class _Walker:
    """Parses the header front to back; every failure is a CheckpointError."""

    def __init__(self, file: OpenedFile) -> None:
        self._file = file
        self._size = file.size
        self._at = 0
        # The first bytes of the file, as far as they were read.
        self._data = b""

    def header(self) -> tuple[dict[str, Any], dict[str, _Entry]]:
        if self._take(4) != b"GGUF":
            raise self._error("the magic is not GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise self._error(f"version {version} is not 2 or 3 (or its byte order is big-endian)")
        tensors = self._count(24)
        fields = self._count(13)
        metadata = {}
        for _ in range(fields):
            key = self._string()
            if key in metadata:
                raise self._error(f"{key} occurs twice")
            metadata[key] = self._value(self._kind(), 0)
        infos = {}
        for _ in range(tensors):
            name = self._string()
            if name in infos:
                raise self._error(f"tensor {name} occurs twice")
            infos[name] = self._tensor_info(name)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._error(f"alignment {alignment!r} is not a sound number")
        base = -(-self._at // alignment) * alignment
        entries = {
            name: self._entry(name, dims, kind, base + offset)
            for name, (dims, kind, offset) in infos.items()
        }
        needed = max((each.start + each.nbytes for each in entries.values()), default=0)
        if needed > self._size:
            raise CheckpointError(
                f"{self._file.path} is incomplete: it has {self._size} of the {needed} bytes that "
                "its header names; download it again"
            )
        return metadata, entries

    def _tensor_info(self, name: str) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        dimensions = self._number("I")
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {dimensions} dimensions")
        dims = tuple(self._number("Q") for _ in range(dimensions))
        number = self._number("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._error(f"tensor {name} has unknown type {number}") from None
        return dims, kind, self._number("Q")

    def _entry(
        self, name: str, dims: tuple[int, ...], kind: GGMLQuantizationType, start: int
    ) -> _Entry:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = math.prod(dims)
        if elements <= 0 or dims[0] % block:
            raise self._error(f"tensor {name} of {dims} does not divide into blocks of {block}")
        nbytes = elements // block * block_bytes
        return _Entry(self._file, dims[::-1], kind, start, nbytes)

    def _value(self, kind: GGUFValueType, depth: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._number(_SCALARS[kind])
        if depth == _MAX_DEPTH:
            raise self._error("arrays are nested too deep")
        kind = self._kind()
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            length = self._count(size)
            raw = self._take(length * size)
            return GGUFArray(length, np.frombuffer(raw, "<" + _SCALARS[kind]))
        length = self._count(8)
        if kind == GGUFValueType.STRING:
            return GGUFArray(length, self._strings(length))
        for _ in range(length):
            self._value(kind, depth + 1)
        return GGUFArray(length, None)

    def _kind(self) -> GGUFValueType:
        number = self._number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._error(f"unknown value type {number}") from None

    def _strings(self, length: int) -> list[str]:
        """Read `length` strings in one tight loop: a vocabulary has a hundred thousand."""
        if length > _MOST_STRINGS:
            raise self._error(f"a list of {length} strings is longer than any vocabulary")
        data, at, size_at = self._data, self._at, struct.Struct("<Q").unpack_from
        held = len(data)
        found = []
        for _ in range(length):
            start = at + 8
            if start > held:
                if start > self._size:
                    raise self._error("it ends inside its header")
                data, held = self._more(start)
            at = start + size_at(data, at)[0]
            if at > held:
                if at > self._size:
                    raise self._error(f"a length of {at - start} is more than the file holds")
                data, held = self._more(at)
            found.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return found

    def _string(self) -> str:
        return self._take(self._count(1)).decode("utf-8", "replace")

    def _count(self, least_bytes_each: int) -> int:
        """Read the length of a list whose items take at least `least_bytes_each` bytes. Raises
        CheckpointError if the rest of the file cannot hold them.
        """
        count = self._number("Q")
        if count * least_bytes_each > self._size - self._at:
            raise self._error(f"a length of {count} is more than the file holds")
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, size: int) -> bytes:
        if size > self._size - self._at:
            raise self._error("it ends inside its header")
        self._at += size
        if self._at > len(self._data):
            self._more(self._at)
        return self._data[self._at - size : self._at]

    def _more(self, end: int) -> tuple[bytes, int]:
        """Read at least up to byte `end`, which must exist. Return all bytes so far, and how
        many.
        """
        held = len(self._data)
        wanted = min(self._size, max(end, 2 * held, _HEADER_BYTES))
        part = bytearray(wanted - held)
        self._file.fill(memoryview(part), held, "the header")
        self._data += part
        return self._data, wanted

    def _error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path} is not a sound GGUF file: {why}")
