"""What specifications of layers have in common."""

from __future__ import annotations

from dataclasses import fields

# Shapes of a layer's tensors by name, in the order in which they are used.
Shapes = dict[str, tuple[int, ...]]


class Described:
    """A frozen dataclass whose repr leaves out what newer versions added, while it has its default.

    The repr is a part of the identity of a checkpoint, and so of contexts that older versions
    saved. Fields are newer if their name is in `_NEWER`.
    """

    _NEWER: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name not in self._NEWER or getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"
