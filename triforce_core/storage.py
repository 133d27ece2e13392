"""How weights and KV are kept: the numbers themselves, as a file stores them, or in planes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from triforce_kernels.blocks import can_decode

from offload.errors import DoesNotFitError, UsageError
from offload.placement import device_bytes, host_bytes, place, streams
from triforce_core.layer_source import Readable
from triforce_core.model.tensors import Layouts, plane_layouts, stored_layouts
from triforce_core.settings import AUTO, DENSE, PLANES, EngineConfig
from triforce_core.sizing.demand import Wanted


def choose_layouts(
    checkpoint: Readable,
    config: EngineConfig,
    wanted: Wanted,
    device: torch.device,
    available: int,
    without_planes: Collection[str] = (),
) -> Layouts:
    """How the weights will lie in memory. wanted: with dense ones. available: bytes of the host.

    without_planes: matrices that have too many exceptions for such

    Raises UsageError.
    """
    dense = wanted.weights
    if config.weights == DENSE:
        return dense
    if config.weights == PLANES:
        _require_bfloat16(wanted.dtype, "weights are")
        return plane_layouts(wanted.config, wanted.dtype, without_planes)
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
        demand = wanted.demand(0)
        placement = place(demand, limit)
        # The emulated device takes host memory, like what streams to it.
        needed = device_bytes(demand, placement) + host_bytes(demand, placement)
    except DoesNotFitError:
        return True
    return bool(placement.streamed_layers) or needed > available


def choose_kv_in_planes(
    config: EngineConfig, wanted: Wanted, device: torch.device, available: int
) -> bool:
    """Whether blocks of KV will be kept in planes: unasked, where a GPU would otherwise let some
    stream. wanted: with its weights. available: bytes of the device. Raises UsageError.
    """
    if config.kv == PLANES:
        _require_bfloat16(wanted.dtype, "KV is")
        return True
    if config.kv == DENSE or wanted.dtype != torch.bfloat16 or device.type != "cuda":
        # A CPU takes longer to decode a block than its own link to bring a dense one.
        return False
    demand = wanted.demand(0)
    if config.placement is not None:
        return config.placement.resident_kv_blocks < demand.kv_blocks
    try:
        return streams(demand, place(demand, available))
    except DoesNotFitError:
        return True


def _require_bfloat16(dtype: torch.dtype, what: str) -> None:
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(f"planes hold bfloat16, and {what} in {name} here: use --dtype bfloat16")
