"""Weights of every format multiply as the dense matrix of the same numbers does."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near
from float_bounds import assert_within, product_bound
from gguf.quants import dequantize
from gguf_files import in_blocks
from torch.profiler import ProfilerActivity, profile

from triforce_kernels.dispatch import REFERENCE
from triforce_kernels.limits import DECODE_BYTES
from triforce_kernels.weights.block_types import (
    BLOCK_TYPES,
    F8_E4M3,
    F8_HIGH,
    HIGH_QUANTS,
    INTEGERS,
    NVFP4,
    BlockType,
)
from triforce_kernels.weights.blocks import (
    F8_LEVELS,
    FUSED,
    BlockWeight,
    NoDecoderError,
    block_matmul,
    can_decode,
    decode,
    reference_decode,
)
from triforce_kernels.weights.linear import StackedWeight, linear, lookup
from triforce_kernels.weights.split_quants import reference_join, reference_split

ROWS, COLUMNS = 70, 512
OF_HIGH = {high.name: name for name, high in HIGH_QUANTS.items()}
OF_INTEGERS = {kind.name: (bits, kind) for bits in INTEGERS for kind in INTEGERS[bits].values()}


def blocks(name: str, rows: int = ROWS, seed: int = 0) -> tuple[BlockWeight, torch.Tensor]:
    """A random weight in a block type, and the numbers that the gguf package finds in it, that
    torch finds in FP8, or that stand for its high bits or for integers.
    """
    if name == F8_E4M3.name:
        return eights(rows)
    if name == F8_HIGH.name:
        return high_bits(rows)
    if name in OF_HIGH:
        return high_quants(OF_HIGH[name], rows)
    if name == "NVFP4":
        return of_nvfp4(rows)
    if name in OF_INTEGERS:
        return of_integers(*OF_INTEGERS[name], rows)
    if not can_decode(BLOCK_TYPES[name], torch.device("cpu")):
        pytest.skip(f"this version of transformers does not decode {name}")
    kind, number = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, COLUMNS)).astype(np.float32)
    data = in_blocks(values, number)
    weight = BlockWeight(torch.from_numpy(data).to(DEVICE), kind, COLUMNS)
    return weight, torch.from_numpy(dequantize(data, number).copy())


def eights(rows: int) -> tuple[BlockWeight, torch.Tensor]:
    """Every pattern of 8 bits that is a number, with scales of all sizes."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 256, (rows, COLUMNS), generator=generator, dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0
    numbers = bits.view(torch.float8_e4m3fn).float()
    scales = torch.rand(rows, COLUMNS // 128, generator=generator) * 1e-2
    data = torch.cat((bits.unflatten(1, (-1, 128)), scales.unsqueeze(-1).view(torch.uint8)), -1)
    weight = BlockWeight(data.flatten(1).to(DEVICE), F8_E4M3, COLUMNS)
    return weight, numbers * scales.repeat_interleave(128, 1)


def of_integers(bits: int, kind: BlockType, rows: int) -> tuple[BlockWeight, torch.Tensor]:
    """Integers of 4 or 8 bits, every zero that files have, and scales in both dtypes of 16 bits."""
    generator = torch.Generator().manual_seed(5)
    elements, groups = kind.elements, COLUMNS // kind.elements
    integers = torch.randint(0, 1 << bits, (rows, groups, elements), generator=generator)
    zeros = torch.randint(0, 17 if bits == 4 else 256, (rows, groups, 1), generator=generator)
    scales = torch.rand(rows, groups, 1, generator=generator) * 2e-2 - 1e-2
    scales[::2], scales[1::2] = scales[::2].half().float(), scales[1::2].bfloat16().float()
    data = torch.zeros(rows, groups, kind.nbytes, dtype=torch.uint8)
    data[..., :4] = scales.view(torch.uint8)
    data[..., 0] = zeros[..., 0]
    together = min(64, elements)
    for i in range(elements):
        step, place = divmod(i, together)
        byte = 4 + step * together // 2 + place % (together // 2)
        if bits == 8:
            data[..., 4 + i] = integers[..., i].byte()
        else:
            data[..., byte] |= integers[..., i].byte() << 4 * (place // (together // 2))
    numbers = ((integers - zeros) * scales).flatten(1)
    return BlockWeight(data.flatten(1).to(DEVICE), kind, COLUMNS), numbers


def of_nvfp4(rows: int) -> tuple[BlockWeight, torch.Tensor]:
    """Every code, scales of all sizes, subnormal and negative ones too, and a factor a row."""
    generator = torch.Generator().manual_seed(6)
    codes = torch.randint(0, 16, (rows, COLUMNS), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, (rows, COLUMNS // 16), generator=generator, dtype=torch.uint8)
    scales[scales & 0x7F == 0x7F] = 0
    factors = torch.rand(rows, 1, generator=generator) * 1e-3
    data = torch.empty(rows, COLUMNS // 128, NVFP4.nbytes, dtype=torch.uint8)
    data[..., :4] = factors.view(torch.uint8).unsqueeze(1)
    data[..., 4:12] = scales.view(rows, -1, 8)
    pairs = codes.view(rows, -1, 2, 2, 32)
    data[..., 12:] = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(2)
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = levels[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
    whole = scales.view(torch.float8_e4m3fn).float() * factors
    numbers = numbers * whole.repeat_interleave(16, 1)
    return BlockWeight(data.flatten(1).to(DEVICE), NVFP4, COLUMNS), numbers


def high_bits(rows: int) -> tuple[BlockWeight, torch.Tensor]:
    """Random codes and signs, number by number."""
    generator = torch.Generator().manual_seed(4)
    count = COLUMNS // 128
    scales = torch.rand(rows, count, 1, generator=generator)
    rest = torch.randint(0, 256, (rows, count, 80), generator=generator, dtype=torch.uint8)
    data = torch.cat((scales.view(torch.uint8), rest), 2)
    numbers = torch.empty(rows, count, 128)
    for i in range(128):
        codes = rest[..., 16 + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
        negative = rest[..., i // 8] >> i % 8 & 1
        numbers[..., i] = torch.tensor(F8_LEVELS)[codes.int()] * (1 - 2 * negative.float())
    numbers *= scales
    return BlockWeight(data.flatten(1).to(DEVICE), F8_HIGH, COLUMNS), numbers.flatten(1)


def high_quants(name: str, rows: int) -> tuple[BlockWeight, torch.Tensor]:
    """High bits of a type's blocks, and the means of the least and the greatest numbers that the
    gguf package finds for them.
    """
    stored, _ = blocks(name, rows)
    data, low = reference_split(stored.data.cpu(), stored.kind)
    ends = [
        dequantize(
            reference_join(data, torch.full_like(low, fill), stored.kind).numpy(),
            gguf.GGMLQuantizationType[name],
        )
        for fill in (0, 255)
    ]
    numbers = torch.from_numpy(sum(end.astype(np.float64) for end in ends) / 2).float()
    return BlockWeight(data.to(DEVICE), HIGH_QUANTS[name], COLUMNS), numbers


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_sizes_are_those_of_the_gguf_package(name: str) -> None:
    kind, number = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    assert kind.number == number
    assert (kind.elements, kind.nbytes) == gguf.GGML_QUANT_SIZES[number]
    with pytest.raises(ValueError, match="whole"):
        kind.row_bytes(kind.elements + 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", [*BLOCK_TYPES, F8_E4M3.name, F8_HIGH.name, *OF_HIGH, *OF_INTEGERS, "NVFP4"]
)
def test_decoded_numbers_are_those_of_the_gguf_package(backend, name: str) -> None:
    weight, expected = blocks(name, ROWS if backend == REFERENCE else 5)
    assert weight.shape == expected.shape
    decoded = decode(weight.data, weight.kind, torch.float32).cpu()
    if name in OF_HIGH:
        # A mean is rounded otherwise, and has lost the digits of larger numbers.
        torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=1e-6)
        expected = reference_decode(weight.data.cpu(), weight.kind, torch.float32)
    assert torch.equal(decoded, expected)
    half = decode(weight.data, weight.kind, torch.float16).cpu()
    assert torch.equal(half, expected.half())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("name", FUSED)
def test_products_with_few_rows_are_those_of_the_decoded_numbers(
    backend, draw, name: str, dtype: torch.dtype
) -> None:
    weight, numbers = blocks(name, 37)
    for rows in (1, 18):
        x = draw(rows, COLUMNS + 8, dtype=dtype)[:, :COLUMNS]
        # Rounded as they are multiplied.
        exact = x.double() @ numbers.to(dtype).double().to(x.device).T
        assert_near(block_matmul(x, weight), exact, TOLERANCE[dtype])
    with pytest.raises(ValueError, match=r"block_matmul cannot take x \(2, 64\).*data \(37, "):
        block_matmul(draw(2, 64), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_product_is_that_of_the_dense_matrix(monkeypatch, name: str, dtype: torch.dtype) -> None:
    # Some rows at a time, the last fewer.
    monkeypatch.setattr("triforce_kernels.limits.DECODED_AT_ONCE", 16 * COLUMNS)
    weight, numbers = blocks(name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, COLUMNS, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(ROWS, generator=generator).to(DEVICE, dtype)
    dense = numbers.to(DEVICE, dtype)
    # A GPU multiplies numbers in the dtype of the rows, a processor those of float32.
    decoded = dense if DEVICE.type == "cuda" else numbers
    for taken, multiplied in ((weight, decoded), (dense, dense)):
        product = x.double() @ multiplied.double().T
        bound = product_bound(x, multiplied, torch.float32)
        for added in (None, bias):
            exact = product if added is None else product + added.double()
            # The product is rounded to its dtype, and so is its sum with the bias.
            rounding = torch.finfo(dtype).eps * (product.abs() + exact.abs())
            assert_within(linear(x, taken, added), exact, bound + rounding)
    index = torch.tensor([3, 0, 69, 3], device=DEVICE)
    assert torch.equal(lookup(weight, index, dtype), dense[index])
    assert torch.equal(lookup(dense, index, dtype), dense[index])


def test_matrices_of_different_formats_stand_one_above_the_other() -> None:
    pairs = [blocks("Q4_K", 40), blocks("Q6_K", 7), blocks("Q8_0", 3)]
    plain = torch.randn(5, COLUMNS).to(DEVICE)
    stacked = StackedWeight((*(weight for weight, _ in pairs), plain))
    whole = torch.cat([*(numbers.to(DEVICE) for _, numbers in pairs), plain])
    assert stacked.shape == whole.shape
    x = torch.randn(4, COLUMNS).to(DEVICE)
    exact, bound = x.double() @ whole.double().T, product_bound(x, whole, torch.float32)
    for taken in (stacked, whole):
        assert_within(linear(x, taken), exact, bound)


def test_what_nothing_decodes_is_said(monkeypatch) -> None:
    weight, _ = blocks("IQ1_S")
    monkeypatch.setattr("triforce_kernels.weights.blocks._library", lambda kind: None)
    with pytest.raises(NoDecoderError, match=r"IQ1_S weights need transformers 5\.23"):
        linear(torch.ones(1, COLUMNS, device=DEVICE), weight)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_decoding_takes_no_more_than_plans_count(name: str) -> None:
    weight, numbers = blocks(name, 2000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        decode(weight.data, weight.kind, torch.float32)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert numbers.nbytes <= peak <= DECODE_BYTES * numbers.numel()
