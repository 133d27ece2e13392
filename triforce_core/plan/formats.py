"""Formats of weights and KV: dense, as a file stores them, or split."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from triforce_core.model.config import ModelConfig
from triforce_core.model.sharing.share import Pieces
from triforce_core.model.tensors import (
    Layouts,
    split_experts_layouts,
    split_layouts,
    stored_layouts,
)
from triforce_core.plan.machine import Device, Room
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import AUTO, DENSE, OFF, ON, SPLIT, SPLIT_EXPERTS, EngineConfig
from triforce_kernels.weights.block_types import HIGH_QUANTS, NARROW, BlockType
from triforce_offload.errors import DoesNotFitError, UsageError
from triforce_offload.plan.memory_plan import MemoryPlan
from triforce_offload.plan.placing import place
from triforce_offload.plan.requirements import Requirements
from triforce_offload.weights.formats import DTYPES, ElementType, dtype_name

# Formats of weights of which some are split.
SPLITS = (SPLIT, SPLIT_EXPERTS)


def split_weights(
    which: str,
    config: ModelConfig,
    dtype: ElementType,
    unsplit: Collection[str] = (),
    pieces: Pieces | None = None,
) -> Layouts:
    """Return the layouts of weights in one of SPLITS.

    unsplit: matrices that have too many exceptions to be split
    pieces: pieces of quantised matrices, if there are any
    Raises UsageError.
    """
    name, in_blocks = dtype_name(dtype), which == SPLIT and splits_blocks(config, dtype, pieces)
    if name != "bfloat16" and not in_blocks:
        raise UsageError(
            f"only bfloat16, FP8, {' and '.join(HIGH_QUANTS)} can be split, and weights are in "
            f"{name} here: use --dtype bfloat16"
        )
    if which == SPLIT:
        return split_layouts(config, dtype, unsplit, pieces if in_blocks else None)
    if not any(spec.mlp.active for spec in config.layers):
        raise UsageError(
            "--weights split-experts is for models with experts; --weights split is for all"
        )
    return split_experts_layouts(config, dtype, unsplit)


def splits_blocks(config: ModelConfig, dtype: ElementType, pieces: Pieces | None) -> bool:
    """Return whether some matrices are stored in blocks that can be split."""
    return pieces is not None and split_layouts(config, dtype, pieces=pieces).joins_blocks


def element_type(asked: str, stored: str | None, *, gpu: bool) -> str:
    """Return the dtype of dense weights and KV.

    "auto" is float32 on the CPU. On a GPU, it is the checkpoint's dtype, or bfloat16 if the
    checkpoint is quantised.

    asked: EngineConfig.dtype
    stored: dtype of the checkpoint, None if quantised
    """
    if asked != AUTO:
        return asked
    if not gpu:
        return "float32"
    stored = stored or "bfloat16"
    return stored if stored in DTYPES else "float32"


def with_asked_formats(
    sizes: ModelSizes,
    config: EngineConfig,
    pieces: Pieces,
    room: Room,
    unsplit: Collection[str] = (),
) -> ModelSizes:
    """Return the sizes with weights and KV in the formats that the config asks for, and whether
    rows have the same bits in every forward.

    "auto" weights become stored or dense here; `with_split_unasked` may split them later.

    sizes: sizes with dense weights
    pieces: pieces of quantised matrices
    room: memory that may be taken; "auto" weights without a kernel are dense unless they would
        stream
    unsplit: matrices that have too many exceptions to be split

    Raises UsageError.
    """
    sizes = _with_same_bits(config, sizes)
    name = dtype_name(sizes.dtype)
    if config.kv == SPLIT and name != "bfloat16":
        raise UsageError(
            f"only bfloat16 can be split, and KV is in {name} here: use --dtype bfloat16"
        )
    layouts = _weights(sizes, config, pieces, room, unsplit)
    return replace(sizes, layouts=layouts, kv_split=config.kv == SPLIT)


def storable_pieces(pieces: Pieces, dtype: ElementType, device: Device) -> Pieces:
    """Return the pieces that may be kept as stored: numbers of 16 bits only if the model computes
    in float32 and a kernel multiplies by them.
    """
    wide = dtype_name(dtype) == "float32"

    def kind(stored: BlockType | None) -> BlockType | None:
        narrow = stored in NARROW.values()
        return None if narrow and not (wide and device.has_kernel(stored)) else stored

    return lambda name: [(rows, kind(stored)) for rows, stored in pieces(name)]


def usable_pieces(
    pieces: Pieces, config: ModelConfig, dtype: ElementType, device: Device
) -> Pieces | None:
    """Return the pieces of a draft model if its quantised matrices are kept as stored, None if they
    become dense: where the device decodes them more slowly than it reads dense ones.
    """
    stored = stored_layouts(config, dtype, pieces).block_types
    kept = all(map(device.can_decode if device.gpu else device.has_kernel, stored))
    return pieces if stored and kept else None


def _weights(
    sizes: ModelSizes,
    config: EngineConfig,
    pieces: Pieces,
    room: Room,
    unsplit: Collection[str],
) -> Layouts:
    if config.weights == DENSE:
        return sizes.weights
    if config.weights in SPLITS:
        return split_weights(config.weights, sizes.config, sizes.dtype, unsplit, pieces)
    stored = stored_layouts(sizes.config, sizes.dtype, pieces)
    unknown = [kind.name for kind in stored.block_types if not sizes.device.can_decode(kind)]
    if config.weights == AUTO:
        usable = stored.decoded_numbers and not unknown
        device = sizes.device
        wanted = device.gpu or all(map(device.has_kernel, stored.block_types))
        wanted = wanted or _layers_stream(sizes, config, room)
        return stored if usable and wanted else sizes.weights
    if not stored.decoded_numbers:
        raise UsageError("weights are kept as stored where they are quantised, and these are not")
    if unknown:
        raise UsageError(f"{unknown[0]} weights are kept as stored by transformers 5.23 or newer")
    return stored


def _layers_stream(sizes: ModelSizes, config: EngineConfig, room: Room) -> bool:
    """Whether some layers would stream. An emulated device takes host memory itself."""
    if config.placement is not None:
        return bool(config.placement.streamed_layers)
    try:
        plan = place(_needs(sizes), room.device_bytes)
    except DoesNotFitError:
        return True
    needed = plan.device_bytes + plan.host_bytes
    return plan.weights_link_bytes > 0 or needed > (room.host_bytes or 0)


def with_split_unasked(
    sizes: ModelSizes,
    config: EngineConfig,
    device_bytes: int,
    unsplit: Collection[str] = (),
) -> ModelSizes:
    """Return the sizes with "auto" weights and KV split if something would stream otherwise.

    Weights, and then KV, are split if they are "auto" and bfloat16, and if something would stream
    on a GPU with Triton's kernels.

    sizes: sizes in the formats that the config asks for
    """
    # On a CPU, decoding a block takes longer than copying a dense one.
    kernels = sizes.device.gpu and sizes.device.kernels
    bfloat16 = dtype_name(sizes.dtype) == "bfloat16"
    if not kernels or not bfloat16 or not _streams(sizes, config, device_bytes):
        return sizes
    if may_split_weights(sizes, config) and not sizes.weights.decoded_numbers:
        sizes = replace(sizes, layouts=split_weights(SPLIT, sizes.config, sizes.dtype, unsplit))
    if config.kv == AUTO and _lets_kv_stream(sizes, config, device_bytes):
        sizes = replace(sizes, kv_split=True)
    return sizes


def may_split_weights(sizes: ModelSizes, config: EngineConfig) -> bool:
    """Return whether weights may be split unasked. Split weights are multiplied in another order,
    so texts would depend on what streams, which rows with the same bits exclude.
    """
    return config.weights == AUTO and not sizes.same_bits


def _lets_kv_stream(sizes: ModelSizes, config: EngineConfig, device_bytes: int) -> bool:
    """Whether something streams, for which split KV would make room. With a user's placement, which
    it would not change: whether some KV streams.
    """
    if config.placement is not None:
        return config.placement.resident_kv_blocks < _needs(sizes).kv_blocks
    return _streams(sizes, config, device_bytes)


def _needs(sizes: ModelSizes) -> Requirements:
    """Return the requirements without a retrieval level, and without recorded passes: what streams
    leaves no memory to them.
    """
    return replace(sizes, records_passes=False).requirements(0)


def _streams(sizes: ModelSizes, config: EngineConfig, device_bytes: int) -> bool:
    needs = _needs(sizes)
    if config.placement is not None:
        return MemoryPlan(needs, config.placement).streams
    try:
        return place(needs, device_bytes).streams
    except DoesNotFitError:
        return True


# Fewest tokens of a KV block with which a row has the same bits in every forward.
SAME_BITS_TOKENS = 64


def _with_same_bits(config: EngineConfig, sizes: ModelSizes) -> ModelSizes:
    """Return the sizes with whether rows have the same bits in every forward.

    Kernels of a GPU give rows the same bits if they are asked to, since prompts take longer then.
    What the processor computes is added in another order, so it excludes them.

    Raises UsageError.
    """
    asked, device = config.same_bits, sizes.device
    if sizes.config.caps_scores or sizes.config.chooses_keys:
        if asked == ON:
            what = "caps scores of" if sizes.config.caps_scores else "chooses the keys of"
            raise UsageError(
                f"--same-bits on is not supported for {sizes.config.family} models: no kernel "
                f"{what} attention, and rounding depends on the number of rows without one"
            )
        return sizes
    if config.uses_processor:
        if asked == ON:
            raise UsageError(
                "--same-bits on is not possible where the CPU computes (--host-compute, or a "
                "plan): it adds in another order"
            )
        return sizes
    if asked == OFF or (asked == AUTO and not device.host_kernels):
        return sizes
    if asked == ON and (sizes.block_tokens or SAME_BITS_TOKENS) < SAME_BITS_TOKENS:
        raise UsageError(
            f"--same-bits on needs KV blocks of {SAME_BITS_TOKENS} tokens or more, and "
            f"block_tokens is {sizes.block_tokens}"
        )
    if not (device.host_kernels or device.kernels):
        raise UsageError(
            "--same-bits on needs the compiled kernels of a CPU or Triton on a GPU (`triforce env` "
            "says whether they are there): without them rounding depends on the number of rows"
        )
    if device.kernels and sizes.config.recurrent_layers:
        raise UsageError(
            "--same-bits on is not supported for recurrent layers on a GPU: their rounding depends "
            "on the number of rows there"
        )
    if device.kernels and sizes.config.attention.sides == 1:
        raise UsageError(
            "--same-bits on is not supported for latent attention on a GPU: its kernels were not "
            "checked for that"
        )
    return replace(sizes, same_bits=True)
