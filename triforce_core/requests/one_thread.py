"""One thread at a time: an engine's parts take no locks of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def one_thread_at_a_time(*names: str) -> Callable[[_Class], _Class]:
    """Return a class decorator. Of the named methods, one thread at a time runs one; others wait.

    Instances have a reentrant lock, `busy`. A generator would hold it only until its first `next`,
    so name what it calls.
    """

    def decorated(cls: _Class) -> _Class:
        for name in names:
            setattr(cls, name, _guarded(getattr(cls, name)))
        return cls

    return decorated


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        with self.busy:
            return method(self, *args, **options)

    return guarded
