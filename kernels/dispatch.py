"""Selects the implementation of a kernel: one table, looked up by the device of its inputs.

Triton runs on CUDA, compiled C on a CPU (`host`), and plain PyTorch (the reference) where neither
is. `TRIFORCE_KERNELS=reference`, `=triton` or `=host` forces one; Triton on a CPU needs its
interpreter, `TRITON_INTERPRET=1`. A kernel without C runs as its reference on a CPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from triforce_kernels.host.library import LibraryError, library
from triforce_kernels.warmup import watch_compiler

VARIABLE = "TRIFORCE_KERNELS"
REFERENCE, TRITON, HOST = BACKENDS = ("reference", "triton", "host")

# Products with experts in any format have one reference.
_EXPERTS = "experts.grouped.reference_product"
_ON_HOST = "host.experts.product"
_GATED = "experts.grouped.by_tiles"
_SPLIT_FP8 = "weights.split_fp8.reference_split"
_SPLIT_QUANTS = "weights.split_quants.reference_split"
_DENSE = "weights.linear.reference_dense"
_CLAMPED = "layer.reference_clamped_swiglu"
_CHUNKS, _FOLD = "recurrent.delta.reference_chunks", "recurrent.delta.reference_fold"


class Kernel(NamedTuple):
    """The implementations of a kernel, which take the same arguments: the module and function of
    each. host: "" if the processor runs the reference
    """

    reference: str
    triton: str
    host: str = ""


_PATHS: dict[str, tuple[str, ...]] = {
    "attention_splits": (
        "attention.streaming_reference.reference_splits",
        "attention.streaming_triton.splits",
        "host.attention.splits",
    ),
    "attend_blocks": (
        "attention.streaming_reference.reference_blocks",
        "attention.streaming_triton.blocks",
        "host.attention.blocks",
    ),
    "attend_tail": (
        "attention.streaming_reference.reference_tail",
        "attention.streaming_triton.tail",
        "host.attention.tail",
    ),
    "attend_cache": (
        "attention.streaming_reference.reference_cache",
        "attention.streaming_triton.cache",
        "host.attention.cache",
    ),
    "group_scores": (
        "attention.scoring.reference_group_scores",
        "attention.scoring_triton.group_scores",
    ),
    "choose_chunks": ("kv.selection.reference_choose", "kv.selection_triton.choose"),
    "gather_chunks": ("kv.gather.reference_gather", "kv.gather_triton.gather"),
    "layer_norm": (
        "layer.reference_layer_norm",
        "layer_triton.layer_norm",
        "host.layer.layer_norm",
    ),
    "rms_norm": ("layer.reference_rms_norm", "layer_triton.rms_norm", "host.layer.rms_norm"),
    "rope_into": ("layer.reference_rope_into", "layer_triton.rope_into", "host.layer.rope_into"),
    "round_chunks": ("kv.rounding.reference_round_chunks", "kv.rounding_triton.round_chunks"),
    "geglu": ("layer.reference_geglu", "layer_triton.geglu", "host.layer.geglu"),
    "swiglu": ("layer.reference_swiglu", "layer_triton.swiglu", "host.layer.swiglu"),
    "clamped_swiglu": (_CLAMPED, _CLAMPED, "host.layer.clamped_swiglu"),
    "elementwise": ("elementwise.reference", "elementwise.reference", "host.layer.computed"),
    "convolve": ("recurrent.conv.reference_convolve", "recurrent.conv_triton.convolve"),
    "delta_gates": ("recurrent.gates.reference_gates", "recurrent.gates_triton.gates"),
    "gated_norm": ("recurrent.gates.reference_norm", "recurrent.gates_triton.norm"),
    "step_gates": ("recurrent.gates.reference_step_gates", "recurrent.gates_triton.step_gates"),
    "norm_of_gated": (
        "recurrent.gates.reference_norm_of_gated",
        "recurrent.gates_triton.norm_of_gated",
    ),
    "delta_rule": (
        "recurrent.delta.reference_rule",
        "recurrent.delta_triton.rule",
        "host.recurrent.rule",
    ),
    "delta_chunks": (_CHUNKS, "recurrent.chunks_triton.chunks", "host.recurrent.chunks"),
    # On a GPU these are PyTorch's operations too.
    "fold_rows": (_FOLD, _FOLD, "host.recurrent.fold"),
    "silu_of_mean": (
        "streams.streams.reference_silu_of_mean",
        "streams.streams_triton.silu_of_mean",
    ),
    "mean_of_gated": (
        "streams.streams.reference_mean_of_gated",
        "streams.streams_triton.mean_of_gated",
    ),
    "add_to_streams": (
        "streams.streams.reference_add_to_streams",
        "streams.streams_triton.add_to_streams",
    ),
    "distribution": (
        "sampling.sampling.reference_distribution",
        "sampling.distribution_triton.distribution",
    ),
    "accept": ("sampling.sampling.reference_accept", "sampling.accept_triton.accept"),
    "pick": ("sampling.sampling.reference_pick", "sampling.accept_triton.pick"),
    "dense_matmul": (_DENSE, "weights.dense_triton.matmul", "host.weights.dense_matmul"),
    "decode_blocks": (
        "weights.blocks.reference_decode",
        "weights.blocks_triton.decode",
        "host.weights.decode_blocks",
    ),
    "block_matmul": (
        "weights.blocks.reference_matmul",
        "weights.blocks_triton.matmul",
        "host.weights.block_matmul",
    ),
    "decode_split": (
        "weights.split_bf16.reference_decode",
        "weights.split_bf16_triton.decode",
        "host.weights.decode_split",
    ),
    "split_matmul": (
        "weights.split_bf16.reference_matmul",
        "weights.split_bf16_triton.matmul",
        "host.weights.split_matmul",
    ),
    # Weights are split while they are loaded, by the processor.
    "split_fp8": (_SPLIT_FP8, _SPLIT_FP8, "host.weights.split_fp8"),
    "join_fp8": (
        "weights.split_fp8.reference_join",
        "weights.split_fp8_triton.join",
        "host.weights.join_fp8",
    ),
    "split_quants": (_SPLIT_QUANTS, _SPLIT_QUANTS, "host.weights.split_quants"),
    "join_quants": (
        "weights.split_quants.reference_join",
        "weights.split_quants_triton.join",
        "host.weights.join_quants",
    ),
    "high_bits_matmul": (
        "weights.high_bits.reference_matmul",
        "weights.high_bits_triton.matmul",
        "host.weights.high_bits_matmul",
    ),
    "gather_split_chunks": ("kv.gather_split.reference_gather", "kv.gather_split_triton.gather"),
    "encode_kv_block": ("kv.split_kv.reference_encode", "kv.split_kv_triton.encode"),
    "decode_kv_blocks": (
        "kv.split_kv.reference_decode",
        "kv.split_kv_triton.decode",
        "host.kv.decode",
    ),
    "choose_experts": (
        "experts.routing.reference_choose",
        "experts.routing_triton.choose",
        "host.experts.choose",
    ),
    "expert_tiles": (
        "experts.grouped.reference_in_tiles",
        "experts.routing_triton.in_tiles",
        "host.experts.in_tiles",
    ),
    "sum_experts": (
        "experts.grouped.reference_weighted_sums",
        "experts.routing_triton.weighted_sums",
        "host.experts.weighted_sums",
    ),
    "gated_experts": (_GATED, _GATED, "host.experts.gated"),
    "dense_experts": (_EXPERTS, "experts.grouped_triton.dense", _ON_HOST),
    "block_experts": (_EXPERTS, "weights.blocks_triton.grouped", _ON_HOST),
    "split_experts": (_EXPERTS, "weights.split_bf16_triton.grouped", _ON_HOST),
    "high_bits_experts": (_EXPERTS, "weights.high_bits_triton.grouped", _ON_HOST),
    "integer_experts": (_EXPERTS, "weights.integers_triton.grouped", _ON_HOST),
    "integer_matmul": (
        "weights.integers.reference_matmul",
        "weights.integers_triton.matmul",
        "host.weights.integer_matmul",
    ),
}

KERNELS = {name: Kernel(*paths) for name, paths in _PATHS.items()}


class KernelsError(ValueError):
    """The requested kernels cannot run here."""


def implementation(kernel: str, device: torch.device) -> Callable:
    """Return the function that computes `kernel` on a device. Raises KernelsError."""
    paths = KERNELS[kernel]
    found = _load(paths[BACKENDS.index(backend(device))] or paths.reference)
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        # Triton launches on the current device, whatever device its inputs are on.
        return partial(_launch_on, device, found)
    return found


def _launch_on(device: torch.device, launch: Callable, *values: Any, **named: Any) -> Any:
    with torch.cuda.device(device):
        return launch(*values, **named)


def backend(device: torch.device) -> str:
    """Return REFERENCE, TRITON or HOST for a device; "cuda" without an index is the current device.
    Raises KernelsError.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _backend(device, _forced)


# Read once: several kernels of a layer ask for it.
_forced = os.environ.get(VARIABLE, "")


@cache
def _backend(device: torch.device, forced: str) -> str:
    if forced not in ("", *BACKENDS):
        raise KernelsError(f"{VARIABLE} is {forced!r}; use {', '.join(BACKENDS)}, or unset it")
    if forced == HOST and (device.type != "cpu" or _library() is None):
        why = "is not compiled here" if device.type == "cpu" else f"does not run on {device.type}"
        raise KernelsError(f"{VARIABLE}={HOST}, which {why}")
    if forced == REFERENCE:
        return REFERENCE
    if device.type != "cuda" and forced != TRITON:
        return HOST if device.type == "cpu" and _library() else REFERENCE
    if find_spec("triton") is None:
        if forced:
            raise KernelsError(f"{VARIABLE}={TRITON}, but the package triton is not installed")
        warnings.warn(
            "the package triton is not installed: plain PyTorch operations take the place of the "
            "kernels, and are slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return REFERENCE
    if device.type == "cuda" and (failure := _failure(device)):
        if forced:
            raise KernelsError(f"{VARIABLE}={TRITON}, but triton launches nothing: {failure}")
        warnings.warn(
            f"triton launches nothing ({failure}): plain PyTorch operations take the place of the "
            "kernels, and are slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return REFERENCE
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelsError(
            f"{VARIABLE}={TRITON} on {device.type} needs Triton's interpreter: set "
            "TRITON_INTERPRET=1, or use a CUDA device"
        )
    watch_compiler()
    return TRITON


def _library() -> object:
    """Return the processor's compiled kernels, None without any. Raises KernelsError."""
    try:
        return library()
    except LibraryError as error:
        raise KernelsError(str(error)) from error


def _failure(device: torch.device) -> str | None:
    """Return why Triton cannot launch on a GPU, or None; for example, it needs a C compiler.
    Allocates memory on that GPU alone, since another process may use the others.
    """
    try:
        with torch.cuda.device(device):
            _load(KERNELS["swiglu"].triton)(torch.zeros(1, 2, device=device))
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


@cache
def _load(path: str) -> Callable:
    module, name = path.rsplit(".", 1)
    return getattr(import_module(f"{__package__}.{module}"), name)
