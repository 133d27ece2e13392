"""Functions of single numbers, whose result does not depend on the number's place in a tensor.

PyTorch's operators on a processor compute some numbers by vectors and the last ones one by one, and
both round differently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from triforce_kernels.dispatch import implementation


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return _computed(x, "sigmoid")


def silu(x: torch.Tensor) -> torch.Tensor:
    return _computed(x, "silu")


def softplus(x: torch.Tensor) -> torch.Tensor:
    return _computed(x, "softplus")


def tanh(x: torch.Tensor) -> torch.Tensor:
    return _computed(x, "tanh")


def _computed(x: torch.Tensor, operation: str) -> torch.Tensor:
    return implementation("elementwise", x.device)(x, operation)


def reference(x: torch.Tensor, operation: str) -> torch.Tensor:
    return _REFERENCES[operation](x)


_REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}
