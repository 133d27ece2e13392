"""Seconds of products with a matrix, from the rates of the hardware and how the matrix is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from triforce_core.plan.simulation.costs.launches import (
    DECODE_OPERATIONS,
    DECODED_FIRST,
    OPERATIONS,
)
from triforce_kernels.limits import FEW_ROWS
from triforce_offload.machine.profiles import Hardware
from triforce_offload.weights.formats import Read


@dataclass(frozen=True)
class Product:
    """A product of a number of rows with a matrix.

    elements, nbytes: size of the matrix
    itemsize: bytes of a number of the rows
    read: how the matrix is read
    decodes: whether a processor decodes it first
    """

    elements: float
    nbytes: float
    itemsize: int
    read: Read
    decodes: bool = False

    def seconds(self, hardware: Hardware, rows: float) -> float:
        """Return the seconds of the product with `rows` rows."""
        return self._on_gpu(hardware, rows) if hardware.asynchronous else self._read(hardware, rows)

    @property
    def dense_bytes(self) -> float:
        """Bytes of the matrix as numbers of the rows' dtype."""
        return self.elements * self.itemsize

    def _on_gpu(self, hardware: Hardware, rows: float) -> float:
        rate, read = hardware.memory_bytes_per_second, self.read
        if read in DECODED_FIRST and rows > FEW_ROWS:
            decoding = (self.nbytes + self.dense_bytes) / rate
            operations = self.elements * DECODED_FIRST[read]
            dense = replace(self, nbytes=self.dense_bytes)
            decoding = max(decoding, integer_seconds(hardware, operations))
            return decoding + dense._read(hardware, rows)
        if read is Read.SPLIT_BLOCKS:
            # Joined blocks take as many bytes.
            operations = self.elements * DECODE_OPERATIONS
            joining = max(2 * self.nbytes / rate, integer_seconds(hardware, operations))
            return joining + replace(self, read=Read.BLOCKS)._on_gpu(hardware, rows)
        work = self._read(hardware, rows)
        if counted := OPERATIONS.get(read):
            each = next((most for few, most in counted if rows <= few), counted[-1][1])
            work = max(work, integer_seconds(hardware, each * self.elements))
        return work

    def _read(self, hardware: Hardware, rows: float) -> float:
        """Return the seconds of reading the matrix and of multiplying by it. A processor may decode
        it first.
        """
        decoding = self.elements * hardware.decode_seconds_per_number if self.decodes else 0.0
        if hardware.product_seconds_per_byte:
            each = _between(hardware.product_seconds_per_byte, rows)
            return decoding + self.dense_bytes * each
        return decoding + max(
            self.nbytes / hardware.memory_bytes_per_second,
            2.0 * rows * self.elements / hardware.flops_per_second,
        )


def integer_seconds(hardware: Hardware, operations: float) -> float:
    """Return the seconds of integer operations, or 0 if their rate is unknown."""
    rate = hardware.integer_ops_per_second
    return operations / rate if rate else 0.0


def _between(measured: Sequence[tuple[int, float]], rows: float) -> float:
    """Interpolate measurements linearly; beyond the last one, extrapolate in proportion to rows."""
    for (low, before), (high, after) in pairwise(measured):
        if rows <= high:
            return before + (after - before) * (max(rows, low) - low) / (high - low)
    most, last = measured[-1]
    return last * rows / most
