"""What ranks tell each other: calls with their arguments, and how these are written as JSON."""

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
from triforce_core.settings import EngineConfig, MachineSettings, MethodSettings
from triforce_offload.errors import RankError, UsageError
from triforce_offload.link.trace import Span
from triforce_offload.plan.placement import Placement
from triforce_offload.ranks import Call

# What a frame is: JSON, or the bytes of a tensor whose sizes came before it.
MESSAGE, TENSOR = b"m", b"t"
# Of a message, which may be the timeline of a long run, and of a tensor: a layer's KV.
MOST_BYTES = 1 << 30
MOST_TENSOR_BYTES = 1 << 38


class DamagedMessageError(RankError):
    """What came from another rank is not what ranks send."""


class Tokens(NamedTuple):
    """Token ids. Those that are on a device follow from there: values is None then."""

    count: int
    values: list[int] | None


class Failure(NamedTuple):
    """What is said of a rank's end. first_hand: whether that is not the end of another one."""

    message: str
    exit_code: int
    first_hand: bool


class Sizes(NamedTuple):
    """Of a tensor whose bytes follow. dtype: its name in torch"""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sizes:
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises DamagedMessageError."""
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else None
        if not isinstance(dtype, torch.dtype):
            raise DamagedMessageError(f"a tensor of {self.dtype!r} came, which is no dtype")
        return dtype

    @property
    def nbytes(self) -> int:
        """Raises DamagedMessageError."""
        shape = self.shape
        if type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
            raise DamagedMessageError(f"a tensor of shape {shape!r} came")
        size = prod(shape) * self.torch_dtype.itemsize
        if size > MOST_TENSOR_BYTES:
            raise DamagedMessageError(f"a tensor of {size} bytes is more than {MOST_TENSOR_BYTES}")
        return size


# Everything besides JSON's own types that a message may hold. Nothing else is made from one.
_RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *CALLS,
        *(Tokens, Failure, Sizes, Span),
        *(EngineConfig, MachineSettings, MethodSettings, Placement),
    )
}
# JSON objects stand for these: a kind, and what it is made of.
_KIND, _OF = "kind", "of"
_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "Path": lambda of: Path(*of),
    **{name: lambda of, kind=kind: _record(kind, of) for name, kind in _RECORDS.items()},
}


def encoded(message: Any) -> bytes:
    """A message as JSON in UTF-8. Lists, tuples and what is named above come back as such; a range
    as a list. Raises TypeError for anything else.
    """
    # Paths may hold bytes that are no UTF-8: as surrogates, escaped in ASCII.
    return json.dumps(_plain(message), separators=(",", ":")).encode("ascii")


def decoded(data: bytes | bytearray) -> Any:
    """The message. Raises DamagedMessageError, or UsageError for settings that cannot be."""
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
        # Texts of many tokens are such.
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
    """Make a record of its values. Raises TypeError or ValueError for those it cannot have."""
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
    """Return whether a value is what an annotation says. Tensors come as `Tokens`."""
    origin = get_origin(hint)
    if origin is UnionType:
        return any(_is_a(value, option) for option in get_args(hint))
    if origin in (list, tuple):
        return type(value) is origin and all(type(each) is get_args(hint)[0] for each in value)
    if hint is torch.Tensor:
        return type(value) is Tokens
    return isinstance(value, hint) if hint is Path else type(value) is hint


def packed(call: Call) -> tuple[Call, list[torch.Tensor]]:
    """Return a call as it is sent, and the tokens that follow it from device to device."""
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
    """Return a call as it is made. spread: receives the tokens that follow it."""

    def tensor(tokens: Tokens) -> torch.Tensor:
        if tokens.values is not None:
            return torch.tensor(tokens.values, dtype=torch.int64, device=device)
        return spread(torch.empty(tokens.count, dtype=torch.int64, device=device))

    made = {name: tensor(value) for name, value in _tensors(call, Tokens)}
    return replace(call, **made) if made else call


def _tensors(call: Call, kind: type) -> list[tuple[str, Any]]:
    values = ((field.name, getattr(call, field.name)) for field in fields(call))
    return [(name, value) for name, value in values if isinstance(value, kind)]
