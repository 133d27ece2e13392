"""Upper bounds of the temporaries of products with weights, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from triforce_core.model.config import ModelConfig
from triforce_core.model.tensors import Layouts, matrices
from triforce_core.plan.machine import Device
from triforce_kernels.limits import (
    DECODE_BYTES,
    DECODE_BYTES_ON_HOST,
    DECODED_AT_ONCE,
    DECODED_BYTES_ON_GPU,
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


@dataclass(frozen=True)
class Products:
    """Products of a model's weights with the rows of a forward on a device.

    itemsize: bytes of a number of the rows
    """

    config: ModelConfig
    weights: Layouts
    device: Device
    itemsize: int

    def nbytes(self, tokens: int, *, few: bool, by_host: bool) -> int:
        """Return the bytes of temporaries of products with `tokens` rows, without their results.

        few: whether kernels multiply by split weights as they are read
        by_host: whether compiled kernels multiply by weights in any format
        """
        config, weights, device, itemsize = self.config, self.weights, self.device, self.itemsize
        on_gpu = device.gpu and device.kernels
        fused = all(map(device.has_kernel, weights.block_types))
        largest = max(config.vocab_rows * config.hidden, *map(prod, matrices(config)))
        # Of experts that stand one above the other, one is decoded at a time.
        decoded = min(weights.decoded_numbers, largest)
        if by_host:
            total = host_product_bytes(config, tokens, 0 if fused else decoded, itemsize)
            return total + self._joined_bytes(tokens, decoded)
        by_kernel = on_gpu and fused
        if weights.split:
            total = split_bytes(config, tokens, decoded, itemsize, by_kernel=on_gpu and not few)
            total = max(total, self._joined_bytes(tokens, decoded))
            whole = min(weights.undivided_numbers, largest)
            whole = decode_bytes(config, tokens, whole, itemsize, by_kernel=by_kernel)
            total = max(total, whole)
        else:
            total = decode_bytes(config, tokens, decoded, itemsize, by_kernel=by_kernel)
        if device.widens:
            total += widened_bytes(config, tokens, largest)
        return total

    def _joined_bytes(self, tokens: int, numbers: int) -> int:
        """Return the bytes of temporaries of split blocks. numbers: of the largest matrix"""
        if not self.weights.joins_blocks:
            return 0
        on_gpu, on_host = self.device.gpu and self.device.kernels, self.device.host_kernels
        return joined_bytes(
            self.config, tokens, numbers, self.itemsize, on_gpu=on_gpu, on_host=on_host
        )


def decode_bytes(
    config: ModelConfig, tokens: int, numbers: int, itemsize: int, *, by_kernel: bool = False
) -> int:
    """Return the additional bytes for decoding weights in blocks: some decoded rows of the largest
    matrix, and their product with `tokens` rows before it is copied to the result.

    numbers: number of elements of the largest matrix
    by_kernel: whether a GPU kernel decodes them
    """
    at_once, each = DECODED_AT_ONCE, DECODE_BYTES
    if by_kernel:
        at_once, each = DECODED_BYTES_ON_GPU // itemsize, itemsize
    return _sliced_bytes(config, tokens, numbers, itemsize, at_once, each)


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
