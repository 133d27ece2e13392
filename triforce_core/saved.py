"""Contexts in files: safetensors with the tokens, each layer's KV, the scores of its chunks,
windows at some lengths, and checksums. Without checksums, damaged numbers would silently change
the output.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from triforce_core.decoding.contexts.snapshot import SavedMarks, Snapshot
from triforce_offload.checkpoint.opened import TensorsFile
from triforce_offload.errors import CheckpointError, UsageError
from triforce_offload.files import Output
from triforce_offload.kv.recent.marks import MOST_MARKS
from triforce_offload.kv.recent.shapes import RecentShape
from triforce_offload.kv.shape import KVShape
from triforce_offload.weights.formats import dtype_name

_VERSION = "triforce-offload context 2"
_OWN = ("format", "model", "scored_by")
# Name of the last tensor: CRC-32 of the header and of each tensor before it, in order.
_SUMS = "checksums"
_HEADER = "header"
# Names of the tensors of lengths at which there are marks, by the kind of store.
_LENGTHS = {"window": "marks", "state": "state_marks"}
_LENGTHS |= {kind: f"{kind}_marks" for kind in ("ngrams", "index")}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


class LoadedContext(NamedTuple):
    """A context that was loaded from a file.

    tokens: number of tokens whose KV was loaded
    about: texts that were saved with the context
    """

    tokens: int
    about: Mapping[str, str]


def digest(fingerprint: str) -> str:
    """Return the digest of a model's fingerprint that is stored in files."""
    return hashlib.sha256(fingerprint.encode()).hexdigest()


def write(
    path: str | Path, saved: Snapshot, shape: KVShape, model: str, about: Mapping[str, str]
) -> int:
    """Write a context to a file, layer by layer. Return its number of tokens.

    An existing file is replaced only when everything is written.

    model: digest of the model
    about: texts to save with the context
    Raises OutputError, LinkError, or UsageError for a context without a token.
    """
    count = len(saved.tokens)
    if not count:
        raise UsageError("there is no context to save: nothing was read yet")
    tokens = torch.tensor(saved.tokens, dtype=torch.int64)
    parts = {"tokens": (tokens.dtype, (count,))}
    if saved.scores is not None:
        parts["scores"] = (torch.float32, tuple(saved.scores.shape))
    parts |= {f"kv.{layer}": (shape.dtype, shape.size(count)) for layer in range(saved.layers)}
    for kind, marks in saved.marks.items():
        parts[_LENGTHS[kind]] = (torch.int64, (len(marks),))
        for index, (_, tensors) in enumerate(marks):
            parts |= {
                f"{name}.{index}": (tensor.dtype, tuple(tensor.shape))
                for name, tensor in tensors.items()
            }
    parts[_SUMS] = (torch.int64, (1 + len(parts),))
    header: dict[str, object] = {
        "__metadata__": {
            **about,
            **{"format": _VERSION, "model": model, "scored_by": saved.scored_by},
        }
    }
    end = 0
    for name, (dtype, sizes) in parts.items():
        start, end = end, end + torch.Size(sizes).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(sizes), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Private, because it contains a conversation.
    with Output(path, "context").writing(private=True) as file:
        file.write(len(text).to_bytes(8, "little"))
        sums = []
        for data in _data(text, tokens, saved):
            file.write(data)
            sums.append(zlib.crc32(data))
        file.write(_bytes(torch.tensor(sums)))
    return count


def _data(header: bytes, tokens: torch.Tensor, saved: Snapshot) -> Iterator[bytes | memoryview]:
    """Yield the contents of the file in order."""
    yield header
    yield _bytes(tokens)
    if saved.scores is not None:
        yield _bytes(saved.scores.float())
    for layer in range(saved.layers):
        yield _bytes(saved.layer_kv(layer))
    for marks in saved.marks.values():
        yield _bytes(torch.tensor([length for length, _ in marks]))
        for _, tensors in marks:
            yield from map(_bytes, tensors.values())


@contextmanager
def reading(
    path: str | Path,
    shape: KVShape,
    recent: Sequence[RecentShape],
    model: str,
    vocab: int,
    most: int,
    *,
    thorough: bool = False,
) -> Iterator[Snapshot]:
    """Open a context in a file. Its layers are read on demand, inside the `with` block.

    shape: shape of the KV of full-attention layers
    recent: shapes of the recent stores
    model: digest of the model that it must belong to
    vocab: number of tokens of the model's vocabulary
    most: the most tokens that the context may have
    thorough: whether to read all layers first, so that damage is found before anything changes
    Raises UsageError, which names what is wrong.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UsageError(f"cannot read a context from {path}: there is no such file")
    try:
        with closing(TensorsFile(path)) as file:
            about = file.metadata
            if about.get("format") != _VERSION:
                raise UsageError(f"{path} holds no context that this version wrote")
            if about.get("model") != model:
                raise UsageError(f"the context in {path} is another model's")
            _check(file, shape)
            _check_sum(file, _HEADER, file.header)
            tokens = _read(file, "tokens", torch.int64)
            if not len(tokens) or int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
                raise UsageError(f"the context in {path} has tokens that the model has not")
            if len(tokens) > most:
                raise UsageError(
                    f"the context in {path} has {len(tokens)} tokens, and the engine takes {most}"
                )
            marks = {each.kind: _marks(file, each, len(tokens)) for each in recent}
            for layer in range(shape.layers if thorough else 0):
                _read(file, f"kv.{layer}", shape.dtype)
            yield Snapshot(
                tokens.tolist(),
                shape.layers,
                lambda layer: _read(file, f"kv.{layer}", shape.dtype),
                _read(file, "scores", torch.float32) if "scores" in file.stored else None,
                about.get("scored_by", ""),
                marks,
                {name: text for name, text in about.items() if name not in _OWN},
            )
    except CheckpointError as error:
        raise UsageError(f"cannot read a context from {path}: {error}") from error


def _marks(file: TensorsFile, shape: RecentShape, count: int) -> SavedMarks:
    """Read the marks of a store of a context of `count` tokens. Raises UsageError or
    CheckpointError.
    """
    path, name = file.path, _LENGTHS[shape.kind]
    if name not in file.stored:
        raise UsageError(f"the context in {path} lacks {name}")
    _check_alike(file, name, (math.prod(file.stored[name].shape),), _NAMES[torch.int64])
    lengths = _read(file, name, torch.int64).tolist()
    if lengths != sorted({*lengths, count}) or lengths[0] < 1 or len(lengths) > MOST_MARKS + 1:
        raise UsageError(f"the context in {path} has {name} at {lengths} of {count} tokens")
    return [(length, _mark(file, shape, index, length)) for index, length in enumerate(lengths)]


def _mark(
    file: TensorsFile, shape: RecentShape, index: int, length: int
) -> dict[str, torch.Tensor]:
    """Read the tensors of a mark. Raises UsageError or CheckpointError."""
    names = {name: f"{name}.{index}" for name in shape.mark_tensors(0)}
    for stored in names.values():
        if stored not in file.stored:
            raise UsageError(f"the context in {file.path} lacks {stored}")
    held = shape.held_at(length, {name: _sizes(file, stored) for name, stored in names.items()})
    if held is None:
        raise UsageError(
            f"{shape.kind} {index} of the context in {file.path} does not hold {length} tokens"
        )
    found = {}
    for name, tensor in shape.mark_tensors(held).items():
        dtype = getattr(torch, dtype_name(tensor.dtype))
        sizes = tuple(file.stored[names[name]].shape)
        written = sizes if _sizes(file, names[name]) == tensor.shape else tensor.shape
        _check_alike(file, names[name], written, _NAMES[dtype])
        found[name] = _read(file, names[name], dtype).view(tensor.shape)
    return found


def _sizes(file: TensorsFile, name: str) -> tuple[int, ...]:
    """Return the sizes of a tensor of a mark. In older files, windows have two dimensions for
    layers, and keys and values, which are one here.
    """
    sizes = tuple(file.stored[name].shape)
    return (sizes[0] * sizes[1], *sizes[2:]) if len(sizes) == 5 else sizes


def _read(file: TensorsFile, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read a tensor. Raises CheckpointError, also if its checksum differs."""
    tensor = torch.empty(file.stored[name].shape, dtype=dtype)
    file.read(name, tensor)
    _check_sum(file, name, _bytes(tensor))
    return tensor


def _check_sum(file: TensorsFile, what: str, data: bytes | memoryview) -> None:
    """Raise CheckpointError if a checksum differs. what: name of a tensor, or _HEADER"""
    sums = torch.empty(file.stored[_SUMS].shape, dtype=torch.int64)
    file.read(_SUMS, sums)
    order = [_HEADER, *(name for name in file.stored if name != _SUMS)]
    if int(sums[order.index(what)]) != zlib.crc32(data):
        raise CheckpointError(f"its {what} is damaged: its checksum does not match")


def _check(file: TensorsFile, shape: KVShape) -> None:
    """Raise UsageError unless the file has the tensors of a context of this shape."""
    path, stored = file.path, file.stored
    if "tokens" not in stored:
        raise UsageError(f"the context in {path} lacks tokens")
    count = stored["tokens"].shape[0] if stored["tokens"].shape else 0
    wanted = {"tokens": ((count,), "I64")} | {
        f"kv.{layer}": (shape.size(count), _NAMES[shape.dtype]) for layer in range(shape.layers)
    }
    wanted[_SUMS] = ((len(stored),), "I64")
    for name, (sizes, dtype) in wanted.items():
        if name not in stored:
            raise UsageError(f"the context in {path} lacks {name}")
        _check_alike(file, name, sizes, dtype)
    if "scores" in stored:
        sizes, dtype = stored["scores"].shape, stored["scores"].dtype
        if len(sizes) != 3 or sizes[:2] != (shape.layers, shape.kv_heads) or dtype != "F32":
            raise UsageError(f"scores of the context in {path} are {dtype} {list(sizes)}")


def _check_alike(file: TensorsFile, name: str, sizes: tuple[int, ...], dtype: str) -> None:
    """Raise UsageError unless a tensor has these sizes and this dtype."""
    found = file.stored[name]
    if found.shape != sizes or found.dtype != dtype:
        raise UsageError(
            f"{name} of the context in {file.path} is {found.dtype} {list(found.shape)}, and the "
            f"engine's is {dtype} {list(sizes)}"
        )


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).flatten().numpy())
