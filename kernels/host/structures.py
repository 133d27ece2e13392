"""What the processor's compiled kernels take: the structures of `source/host.h`,
`source/experts.c` and `source/sequence.c`.
"""

from __future__ import annotations

import ctypes

import torch

from triforce_kernels.weights.block_types import OF_INTEGERS, WITH_TABLES

_Long, _Address = ctypes.c_int64, ctypes.c_void_p


class Weight(ctypes.Structure):
    """`Weight` of `source/host.h`."""

    _fields_ = (
        *((name, _Long) for name in ("format", "columns", "stride")),
        *((name, _Address) for name in ("data", "low", "base", "places", "starts", "patterns")),
        *((name, _Long) for name in ("room", "groups", "first", "apart")),
        *((name, _Address) for name in ("scale", "offset")),
        *((name, _Long) for name in ("group", "scale_format", "scale_stride")),
    )


class Product(ctypes.Structure):
    """`Product` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("weight", "x", "out", "bias")),
        *((name, _Long) for name in ("rows", "outputs", "x_stride", "out_stride")),
        ("adds", _Long),
        ("factor", ctypes.c_float),
    )


class Gate(ctypes.Structure):
    """`Gate` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("x", "out")),
        *((name, _Long) for name in ("format", "operation", "rows", "width", "x_row")),
    )


class Experts(ctypes.Structure):
    """`Experts` of `source/experts.c`."""

    _fields_ = (
        ("product", Product),
        *((name, _Address) for name in ("experts", "counts")),
        *((name, _Long) for name in ("tiles", "size")),
    )


class ExpertMLP(ctypes.Structure):
    """`ExpertMLP` of `source/experts.c`."""

    _fields_ = (
        ("gate_up", Product),
        ("down", Product),
        ("gate", Gate),
        *((name, _Address) for name in ("x", "out", "chosen", "weights")),
        *((name, _Long) for name in ("rows", "active", "count")),
        *((name, _Address) for name in ("room", "numbers")),
    )


class Choice(ctypes.Structure):
    """`Choice` of `source/experts.c`."""

    _fields_ = (
        *((name, _Long) for name in ("rows", "count", "active", "sigmoid", "normalised")),
        *((name, _Long) for name in ("groups", "chosen_groups")),
        ("scale", ctypes.c_float),
    )


class Attention(ctypes.Structure):
    """`Attention` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("query", "key", "value", "visible")),
        *((name, _Address) for name in ("acc", "peak", "total", "scores")),
        *((name, _Long) for name in ("format", "heads", "rows", "head_dim", "blocks", "tokens")),
        *((name, _Long) for name in ("first_key", "own", "drafted", "window", "splits", "fresh")),
        *((name, _Long) for name in ("query_head", "query_row")),
        *((name, _Long) for name in ("key_block", "key_head", "key_row")),
        *((name, _Long) for name in ("value_block", "value_head", "value_row")),
        *((name, _Long) for name in ("scores_head", "scores_row", "first_chunk", "chunk")),
        ("scale", ctypes.c_float),
    )


class Merge(ctypes.Structure):
    """`Merge` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("attention", "out", "lse")),
        *((name, _Long) for name in ("tokens", "out_head", "out_token")),
    )


class KVBlock(ctypes.Structure):
    """`KVBlock` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("high", "low", "base", "places", "patterns", "out")),
        *((name, _Long) for name in ("heads", "tokens", "head_dim", "room")),
        *((name, _Long) for name in ("out_head", "out_row")),
    )


class JoinedQuants(ctypes.Structure):
    """`JoinedQuants` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("high", "low", "out")),
        *((name, _Long) for name in ("blocks", "format")),
    )


class JoinedFP8(ctypes.Structure):
    """`JoinedFP8` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("high", "bases", "low", "starts", "out")),
        *((name, _Long) for name in ("rows", "blocks", "room")),
    )


class Norm(ctypes.Structure):
    """`Norm` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("x", "out", "delta", "weight")),
        *((name, _Long) for name in ("format", "out_format", "kind", "rows", "heads", "width")),
        *((name, _Long) for name in ("x_row", "x_head", "out_row", "out_head")),
        *((name, _Long) for name in ("weight_head", "adds")),
        *((name, ctypes.c_float) for name in ("eps", "offset", "factor")),
    )


class Call(ctypes.Structure):
    """`Call` of `source/sequence.c`."""

    _fields_ = (("kind", _Long), ("job", _Address))


class Place(ctypes.Structure):
    """`Place` of `source/sequence.c`."""

    _fields_ = (("field", _Address), *((name, _Long) for name in ("base", "columns", "bytes")))


class Count(ctypes.Structure):
    """`Count` of `source/sequence.c`."""

    _fields_ = (("field", _Address), ("times", _Long))


class Calls(ctypes.Structure):
    """`Calls` of `source/sequence.c`."""

    _fields_ = (
        *((name, _Address) for name in ("calls", "places", "counts")),
        *((name, _Long) for name in ("call_count", "place_count", "count_count")),
    )


class Rope(ctypes.Structure):
    """`Rope` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("x", "cos", "sin", "key", "value", "out")),
        *((name, _Long) for name in ("format", "tokens", "heads", "queries", "kv_heads")),
        *((name, _Long) for name in ("head_dim", "start", "x_row", "x_head")),
        *((name, _Long) for name in ("key_head", "key_row")),
        *((name, _Long) for name in ("value_head", "value_row")),
    )


class Rule(ctypes.Structure):
    """`Rule` of `source/host.h`."""

    _fields_ = (
        *((name, _Address) for name in ("state", "out", "updates")),
        *((name, _Address) for name in ("queries", "keys", "values", "decays", "rates")),
        *((name, _Address) for name in ("past_keys", "past_updates", "past_decays", "visible")),
        *((name, _Long) for name in ("heads", "group", "rows", "past", "key_dim", "value_dim")),
        *((name, _Long) for name in ("past_keys_head", "past_updates_head", "past_decays_head")),
        *((name, _Long) for name in ("updates_head", "advances", "corrects")),
    )


STRUCTURES = (
    *(
        Weight,
        Product,
        Experts,
        ExpertMLP,
        Choice,
        Attention,
        KVBlock,
        JoinedFP8,
        JoinedQuants,
        Norm,
        Gate,
        Call,
        Calls,
        Count,
        Merge,
        Place,
        Rope,
        Rule,
    ),
)

FORMATS = {
    name: number
    for number, name in enumerate(
        (
            *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
            *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
            *("F8_E4M3", "F8_HIGH", "Q5_K_HIGH", "Q6_K_HIGH"),
            *(*WITH_TABLES, *(kind.name for kind in OF_INTEGERS), "NVFP4"),
            *("SPLIT_BF16", "HIGH_BF16", "INT4", "INT3"),
        )
    )
}
# Formats of dense numbers.
DENSE = {
    torch.float32: FORMATS["F32"],
    torch.float16: FORMATS["F16"],
    torch.bfloat16: FORMATS["BF16"],
}
