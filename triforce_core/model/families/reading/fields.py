"""Typed access to the fields of a checkpoint's header."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triforce_offload.errors import CheckpointError, UnsupportedModelError

_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class Fields:
    """Typed access to the fields of a parsed header. Every error names the field.

    read: names of the fields that were read
    """

    raw: Mapping[str, Any]
    source: str
    read: set[str] = field(default_factory=set, compare=False)

    def get(self, name: str) -> Any:
        """Return a field as it is, None if it is not there."""
        self.read.add(name)
        return self.raw.get(name)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 40:
            wanted = "a positive number" if least == 1 else f"a number from {least} on"
            raise CheckpointError(f"{self.source}: {name} must be {wanted}, got {value!r}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise CheckpointError(f"{self.source}: {name} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {name} must be true or false, got {value!r}")
        return value

    def only(self, name: str, *values: object) -> None:
        """Raise UnsupportedModelError if a field is there and has another value than these."""
        if self.get(name) not in (None, *values):
            known = " or ".join(repr(each) for each in values if not isinstance(each, list))
            raise UnsupportedModelError(
                f"{self.source}: {name} {self.raw[name]!r:.40} is not supported"
                + (f" (only {known})" if known else "")
            )

    def of_layers(self, name: str, count: int, default: Sequence[Any] | None = None) -> list[Any]:
        """Return a list with a value of each layer, or the default. Raises CheckpointError."""
        value = self.get(name)
        value = list(default) if value is None and default is not None else value
        if not isinstance(value, list) or len(value) != count:
            given = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
            raise CheckpointError(
                f"{self.source}: {name} must be a list of {count}, one for each layer, got {given}"
            )
        return value

    def wholes(self, name: str, count: int, default: Sequence[int]) -> list[int]:
        """Return a positive number of each layer, or the default. Raises CheckpointError."""
        values = self.of_layers(name, count, default)
        return [Fields({name: value}, self.source).whole(name) for value in values]

    def _get(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        return value


def layer_count(fields: Fields, name: str) -> int:
    """Return the number of layers in a header. Raises CheckpointError."""
    count = fields.whole(name)
    if count > _MAX_LAYERS:
        raise CheckpointError(f"{count} layers are more than {_MAX_LAYERS}")
    return count


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Convert None, an id or a list of ids to a tuple. Raises CheckpointError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
        raise CheckpointError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)
