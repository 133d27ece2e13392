"""Short causal convolutions over each channel, whose rows may be a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triforce_kernels.checks import alike, require
from triforce_kernels.dispatch import implementation
from triforce_kernels.elementwise import silu


class Convolution(NamedTuple):
    """A convolution of each channel.

    weight: [channels, 1, taps], the last of which is for a row's own input
    bias: [channels] or None
    activates: whether the result goes through SiLU
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    activates: bool = False


def convolve(
    inputs: torch.Tensor, convolution: Convolution, lineage: torch.Tensor | None
) -> torch.Tensor:
    """Return the convolution of the last rows, [rows, channels], in the dtype of the inputs.

    inputs: [before + rows, channels]: the inputs of tokens before the rows, and of the rows. At
        least taps - 1 are before them
    lineage: indices of the inputs that each row sees, [rows, taps], its own last; None if each row
        follows the one before it and taps - 1 inputs are before the first

    Raises ValueError for inputs that do not fit.
    """
    weight, bias, _ = convolution
    channels, _, taps = weight.shape
    require(
        "convolve",
        alike(inputs, weight, bias)
        and weight.is_contiguous()
        and inputs.shape[1:] == (channels,)
        and (bias is None or bias.shape == (channels,))
        and (len(inputs) >= taps if lineage is None else lineage.shape[1:] == (taps,)),
        inputs=inputs,
        weight=weight,
        bias=bias,
        lineage=lineage,
    )
    return implementation("convolve", inputs.device)(inputs, convolution, lineage)


def reference_convolve(
    inputs: torch.Tensor, convolution: Convolution, lineage: torch.Tensor | None
) -> torch.Tensor:
    weight, bias, activates = convolution
    channels, _, taps = weight.shape
    rows = len(inputs) - taps + 1 if lineage is None else len(lineage)
    out = inputs.new_zeros((rows, channels), dtype=torch.float32)
    # One tap after the other, so that a row has the same bits in a tree.
    for tap in range(taps):
        seen = inputs[tap : tap + rows] if lineage is None else inputs[lineage[:, tap]]
        out += seen.float() * weight[:, 0, tap].float()
    if bias is not None:
        out += bias.float()
    # Rounded before the activation, as transformers does.
    out = out.to(inputs.dtype)
    return silu(out) if activates else out
