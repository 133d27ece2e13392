"""Places at which the machine may fail a run, counted; the one that is asked for fails.

`planted()` puts a counter before every allocation, copy, wait and write that a run makes. A run in
which none fails counts them by kind; another, `arm`ed, fails at one.
"""

from __future__ import annotations

import builtins
import errno
import os
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triforce_core.parallel.collectives import Collectives
from triforce_offload import files
from triforce_offload.checkpoint import layer_cache
from triforce_offload.errors import DoesNotFitError, LinkError
from triforce_offload.link import emulated
from triforce_offload.link.emulated import EmulatedLink
from triforce_offload.memory import device, host
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.memory.host import HostMemory

# What fails where, and how the machine says so.
KINDS: dict[str, Callable[[], BaseException]] = {
    "budget": lambda: DoesNotFitError("device memory for the test", 2, 1, "wait"),
    "device memory": lambda: torch.OutOfMemoryError("CUDA out of memory. planted"),
    "temporary": lambda: torch.OutOfMemoryError("CUDA out of memory. planted"),
    "host memory": lambda: DoesNotFitError("host memory for the test", 2, 1, "wait"),
    "mapping": lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    "copy asked": lambda: torch.AcceleratorError("CUDA error: planted"),
    "copy": lambda: OSError("planted"),
    "wait": lambda: LinkError("a transfer did not finish: planted"),
    "write": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "collective": lambda: RuntimeError("planted: a peer closed the connection"),
}


class Faults:
    """counts: of each kind, how many places were passed since `arm`. fired: whether one failed"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.arm()

    def arm(self, kind: str = "", at: int = 0) -> None:
        """The place number `at` of a kind fails, counted from here; none if 0."""
        with self._lock:
            self.counts: Counter[str] = Counter()
            self.fired = False
            self._kind, self._at = kind, at

    def disarm(self) -> None:
        """Nothing fails any more."""
        with self._lock:
            self._at = 0

    def pass_by(self, kind: str) -> None:
        """Counts a place of this kind. Raises what the machine would if it is the one."""
        with self._lock:
            self.counts[kind] += 1
            hit = kind == self._kind and self.counts[kind] == self._at
            self.fired |= hit
        if hit:
            self.fail(kind)

    def fail(self, kind: str) -> None:
        """What happens at the place that was asked for."""
        raise KINDS[kind]()


class Held:
    """Device buffers and host mappings that are really there, whatever was accounted."""

    def __init__(self) -> None:
        self._known: list[weakref.ref] = []

    def note(self, owner: object) -> None:
        self._known.append(weakref.ref(owner))

    @property
    def alive(self) -> int:
        self._known = [ref for ref in self._known if ref() is not None]
        return len(self._known)


class _Temporaries(TorchDispatchMode):
    """Every operation of this thread whose result is new memory."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        own = not function.is_view and not function._schema.is_mutable
        # What takes no bytes is always there.
        if own and any(isinstance(it, torch.Tensor) and it.numel() for it in tree_leaves(made)):
            self._faults.pass_by("temporary")
        return made


class _File:
    """A file each of whose writes may fail."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file = file
        self._faults = faults

    def write(self, data: Any) -> int:
        self._faults.pass_by("write")
        return self._file.write(data)

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def temporaries(faults: Faults) -> Iterator[None]:
    """Inside, results of operations are among the places: "temporary"."""
    with _Temporaries(faults):
        yield


@contextmanager
def planted(faults: Faults, held: Held) -> Iterator[None]:
    """Inside, every place but temporaries is counted, and what is allocated is noted."""

    def before(kind: str, original: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            faults.pass_by(kind)
            return original(*args, **options)

        return call

    def allocate(memory: DeviceMemory, size: int, purpose: str) -> Any:
        allocation = real_allocate(memory, size, purpose)
        held.note(allocation.bytes.untyped_storage())
        return allocation

    def new_mapping(kind: type, size: int) -> Any:
        faults.pass_by("mapping")
        mapping = real_mapping(kind, size)
        held.note(mapping)
        return mapping

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        made = builtins.open(file, mode, *args, **options)  # noqa: SIM115
        return _File(made, faults) if mode == "wb" else made

    real_allocate, real_mapping = DeviceMemory.allocate, host._Mapping.__new__
    os_ = _Proxy(os, replace=before("write", os.replace), fchmod=before("write", os.fchmod))
    made = SimpleNamespace(mkstemp=before("write", tempfile.mkstemp))
    torch_ = _Proxy(torch, empty=before("device memory", torch.empty))
    with ExitStack() as stack:
        for owner, name, new in (
            (DeviceMemory, "allocate", allocate),
            (DeviceMemory, "reserve", before("budget", DeviceMemory.reserve)),
            (device, "torch", torch_),
            (HostMemory, "arena", before("host memory", HostMemory.arena)),
            (host._Mapping, "__new__", new_mapping),
            (EmulatedLink, "to_device", before("copy asked", EmulatedLink.to_device)),
            (EmulatedLink, "to_host", before("copy asked", EmulatedLink.to_host)),
            (EmulatedLink, "wait", before("wait", EmulatedLink.wait)),
            (EmulatedLink, "synchronize", before("wait", EmulatedLink.synchronize)),
            (files, "tempfile", made),
            (files, "os", os_),
            (layer_cache, "os", os_),
            (layer_cache, "tempfile", made),
            (emulated._Direction, "_copy", before("copy", emulated._Direction._copy)),
            (Collectives, "sum", before("collective", Collectives.sum)),
            (Collectives, "gather", before("collective", Collectives.gather)),
            (Collectives, "spread", before("collective", Collectives.spread)),
        ):
            stack.enter_context(patch.object(owner, name, new))
        for module in (files, layer_cache):
            stack.enter_context(patch.object(module, "open", opened, create=True))
        yield


class _Proxy:
    """A module, some of whose names are others."""

    def __init__(self, module: Any, **instead: Any) -> None:
        self._module = module
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
