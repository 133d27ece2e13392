"""`conv` on a GPU: one program for each row and some channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.recurrent.conv import Convolution

# Channels of a program.
_CHANNELS = 1024


@triton.jit
def _convolve_kernel(
    inputs, weight, bias, lineage, out, i_row, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr, ACTIVATES: tl.constexpr, LINEAGE: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    total = tl.zeros([CHANNELS], dtype=tl.float32)
    for tap in range(TAPS):
        place = tl.load(lineage + row * TAPS + tap) if LINEAGE else row + tap
        each = tl.load(inputs + place * i_row + channel, mask=real, other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * TAPS + tap, mask=real, other=0.0).to(tl.float32)
        total += each * factor
    if BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    if ACTIVATES:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total = total * tl.sigmoid(total)
    tl.store(out + row * channels + channel, total, mask=real)


def convolve(
    inputs: torch.Tensor, convolution: Convolution, lineage: torch.Tensor | None
) -> torch.Tensor:
    weight, bias, activates = convolution
    channels, _, taps = weight.shape
    rows = len(inputs) - taps + 1 if lineage is None else len(lineage)
    out = inputs.new_empty(rows, channels)
    width = min(_CHANNELS, next_power_of_2(channels))
    _convolve_kernel[(rows, cdiv(channels, width))](
        inputs, weight, bias, lineage, out, inputs.stride(0), channels,
        TAPS=taps, BIAS=bias is not None, ACTIVATES=activates, LINEAGE=lineage is not None,
        CHANNELS=width, num_warps=4,
    )  # fmt: skip
    return out
