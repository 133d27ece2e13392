"""Device, link, pinned memory and recording by themselves. Simulated without a GPU."""

from __future__ import annotations

import pytest
import torch
from simulated_gpu import REAL

from triforce_kernels.attention.attention import partial_attention, reference_attention
from triforce_kernels.weights.block_types import ALL_TYPES
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.high_bits import HighBitsWeight
from triforce_kernels.weights.integers import quantise
from triforce_kernels.weights.linear import linear
from triforce_kernels.weights.split_bf16 import encode
from triforce_offload.graphs import CudaRecorder
from triforce_offload.link.cuda import CudaLink
from triforce_offload.link.staging import StagedLink
from triforce_offload.memory.host import CudaDriver, HostMemory

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
OF_BLOCKS = ("Q3_K", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "IQ3_S", "INT4_128")


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize(
    "shape", [(2, 3, 512, 64), (1, 17, 513, 128), (4, 1, 7, 80), (2, 5, 9, 36), (1, 9, 70, 512)]
)
@pytest.mark.parametrize("masked", ["no", "causal", "mask"])
def test_partial_attention_matches_float64(shape, dtype, tolerance, masked) -> None:
    kv_heads, rows, tokens, head_dim = shape
    causal = masked == "causal"
    tokens = rows if causal else tokens
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(kv_heads, count, head_dim, generator=generator).to("cuda", dtype)

    query, key, value = draw(rows), draw(tokens), draw(tokens)
    mask = None
    if masked == "mask":
        hidden = torch.rand(rows, tokens, generator=generator) < 0.5
        hidden[:, 0] = False
        mask = torch.zeros(rows, tokens).masked_fill_(hidden, float("-inf")).to("cuda", dtype)
    ours = partial_attention(query, key, value, mask=mask, causal=causal)
    exact = reference_attention(
        query.double(),
        key.double(),
        value.double(),
        mask=None if mask is None else mask.double(),
        causal=causal,
    )
    assert (ours.out.double() - exact.out).abs().max() <= tolerance * exact.out.abs().max()
    assert (ours.lse - exact.lse).abs().max() <= tolerance * exact.lse.abs().max().clamp_min(1)
    assert ours.lse.shape == (kv_heads, rows)


def test_host_memory_is_pinned_and_the_link_has_a_bandwidth() -> None:
    memory = HostMemory(CudaDriver(DEVICE))
    with memory.arena(1 << 20) as arena:
        assert arena.pinned
        assert arena.bytes.is_pinned()
        assert memory.is_direct(arena.bytes)
    link = CudaLink(DEVICE, memory)
    assert link.bandwidth > (1e9 if REAL else 0)
    assert link.copy_bytes in (16 << 20, 32 << 20)
    link.close()


def test_copies_are_cut_where_registered_pieces_end(monkeypatch) -> None:
    piece = 1 << 20
    memory = HostMemory(CudaDriver(DEVICE))
    link = CudaLink(DEVICE, memory)  # probes with copies larger than such pieces
    monkeypatch.setattr("triforce_offload.memory.host.PIECE_BYTES", piece)
    source = torch.randint(256, (3 * piece + 4096,), dtype=torch.uint8)
    with memory.arena(source.numel()) as arena:
        assert arena.pinned
        arena.bytes.copy_(source)
        there = torch.empty(source.numel(), dtype=torch.uint8, device=DEVICE)
        link.wait(link.to_device(there, arena.bytes, (link.record(),)))
        assert torch.equal(there.cpu(), source)
        arena.bytes.zero_()
        link.wait_on_host(link.to_host(arena.bytes, there, (link.record(),)))
        assert torch.equal(arena.bytes, source)
        # An expert, or a buffer behind others, begins in the middle of a piece.
        for begin, end in ((piece - 64, piece + 64), (100, 3 * piece), (piece, piece + 1), (7, 7)):
            part = torch.zeros(end - begin, dtype=torch.uint8, device=DEVICE)
            link.wait(link.to_device(part, arena.bytes[begin:end], (link.record(),)))
            assert torch.equal(part.cpu(), source[begin:end])
    link.close()


@pytest.mark.parametrize("pin", [True, False])
def test_staged_copies_bring_the_same_bytes(pin: bool) -> None:
    memory = HostMemory(CudaDriver(DEVICE), pin=pin)
    link = StagedLink(CudaLink(DEVICE, memory), memory, 1 << 16)
    generator = torch.Generator().manual_seed(0)
    for size in (1, 1 << 16, 5 * (1 << 16) + 3, 1 << 22):
        with memory.arena(size) as arena:
            assert arena.pinned == pin
            source = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
            there, back = source.to(DEVICE), torch.empty(size, dtype=torch.uint8, device=DEVICE)
            written = link.to_host(arena.bytes, there, (link.record(),))
            link.wait(link.to_device(back, arena.bytes, (written,)))
            assert torch.equal(back.cpu(), source)
    link.synchronize()
    link.close()


def test_accepting_keeps_the_distribution_on_the_device() -> None:
    """L1 on the device, with its own generator."""
    from law_tests import LEAST_P, configuration, p_value

    from triforce_core.decoding.acceptance import accept
    from triforce_core.decoding.distributions import draw

    draft, target = (probs.cuda() for probs in configuration(7))
    generator = torch.Generator("cuda").manual_seed(0)
    trials, (length, vocab) = 100_000, draft.shape
    tokens = torch.stack([draw(law.expand(trials, vocab), generator) for law in draft], 1)
    verdict = accept(
        tokens,
        draft.expand(trials, length, vocab),
        target.expand(trials, length + 1, vocab),
        generator,
    )
    first = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.token)
    counts = first.bincount(minlength=vocab).cpu().unsqueeze(0)
    assert p_value(counts, target[:1].cpu()) > LEAST_P


def test_recorders_share_a_stream_and_its_workspace() -> None:
    matrix = torch.ones(64, 64, device=DEVICE)

    def multiply() -> float:
        return float(CudaRecorder(DEVICE).record(lambda: matrix @ matrix)()[0, 0])

    def reserved() -> int:
        assert multiply() == 64
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    reserved()
    first = reserved()
    assert [reserved() for _ in range(5)] == [first] * 5


@pytest.mark.not_simulated("the interpreter multiplies as the processor does")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", ["int4", "int3", "split", "high", *OF_BLOCKS])
def test_rows_of_products_have_the_same_bits_in_tiles_of_one_size(weight, dtype) -> None:
    """Wherever a row is, and whatever is beside it; the depth of this matrix is divided. Tiles of
    16 rows and of 64 may differ: on an H200 those of 64 use other instructions.
    """
    columns, depth = 1536, 2048
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(columns, depth, generator=generator) * 0.02
    if weight in ("int3", "int4"):
        packed = quantise(dense.to(DEVICE, dtype), bits=int(weight[-1]))
    elif weight in ("split", "high"):
        packed = encode(dense.bfloat16().to(DEVICE))
        packed = HighBitsWeight.of(packed) if weight == "high" else packed
    else:
        kind = ALL_TYPES[weight]
        codes = torch.randint(0, 60, (columns, kind.row_bytes(depth)), generator=generator)
        packed = BlockWeight(codes.to(DEVICE, torch.uint8), kind, depth)
    # Small, since numbers of some blocks are in the thousands here.
    x = (torch.randn(64, depth, generator=generator) * 0.05).to(DEVICE, dtype)
    parts = {16: ((0, 1), (3, 4), (0, 5), (2, 13)), 32: ((0, 17), (5, 30)), 64: ((0, 33), (9, 60))}
    for tile, places in parts.items():
        whole = linear(x[:tile], packed)
        assert whole.isfinite().all()
        for first, end in places:
            assert torch.equal(linear(x[first:end], packed), whole[first:end]), (first, end)
