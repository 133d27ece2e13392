"""Safetensors: one file, or shards with an index."""

from __future__ import annotations

import json
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open
from triforce_kernels.block_types import F8_E4M3

from offload.checkpoint.header import read_json
from offload.checkpoint.source import WHOLE, Corner
from offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from triforce_kernels.block_types import BlockType

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": None, "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FP8 = "F8_E4M3"
# Of a tensor in FP8: its scales, a number for each 128 by 128 of the tensor's.
SCALE_SUFFIX = "_scale_inv"
_SCALED = 128
_TORCH_NAMES = _DTYPES | {"F64": "float64", _FP8: "float8_e4m3fn"}
# So many elements are read at a time where they are converted.
_CHUNK_ELEMENTS = 4 << 20


class _Place(NamedTuple):
    """Where a tensor's bytes are. file: descriptor"""

    file: int
    dtype: str
    start: int
    nbytes: int


class SafetensorsSource:
    """A directory with model.safetensors, or with shards and their index. Files stay open.

    The library checks headers; bytes are read from here. What it maps for torch it maps writable,
    and a system refuses that for a file that is larger than its memory.
    """

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if a file is missing or damaged."""
        self._stack = ExitStack()
        self._tensors: dict[str, tuple[Path, object]] = {}
        self._places: dict[str, _Place] = {}
        try:
            wanted = _shards(directory)
            for path, names in wanted.items():
                handle = self._open(path)
                held = frozenset(handle.keys())
                absent = sorted((names or held) - held)
                if absent:
                    raise CheckpointError(
                        f"{path} does not hold {absent[0]}, which the index names"
                    )
                names = names or held
                self._tensors.update((name, (path, handle)) for name in names)
                self._places.update(self._find(path, names))
        except BaseException:
            self._stack.close()
            raise

    @property
    def files(self) -> list[Path]:
        return sorted({path for path, _ in self._tensors.values()})

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        path, handle = self._tensors[name]
        entry = handle.get_slice(name)
        if entry.get_dtype() not in _TORCH_NAMES:
            raise UnsupportedModelError(
                f"{path}: {name} is {entry.get_dtype()}, supported are {', '.join(_TORCH_NAMES)}"
            )
        shape = tuple(entry.get_shape())
        if entry.get_dtype() == _FP8:
            self._check_scales(name, shape)
        return shape

    def dtype(self, name: str) -> str | None:
        _, handle = self._tensors[name]
        return _DTYPES.get(handle.get_slice(name).get_dtype())

    def blocks(self, name: str) -> BlockType | None:
        return F8_E4M3 if self._places[name].dtype == _FP8 else None

    def read_blocks(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        import torch

        count = into.shape[-1] // F8_E4M3.nbytes
        rows = into.numel() // into.shape[-1]
        numbers = torch.empty(rows, count * _SCALED, dtype=torch.float8_e4m3fn)
        self._read_plain(name, numbers, corner)
        # Scales of the rows above the first, which have it in common, are left out below.
        above = corner.row % _SCALED
        scales = torch.empty(-(-(above + rows) // _SCALED), count)
        at = Corner(corner.row // _SCALED, corner.column // _SCALED)
        self._read_plain(name + SCALE_SUFFIX, scales, at)
        each = scales.repeat_interleave(_SCALED, 0)[above : above + rows]
        made = torch.empty(rows, count, F8_E4M3.nbytes, dtype=torch.uint8)
        made[..., :_SCALED] = numbers.view(torch.uint8).unflatten(1, (-1, _SCALED))
        made[..., _SCALED:] = each.unsqueeze(-1).view(torch.uint8)
        into.copy_(made.flatten(1).view(into.shape))

    def read(self, name: str, into: torch.Tensor, corner: Corner = WHOLE) -> None:
        if self._places[name].dtype != _FP8:
            self._read_plain(name, into, corner)
            return
        import torch
        from triforce_kernels.blocks import decode

        rows, columns = into.shape
        before = corner.column % _SCALED
        count = -(-(before + columns) // _SCALED)
        blocks = torch.empty(rows, count * F8_E4M3.nbytes, dtype=torch.uint8)
        self.read_blocks(name, blocks, Corner(corner.row, corner.column - before))
        step = max(1, _CHUNK_ELEMENTS // columns)
        for part, target in zip(blocks.split(step), into.split(step), strict=True):
            decoded = decode(part, F8_E4M3, into.dtype)
            target.copy_(decoded[:, before : before + columns])

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises UnsupportedModelError or CheckpointError."""
        path, _ = self._tensors[name]
        if len(shape) != 2 or shape[1] % _SCALED:
            raise UnsupportedModelError(
                f"{path}: {name} is {_FP8} of shape {list(shape)}; supported are matrices whose "
                f"rows are a multiple of {_SCALED} numbers"
            )
        expected = (-(-shape[0] // _SCALED), shape[1] // _SCALED)
        scales = name + SCALE_SUFFIX
        if scales not in self._tensors or self.shape(scales) != expected:
            raise CheckpointError(f"{path}: {scales} is missing or not of shape {list(expected)}")

    def _read_plain(self, name: str, into: torch.Tensor, corner: Corner) -> None:
        # A header is read without torch, which takes longer to load than a small model.
        import torch

        place, shape = self._places[name], self.shape(name)
        dtype = getattr(torch, _TORCH_NAMES[place.dtype])
        # Columns of the tensor, and of what is read of it.
        whole, width = (shape[-1], into.shape[-1]) if len(shape) > 1 else (1, 1)
        count = into.numel() // width
        row_bytes, start = whole * dtype.itemsize, corner.column * dtype.itemsize
        start += place.start + corner.row * row_bytes
        # The system reads all of it ahead.
        os.posix_fadvise(place.file, start, count * row_bytes, os.POSIX_FADV_WILLNEED)
        whole_rows = width == whole

        def fill(raw: memoryview, first: int) -> None:
            """Reads rows from one on, as many as the buffer takes."""
            if whole_rows:
                self._read(name, start + first * row_bytes, raw)
                return
            size = width * dtype.itemsize
            for row in range(len(raw) // size):
                part = raw[row * size : (row + 1) * size]
                self._read(name, start + (first + row) * row_bytes, part)

        if into.is_contiguous() and into.dtype == dtype and into.device.type == "cpu":
            fill(memoryview(into.view(-1).view(torch.uint8).numpy()), 0)
            return
        # A step is some whole indices of the first dimension.
        rows = into if into.dim() > 1 else into.view(1, -1)
        each = rows[0].numel() // width
        step = max(1, _CHUNK_ELEMENTS // rows[0].numel())
        for first in range(0, rows.shape[0], step):
            part = rows[first : first + step]
            raw = bytearray(part.numel() * dtype.itemsize)
            fill(memoryview(raw), first * each)
            part.copy_(torch.frombuffer(raw, dtype=dtype).view(part.shape))

    def _read(self, name: str, start: int, into: memoryview) -> None:
        """Fills a buffer from a byte of the file on. Raises CheckpointError."""
        path, _ = self._tensors[name]
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._places[name].file, [into[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {name} from {path}: {error}") from error
            if not count:
                raise CheckpointError(f"cannot read {name} from {path}: the file ends before it")
            done += count

    def _find(self, path: Path, names: set[str] | frozenset[str]) -> dict[str, _Place]:
        """The library has found the header sound."""
        file = os.open(path, os.O_RDONLY)
        self._stack.callback(os.close, file)
        (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
        header = json.loads(os.pread(file, length, 8))
        found = {}
        for name in names:
            begin, end = header[name]["data_offsets"]
            found[name] = _Place(file, header[name]["dtype"], 8 + length + begin, end - begin)
        return found

    def close(self) -> None:
        self._tensors.clear()
        self._places.clear()
        self._stack.close()

    def _open(self, path: Path):
        try:
            return self._stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Each file and the tensors the index places in it, None for all it holds."""
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
