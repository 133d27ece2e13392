"""The compiled kernels of the processor: finding, checking and calling them.

`setup.py` compiles `source/` if there is a C compiler. Without one, the references run instead.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

# Makes of vector units: names of the C kernels, from the best to the plainest. One that runs here
# may be forced, so that tests compare them.
VARIABLE = "TRIFORCE_VECTORS"
# As in `source/host.h`. A library of another version is not used.
_VERSION = 1

_Long, _Address = ctypes.c_int64, ctypes.c_void_p


class Weight(ctypes.Structure):
    """`Weight` of `source/host.h`."""

    _fields_ = (
        *((name, _Long) for name in ("format", "columns", "stride")),
        *((name, _Address) for name in ("data", "low", "base", "places", "starts", "patterns")),
        *((name, _Long) for name in ("room", "groups", "first")),
        *((name, _Address) for name in ("scale", "offset")),
        *((name, _Long) for name in ("group", "scale_format", "scale_stride")),
    )


class Product(ctypes.Structure):
    """`Product` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("weight", "x", "out")),
        *((name, _Long) for name in ("rows", "outputs", "x_stride", "out_stride", "rounded")),
    )


class Experts(ctypes.Structure):
    """`Experts` of `source/experts.c`."""

    _fields_ = (
        ("product", Product),
        *((name, _Address) for name in ("experts", "counts")),
        *((name, _Long) for name in ("tiles", "size")),
    )


class Attention(ctypes.Structure):
    """`Attention` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("query", "key", "value", "visible")),
        *((name, _Address) for name in ("acc", "peak", "total", "scores")),
        *((name, _Long) for name in ("format", "heads", "rows", "head_dim", "blocks", "tokens")),
        *((name, _Long) for name in ("first_key", "own", "window", "splits", "fresh")),
        *((name, _Long) for name in ("query_head", "query_row")),
        *((name, _Long) for name in ("key_block", "key_head", "key_row")),
        *((name, _Long) for name in ("value_block", "value_head", "value_row")),
        *((name, _Long) for name in ("scores_head", "scores_row", "first_chunk", "chunk", "mass")),
        ("scale", ctypes.c_float),
    )


class Rule(ctypes.Structure):
    """`Rule` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("state", "out", "updates")),
        *((name, _Address) for name in ("queries", "keys", "values", "decays", "rates")),
        *((name, _Address) for name in ("past_keys", "past_updates", "past_decays", "visible")),
        *((name, _Long) for name in ("heads", "group", "rows", "past", "key_dim", "value_dim")),
        *((name, _Long) for name in ("past_keys_head", "past_updates_head", "updates_head")),
        ("advances", _Long),
    )


FORMATS = {
    name: number
    for number, name in enumerate(
        (
            *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
            *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "F8_E4M3"),
            *("SPLIT_BF16", "HIGH_BF16", "HIGH_F16", "INT4"),
        )
    )
}
# Formats of dense numbers.
DENSE = {
    torch.float32: FORMATS["F32"],
    torch.float16: FORMATS["F16"],
    torch.bfloat16: FORMATS["BF16"],
}


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
        found.triforce_attend.argtypes = (_Address, ctypes.c_int)
        found.triforce_merge.argtypes = (_Address, _Address, _Address)
        found.triforce_attend_whole.argtypes = (_Address, _Address, _Address, ctypes.c_int)
        found.triforce_experts.argtypes = (_Address, ctypes.c_int)
        found.triforce_tiles.argtypes = (_Address, *[_Long] * 5, *[_Address] * 5)
        found.triforce_weighted_sums.argtypes = (*[_Address] * 3, *[_Long] * 3, _Address)
        found.triforce_delta.argtypes = (_Address, ctypes.c_int)
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
    if team := _team():
        found.triforce_use_team(team)
    return found


def _same_structures(found: ctypes.CDLL) -> bool:
    """Whether the library was compiled with the structures of this module."""
    return all(
        getattr(found, f"triforce_size_of_{kind.__name__.lower()}")() == ctypes.sizeof(kind)
        for kind in (Weight, Product, Experts, Attention, Rule)
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


def _team() -> ctypes.c_void_p | None:
    """Return the function with which torch's OpenMP library runs another one in all threads, so
    that kernels and torch share their threads. None if there is no such library.
    """
    # A name that is looked up in a library is looked up in those that it needs, too.
    torchs = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for path in (str(torchs), *openmp_libraries()):
        with suppress(OSError, AttributeError):
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, _Address)
    return None


def openmp_libraries() -> list[str]:
    """Paths of the GNU OpenMP libraries that this process has loaded."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in mapped.splitlines() if "libgomp" in line}
    return sorted(path for path in paths if Path(path).name.startswith("libgomp"))
