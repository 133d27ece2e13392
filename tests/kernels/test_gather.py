"""Chunks arrive in their slots, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE

from triforce_kernels.dispatch import REFERENCE
from triforce_kernels.kv.gather import ChunkSource, gather_chunks

LAYERS, HEADS, BLOCK, TAIL, CHUNK, SLOTS = 2, 3, 32, 50, 8, 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 20])
@pytest.mark.parametrize("blocks", [0, 3])
@pytest.mark.parametrize("sides", [1, 2])
def test_chunks_come_from_blocks_and_from_the_tail(
    backend, draw, dtype, head_dim, blocks, sides
) -> None:
    stored = [
        [draw(sides, HEADS, n, head_dim).to(dtype) for n in (*[BLOCK] * blocks, TAIL)]
        for _ in range(LAYERS)
    ]
    if backend == REFERENCE:  # which reads with the processor
        stored = [[x.cpu() for x in layer] for layer in stored]
    addresses = torch.tensor([[x.data_ptr() for x in layer] for layer in stored], device=DEVICE)
    generator = torch.Generator().manual_seed(1)
    most = blocks * BLOCK // CHUNK + TAIL // CHUNK
    moves = torch.randint(-1, most, (LAYERS, HEADS, SLOTS), generator=generator)
    rows = torch.full((LAYERS, sides, HEADS, SLOTS * CHUNK + 5, head_dim), 7, dtype=dtype)
    expected = rows.clone()
    for layer in range(LAYERS):
        text = torch.cat(stored[layer], 2).cpu()
        for head in range(HEADS):
            for slot, chunk in enumerate(moves[layer, head].tolist()):
                if chunk >= 0:
                    there = slice(slot * CHUNK, (slot + 1) * CHUNK)
                    source = text[:, head, chunk * CHUNK : (chunk + 1) * CHUNK]
                    expected[layer, :, head, there] = source
    rows = rows.to(DEVICE)
    target = rows[:, :, :, : SLOTS * CHUNK].unflatten(3, (SLOTS, CHUNK))
    gather_chunks(moves.to(DEVICE), ChunkSource(addresses, BLOCK, TAIL), target)
    assert torch.equal(rows.cpu(), expected)


def test_chunks_larger_than_a_program_takes_at_once(backend, draw) -> None:
    stored = draw(2, 1, 128, 48)
    if backend == REFERENCE:
        stored = stored.cpu()
    addresses = torch.full((1, 2), stored.data_ptr(), device=DEVICE)
    moves = torch.tensor([[[-1, 0]]], device=DEVICE)
    target = torch.zeros(1, 2, 1, 2, 128, 48, device=DEVICE)
    gather_chunks(moves, ChunkSource(addresses, 128, 128), target)
    assert torch.equal(target[0, :, :, 1].cpu(), stored.cpu())
    assert (target[0, :, :, 0] == 0).all()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.gpu
def test_registered_host_memory_is_read_in_place(backend, draw) -> None:
    from triforce_offload.link.cuda import reads_host_memory
    from triforce_offload.memory.host import CudaDriver, HostMemory

    if backend == "reference" or not reads_host_memory(torch.device("cuda:0")):
        pytest.skip("the processor reads device memory, or this GPU no host memory")
    memory = HostMemory(CudaDriver(torch.device("cuda:0")))
    shape = (2, HEADS, BLOCK, 16)
    with memory.arena(2 * HEADS * BLOCK * 16 * 2) as arena:
        assert arena.pinned
        block = arena.bytes.view(torch.float16).view(shape)
        block.copy_(torch.randn(shape))
        addresses = torch.tensor([[block.data_ptr(), block.data_ptr()]], device=DEVICE)
        moves = torch.tensor([[[3, -1], [0, 1], [-1, 2]]], device=DEVICE)
        target = torch.zeros(1, 2, HEADS, 2, CHUNK, 16, dtype=torch.float16, device=DEVICE)
        gather_chunks(moves, ChunkSource(addresses, BLOCK, BLOCK), target)
        chunks = block.unflatten(2, (-1, CHUNK))
        for head, slot in (moves[0] >= 0).nonzero().tolist():
            assert torch.equal(
                target[0, :, head, slot].cpu(), chunks[:, head, moves[0, head, slot]]
            )


def test_what_does_not_fit_is_reported(backend) -> None:
    source = ChunkSource(torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), 12, 50)
    moves = torch.full((1, 2, 3), -1, device=DEVICE)
    with pytest.raises(ValueError, match=r"gather_chunks cannot take .*block_tokens 12"):
        gather_chunks(moves, source, torch.empty(1, 2, 2, 3, 8, 16, device=DEVICE))
