"""The compiled kernels of the processor: finding, checking and calling them.

`setup.py` compiles `source/` if there is a C compiler. Without one, the references run instead.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from triforce_kernels.host.structures import STRUCTURES

# Makes of vector units: names of the C kernels, from the best to the plainest. One that runs here
# may be forced, so that tests compare them.
VARIABLE = "TRIFORCE_VECTORS"
# As in `source/host.h`. A library of another version is not used.
_VERSION = 14

_Long, _Address = ctypes.c_int64, ctypes.c_void_p


class LibraryError(RuntimeError):
    """The compiled kernels cannot run here."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if they were not compiled for this version.

    Raises LibraryError if the environment asks for vector units that are not here.
    """
    paths = [Path(__file__).with_name("_host" + suffix) for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    try:
        found = ctypes.CDLL(str(path))
        if found.triforce_version() != _VERSION or not _same_structures(found):
            return None
        found.triforce_make.restype = ctypes.c_char_p
        found.triforce_product.argtypes = (_Address, ctypes.c_int)
        found.triforce_decode.argtypes = (_Address, _Long, _Address, ctypes.c_int)
        found.triforce_fill_grid.argtypes = (_Long, _Address, _Long)
        found.triforce_attend.argtypes = (_Address, _Address, _Address, ctypes.c_int)
        found.triforce_attend_whole.argtypes = (_Address, _Address, _Address, ctypes.c_int)
        found.triforce_experts.argtypes = (_Address, ctypes.c_int)
        found.triforce_expert_mlp.argtypes = (_Address, ctypes.c_int)
        found.triforce_tiles.argtypes = (_Address, *[_Long] * 5, *[_Address] * 5)
        found.triforce_weighted_sums.argtypes = (*[_Address] * 3, *[_Long] * 3, _Address)
        found.triforce_choose.argtypes = [_Address] * 6
        found.triforce_sequence.argtypes = (_Address, _Address, _Long, ctypes.c_int)
        found.triforce_map.argtypes = (_Long, _Address, _Address, _Long)
        for name in ("decode_kv", "join_fp8", "join_quants", "delta", "norm", "gated", "rope"):
            getattr(found, f"triforce_{name}").argtypes = (_Address, ctypes.c_int)
        found.triforce_split_fp8.argtypes = found.triforce_split_quants.argtypes = (_Address,)
        found.triforce_split_fp8.restype = _Long
        found.triforce_sum.argtypes = (_Address, _Long, ctypes.c_int)
        found.triforce_sum.restype = ctypes.c_uint64
    except (OSError, AttributeError):
        return None
    if wanted := os.environ.get(VARIABLE):
        if wanted not in (names := makes(found)):
            raise LibraryError(f"{VARIABLE} is {wanted!r}; here run {', '.join(names)}")
        found.triforce_use_make(names.index(wanted))
    else:
        found.triforce_use_make(0)
    return found


def _same_structures(found: ctypes.CDLL) -> bool:
    """Whether the library was compiled with the structures of `structures`."""
    return all(
        getattr(found, f"triforce_size_of_{kind.__name__.lower()}")() == ctypes.sizeof(kind)
        for kind in STRUCTURES
    )


def makes(found: ctypes.CDLL) -> list[str]:
    """Return the names of the vector units that the library knows and this processor has, the best
    first.
    """
    names = []
    while name := found.triforce_make(len(names)):
        names.append(name.decode())
    return names


def sum_of(numbers: torch.Tensor) -> int:
    """Return the sum of int64 numbers, wrapped around: reads memory and does nothing else."""
    found, count = library(), numbers.numel()
    return found.triforce_sum(numbers.data_ptr(), count, torch.get_num_threads())


def vectors() -> str | None:
    """Return the name of the vector units that are used, or why those that were asked for are not.
    None without compiled kernels.
    """
    try:
        found = library()
    except LibraryError as error:
        return str(error)
    return found and (os.environ.get(VARIABLE) or makes(found)[0])


def openmp_libraries() -> list[str]:
    """Paths of the GNU OpenMP libraries that this process has loaded."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in mapped.splitlines() if "libgomp" in line}
    return sorted(path for path in paths if Path(path).name.startswith("libgomp"))
