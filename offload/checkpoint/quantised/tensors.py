"""The quantised tensors of a checkpoint, by how its config says that it is quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from triforce_offload.checkpoint.quantised.floats import float_tensors, nvfp4_matrices
from triforce_offload.checkpoint.quantised.integers import integer_matrices
from triforce_offload.checkpoint.quantised.methods import Method, Quantisation
from triforce_offload.checkpoint.quantised.tensor import QuantisedTensor

if TYPE_CHECKING:
    from triforce_offload.checkpoint.opened import Stored


def quantised_tensors(
    stored: Mapping[str, Stored], quantised: Quantisation | None
) -> dict[str, QuantisedTensor]:
    """Return the tensors that are made of several of the files, by their names. FP8 and MXFP4 are
    known without a config.
    """
    if quantised is None:
        return {**float_tensors(stored)}
    if quantised.method is Method.NVFP4:
        # Its scales are in FP8, and are no matrices.
        return {**nvfp4_matrices(stored)}
    return {**float_tensors(stored), **integer_matrices(stored, quantised)}
