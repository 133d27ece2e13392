"""Every operation on memory of a device: what it reads and writes, and whether it is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Their results' shapes, or results themselves, are only known on the host: it waits for them.
_WAITED_FOR = {
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::_unique2",
}


# Products of more multiplications give zeros: they are there to time a device.
_LARGEST_PRODUCT = 1 << 34


@dataclass(frozen=True)
class _Kind:
    """What a schema says of an operation.

    written: positions and names of the arguments that it writes
    view: whether its results are views, and it computes nothing
    waited_for: whether the host waits for what it gives
    """

    written: tuple[int | str, ...]
    view: bool
    waited_for: bool


class Operations(TorchDispatchMode):
    """Inside, each operation of this thread is one of the current stream of a device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the compiler: that takes seconds, and looks for the real torch.cuda.
        return False

    def __init__(self, machine: Any, index: int) -> None:
        super().__init__()
        self._machine = machine
        self._index = index
        device = machine.devices[index]
        if device.error is not None:
            error, device.error = device.error, None
            raise RuntimeError(f"CUDA error: {error}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        kind = _kind(func)
        here = self._machine
        if kind.view:
            return func(*args, **kwargs)
        if kind.waited_for:
            here.refuse_capture(str(func))
        if here.capturing is not None:
            if kwargs.get("generator") is not None:
                raise here.refusal("a generator that is not registered with the graph")
            return here.capturing.record(func, args, kwargs, kind.written, self._index)
        result = _zeros(args) if _is_too_large(func, args) else func(*args, **kwargs)
        self.note(func, args, kwargs, kind.written)
        if kind.waited_for:
            here.host_saw(here.current_stream(self._index).clock)
        return result

    def note(self, func: Any, args: tuple, kwargs: dict, written: tuple[int | str, ...]) -> None:
        """Notes which bytes an operation used. Raises RaceError."""
        use_all(self._machine, self._index, str(func), args, kwargs, written)


def use_all(
    machine: Any,
    index: int,
    what: str,
    args: tuple,
    kwargs: dict,
    written: tuple[int | str, ...],
) -> None:
    """One operation of the current stream of a device uses all of its arguments."""
    device, stream = machine.devices[index], machine.current_stream(index)
    stream.run()
    stream.tick()
    for place, value in (*enumerate(args), *kwargs.items()):
        for tensor in tensors_in(value):
            found = device.find(tensor)
            if found is not None:
                machine.use(found.log, tensor, stream, writes=place in written, what=what)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


def _is_too_large(func: Any, args: tuple) -> bool:
    """Whether an operation is a product that times a device, and would take minutes here."""
    if func is not torch.ops.aten.mm.default:
        return False
    (rows, inner), columns = args[0].shape, args[1].shape[1]
    return rows * inner * columns > _LARGEST_PRODUCT


def _zeros(matrices: tuple) -> torch.Tensor:
    return matrices[0].new_zeros(matrices[0].shape[0], matrices[1].shape[1])


@cache
def _is_made_of_others(func: Any) -> bool:
    """Whether an operation has no kernel of its own: its schema may call a copy a view."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.has_kernel_for_dispatch_key(composite) and not func.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CPU
    )


@cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    written: list[int | str] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [place, argument.name]
    results = schema.returns
    view = not written and bool(results) and all(each.alias_info is not None for each in results)
    return _Kind(tuple(written), view, schema.name in _WAITED_FOR)


def returned(func: Any, args: tuple, kwargs: dict) -> Any:
    """What an operation that only writes its arguments returns: those that its schema says."""
    by_alias = {}
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for alias in argument.alias_info.before_set:
                by_alias[alias] = value
    found = tuple(by_alias[next(iter(it.alias_info.before_set))] for it in func._schema.returns)
    return found[0] if len(found) == 1 else found or None
