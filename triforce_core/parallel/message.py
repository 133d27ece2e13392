"""What ranks tell each other: calls with their arguments, and how these are written as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.errors import RankError, UsageError
from offload.link.trace import Span
from offload.placement import Placement
from triforce_core.settings import EngineConfig, MachineSettings, MethodSettings

# What a frame is: JSON, or the bytes of a tensor whose sizes came before it.
MESSAGE, TENSOR = b"m", b"t"
# Of a message, which may be the timeline of a long run, and of a tensor: a layer's KV.
MOST_BYTES = 1 << 30
MOST_TENSOR_BYTES = 1 << 38


class DamagedMessageError(RankError):
    """What came from another rank is not what ranks send."""


class Call(NamedTuple):
    """What is about to be done, with everything it is done to."""

    name: str
    arguments: tuple[Any, ...]


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


# Everything besides JSON's own that a message may hold. Nothing else is made of one.
_RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Call, Tokens, Failure, Sizes, Span),
        *(EngineConfig, MachineSettings, MethodSettings, Placement),
    )
}
# JSON objects stand for these: a kind, and what it is made of.
_KIND, _OF = "kind", "of"
_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "Path": lambda of: Path(*of),
    **{name: lambda of, kind=kind: kind(*of) for name, kind in _RECORDS.items()},
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


def packed(name: str, arguments: tuple[Any, ...]) -> tuple[Call, list[torch.Tensor]]:
    """A call as it is sent, and the tokens that follow it from device to device."""
    sent, following = [], []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            on_host = argument.device.type == "cpu"
            sent.append(Tokens(argument.shape[0], argument.tolist() if on_host else None))
            if not on_host:
                following.append(argument)
        else:
            sent.append(argument)
    return Call(name, tuple(sent)), following


def unpacked(
    call: Call, device: torch.device, spread: Callable[[torch.Tensor], torch.Tensor]
) -> Call:
    """A call as it is made. spread: receives what follows it."""

    def tensor(tokens: Tokens) -> torch.Tensor:
        if tokens.values is not None:
            return torch.tensor(tokens.values, dtype=torch.int64, device=device)
        return spread(torch.empty(tokens.count, dtype=torch.int64, device=device))

    arguments = (tensor(a) if isinstance(a, Tokens) else a for a in call.arguments)
    return Call(call.name, tuple(arguments))
