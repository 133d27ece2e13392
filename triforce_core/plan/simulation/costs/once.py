"""Results that a search asks for many times, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def once_for_each(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return a method of a frozen object that computes its result once for each of its arguments,
    which are small numbers and flags. The object keeps the results.
    """
    name = f"_{method.__name__}_by_arguments"

    @wraps(method)
    def known(self: Any, *args: Any, **options: Any) -> _Result:
        found = self.__dict__.setdefault(name, {})
        key = (args, *options.items())
        if key not in found:
            found[key] = method(self, *args, **options)
        return found[key]

    return known
