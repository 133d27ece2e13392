"""Upper bounds of the temporaries of products with weights, in bytes."""

from __future__ import annotations

from triforce_core.model.config import ModelConfig
from triforce_core.model.tensors import matrices
from triforce_kernels.limits import (
    DECODE_BYTES,
    DECODE_BYTES_ON_HOST,
    DECODED_AT_ONCE,
    GROUPS_AT_ONCE,
    GROUPS_BYTES,
    JOIN_BYTES,
    JOIN_BYTES_BY_KERNEL,
    JOINED_AT_ONCE,
    JOINED_AT_ONCE_ON_GPU,
    SPLIT_AT_ONCE_ON_GPU,
    SPLIT_BYTES,
    SPLIT_BYTES_ON_GPU,
    WIDENED_BYTES,
)


def decode_bytes(config: ModelConfig, tokens: int, numbers: int, itemsize: int) -> int:
    """Return the additional bytes for decoding weights in blocks: some decoded rows of the largest
    matrix, and their product with `tokens` rows before it is copied to the result.

    numbers: number of elements of the largest matrix
    """
    return _sliced_bytes(config, tokens, numbers, itemsize, DECODED_AT_ONCE, DECODE_BYTES)


def host_product_bytes(config: ModelConfig, tokens: int, numbers: int, itemsize: int) -> int:
    """Return the additional bytes for products by a processor's compiled kernels: inputs and
    results in float32, if they are in half precision.

    numbers: of weights without a kernel, which are decoded some rows at a time
    """
    total = decode_bytes(config, tokens, numbers, itemsize)
    if itemsize < 4:
        total += tokens * sum(max(sizes) for sizes in zip(*matrices(config), strict=True)) * 4
    return total


def split_bytes(
    config: ModelConfig, tokens: int, numbers: int, itemsize: int, *, by_kernel: bool
) -> int:
    """Return the additional bytes for decoding split weights, as in `decode_bytes`.

    by_kernel: whether a GPU kernel decodes them
    """
    at_once, each = DECODED_AT_ONCE, SPLIT_BYTES
    if by_kernel:
        at_once, each = SPLIT_AT_ONCE_ON_GPU, SPLIT_BYTES_ON_GPU
    return _sliced_bytes(config, tokens, numbers, itemsize, at_once, each)


def joined_bytes(
    config: ModelConfig, tokens: int, numbers: int, itemsize: int, *, on_gpu: bool, on_host: bool
) -> int:
    """Return the additional bytes for joining split blocks and decoding them, as in `decode_bytes`.

    on_gpu, on_host: whether kernels of a GPU, or compiled ones of a processor, do so
    """
    at_once = JOINED_AT_ONCE_ON_GPU if on_gpu else JOINED_AT_ONCE
    each = JOIN_BYTES_BY_KERNEL if on_gpu or on_host else JOIN_BYTES
    joined = _sliced_bytes(config, tokens, numbers, itemsize, at_once, each)
    decoding = DECODE_BYTES_ON_HOST + itemsize if on_host else DECODE_BYTES
    return joined + min(numbers, at_once, DECODED_AT_ONCE) * decoding


def groups_bytes(config: ModelConfig, tokens: int, numbers: int, itemsize: int) -> int:
    """Return the additional bytes for decoding groups of 4-bit weights, as in `decode_bytes`."""
    return _sliced_bytes(config, tokens, numbers, itemsize, GROUPS_AT_ONCE, GROUPS_BYTES)


def widened_bytes(config: ModelConfig, tokens: int, numbers: int) -> int:
    """Return the additional bytes for products of half-precision weights in float32. Inputs and
    results are converted, too. See `decode_bytes`.
    """
    return _sliced_bytes(config, 2 * tokens, numbers, 4, DECODED_AT_ONCE, WIDENED_BYTES)


def _sliced_bytes(
    config: ModelConfig, tokens: int, numbers: int, itemsize: int, at_once: int, each: int
) -> int:
    if not numbers:
        return 0
    shapes = matrices(config)
    held = min(numbers, max(at_once, *(columns for _, columns in shapes)))
    widest = max(rows for rows, _ in shapes)
    return held * each + tokens * widest * itemsize
