"""How weights and KV are kept: the numbers themselves, as a file stores them, or split."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from triforce_core.layer_source import Readable
from triforce_core.model.tensors import Layouts, split_layouts, stored_layouts
from triforce_core.settings import AUTO, DENSE, SPLIT, EngineConfig
from triforce_core.sizing.demand import Wanted
from triforce_kernels.dispatch import TRITON, backend
from triforce_kernels.weights.blocks import can_decode
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.placing import place
from triforce_offload.plan import MemoryPlan

# Of weights. Split KV has to be smaller than dense KV, too.
_SPLIT = (torch.bfloat16, torch.float16)


def choose_layouts(
    checkpoint: Readable,
    config: EngineConfig,
    wanted: Wanted,
    device: torch.device,
    available: int,
    unsplit: Collection[str] = (),
) -> Layouts:
    """How the weights will lie in memory, as far as the device's memory has no say in it (see
    `with_split_unasked`). wanted: with dense ones. available: bytes of the host.

    unsplit: matrices that have too many exceptions for such

    Raises UsageError.
    """
    dense = wanted.weights
    if config.weights == DENSE:
        return dense
    if config.weights == SPLIT:
        if wanted.dtype not in _SPLIT:
            name = str(wanted.dtype).removeprefix("torch.")
            raise UsageError(
                f"only bfloat16 and float16 can be split, and weights are in {name} here: use "
                "--dtype"
            )
        return split_layouts(wanted.config, wanted.dtype, unsplit)
    stored = stored_layouts(wanted.config, wanted.dtype, checkpoint.pieces)
    unknown = [kind.name for kind in stored.block_types if not can_decode(kind, device)]
    if config.weights == AUTO:
        if (
            unknown
            or not stored.decoded_numbers
            or not (device.type == "cuda" or _would_stream(wanted, config, available))
        ):
            return dense
        return stored
    if not stored.decoded_numbers:
        raise UsageError("weights are kept as stored where they are quantised, and these are not")
    if unknown:
        raise UsageError(f"{unknown[0]} weights are kept as stored by transformers 5.23 or newer")
    return stored


def _would_stream(wanted: Wanted, config: EngineConfig, available: int) -> bool:
    """Whether some layers would, on the emulated device."""
    if config.placement is not None:
        return bool(config.placement.streamed_layers)
    limit = available if config.machine.device_memory is None else config.machine.device_memory
    try:
        plan = place(wanted.demand(0), limit)
        # The emulated device takes host memory, like what streams to it.
        needed = plan.device_bytes + plan.host_bytes
    except DoesNotFitError:
        return True
    return plan.weights_link_bytes > 0 or needed > available


def asks_for_split_kv(config: EngineConfig, dtype: torch.dtype) -> bool:
    """Whether blocks of KV have to be split. Raises UsageError."""
    if config.kv == SPLIT and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(
            f"only bfloat16 can be split, and KV is in {name} here: use --dtype bfloat16"
        )
    return config.kv == SPLIT


def with_split_unasked(
    config: EngineConfig,
    wanted: Wanted,
    device: torch.device,
    available: int,
    unsplit: Collection[str] = (),
    *,
    alone: bool = True,
) -> Wanted:
    """With weights, and KV then, split where these are `auto` and of bfloat16, and a GPU would
    otherwise let some of either stream. wanted: with the layouts chosen so far. available: bytes of
    the device. alone: whether the model is one rank's; weights that several share are refused if
    the split format has no room for them, and so are split only where that was asked for.
    """
    kernels = device.type == "cuda" and backend(device) == TRITON
    # A CPU takes longer to decode a block than its own link to bring a dense one.
    if not kernels or wanted.dtype != torch.bfloat16 or not _streams(config, wanted, available):
        return wanted
    if alone and config.weights == AUTO and not wanted.weights.decoded_numbers:
        layouts = split_layouts(wanted.config, wanted.dtype, unsplit)
        wanted = replace(wanted, layouts=layouts)
    if config.kv == AUTO and _lets_kv_stream(config, wanted, available):
        wanted = replace(wanted, kv_split=True)
    return wanted


def _lets_kv_stream(config: EngineConfig, wanted: Wanted, available: int) -> bool:
    """Whether KV may stream: a placement that was asked for must have slots for it."""
    if config.placement is not None:
        return config.placement.resident_kv_blocks < wanted.demand(0).kv_blocks
    return _streams(config, wanted, available)


def _streams(config: EngineConfig, wanted: Wanted, available: int) -> bool:
    demand = wanted.demand(0)
    if config.placement is not None:
        return MemoryPlan(demand, config.placement).streams
    try:
        return place(demand, available).streams
    except DoesNotFitError:
        return True
