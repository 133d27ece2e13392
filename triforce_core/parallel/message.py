"""Messages between ranks: calls with their arguments, and their encoding as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import torch

from triforce_core.decoding.contexts.calls import CALLS
from triforce_core.machine_settings import MachineSettings
from triforce_core.plan.choice import Choice
from triforce_core.settings import EngineConfig, MethodSettings
from triforce_offload.errors import RankError, UsageError
from triforce_offload.link.trace import Span
from triforce_offload.plan.placement import Placement
from triforce_offload.ranks import Call

# The kinds of a frame: JSON, or the bytes of a tensor whose sizes the previous frame gave.
MESSAGE, TENSOR = b"m", b"t"
# Limits for a message, which may be the timeline of a long run, and for a tensor with a layer's KV.
MOST_BYTES = 1 << 30
MOST_TENSOR_BYTES = 1 << 38


class DamagedMessageError(RankError):
    """Data from another rank is not a valid message."""


class Tokens(NamedTuple):
    """Token ids. `values` is None for ids on a device, which follow from device to device."""

    count: int
    values: list[int] | None


class Failure(NamedTuple):
    """Why a rank ends.

    first_hand: whether the rank failed itself, and not because another one did
    """

    message: str
    exit_code: int
    first_hand: bool


class Sizes(NamedTuple):
    """The sizes of a tensor whose bytes follow. dtype: the name of the dtype in torch"""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sizes:
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tensor. Raises DamagedMessageError."""
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else None
        if not isinstance(dtype, torch.dtype):
            raise DamagedMessageError(f"a tensor of {self.dtype!r} came, which is no dtype")
        return dtype

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes. Raises DamagedMessageError."""
        shape = self.shape
        if type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
            raise DamagedMessageError(f"a tensor of shape {shape!r} came")
        size = prod(shape) * self.torch_dtype.itemsize
        if size > MOST_TENSOR_BYTES:
            raise DamagedMessageError(f"a tensor of {size} bytes is more than {MOST_TENSOR_BYTES}")
        return size


# All types besides JSON's own that a message may contain. Decoding creates no others.
_RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *CALLS,
        *(Tokens, Failure, Sizes, Span),
        *(EngineConfig, MachineSettings, MethodSettings, Placement, Choice),
    )
}
# JSON objects stand for these types: an object gives the kind and the parts of a value.
_KIND, _OF = "kind", "of"
_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "Path": lambda of: Path(*of),
    **{name: lambda of, kind=kind: _record(kind, of) for name, kind in _RECORDS.items()},
}


def encoded(message: Any) -> bytes:
    """Return a message as JSON, in ASCII.

    Decoding restores lists, tuples and the types above; a range becomes a list. Raises TypeError
    for other types.
    """
    # Paths may contain bytes that are not UTF-8. They become surrogates, which ASCII output
    # escapes.
    return json.dumps(_plain(message), separators=(",", ":")).encode("ascii")


def decoded(data: bytes | bytearray) -> Any:
    """Return the decoded message.

    Raises DamagedMessageError, or UsageError for invalid settings.
    """
    try:
        return json.loads(data, object_hook=_made)
    except UsageError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise DamagedMessageError(f"a message of {len(data)} bytes is damaged: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, range):
        # A fast path for long lists of token ids.
        return list(value) if all(type(each) is int for each in value) else [*map(_plain, value)]
    name = type(value).__name__
    if type(value) is tuple:
        return {_KIND: "tuple", _OF: [*map(_plain, value)]}
    if type(value) is dict:
        return {_KIND: "dict", _OF: [[_plain(key), _plain(of)] for key, of in value.items()]}
    if isinstance(value, Path):
        return {_KIND: "Path", _OF: [str(value)]}
    if _RECORDS.get(name) is not type(value):
        raise TypeError(f"ranks do not send {type(value).__name__}")
    own = [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else value
    return {_KIND: name, _OF: [*map(_plain, own)]}


def _made(found: dict[str, Any]) -> Any:
    if found.keys() != {_KIND, _OF} or type(found[_OF]) is not list:
        raise ValueError(f"an object with {', '.join(map(repr, found))}")
    return _MADE[found[_KIND]](found[_OF])


def _record(kind: type, of: list[Any]) -> Any:
    """Make a record from its values. Raises TypeError or ValueError for invalid values."""
    if not issubclass(kind, Call):
        return kind(*of)
    values = dict(zip((field.name for field in fields(kind)), of, strict=True))
    for name, value in values.items():
        hint = _hints(kind)[name]
        if not _is_a(value, hint):
            raise TypeError(f"{name} of {kind.__name__} is {value!r}, which is no {hint}")
    return kind(**values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_a(value: Any, hint: Any) -> bool:
    """Return whether a value matches an annotation. `Tokens` stand for tensors."""
    origin = get_origin(hint)
    if origin is UnionType:
        return any(_is_a(value, option) for option in get_args(hint))
    if origin in (list, tuple):
        return type(value) is origin and all(type(each) is get_args(hint)[0] for each in value)
    if hint is torch.Tensor:
        return type(value) is Tokens
    return isinstance(value, hint) if hint is Path else type(value) is hint


def packed(call: Call) -> tuple[Call, list[torch.Tensor]]:
    """Return the call to send, and the tokens on the device that follow it."""
    sent, following = {}, []
    for name, value in _tensors(call, torch.Tensor):
        on_host = value.device.type == "cpu"
        sent[name] = Tokens(value.shape[0], value.tolist() if on_host else None)
        if not on_host:
            following.append(value)
    return (replace(call, **sent) if sent else call), following


def unpacked(
    call: Call, device: torch.device, spread: Callable[[torch.Tensor], torch.Tensor]
) -> Call:
    """Return a received call with its tensors. spread: receives tokens that follow on the device"""

    def tensor(tokens: Tokens) -> torch.Tensor:
        if tokens.values is not None:
            return torch.tensor(tokens.values, dtype=torch.int64, device=device)
        return spread(torch.empty(tokens.count, dtype=torch.int64, device=device))

    made = {name: tensor(value) for name, value in _tensors(call, Tokens)}
    return replace(call, **made) if made else call


def _tensors(call: Call, kind: type) -> list[tuple[str, Any]]:
    values = ((field.name, getattr(call, field.name)) for field in fields(call))
    return [(name, value) for name, value in values if isinstance(value, kind)]
