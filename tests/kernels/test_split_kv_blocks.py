"""P1 of KV: a block split is the block, to the last bit, or is refused."""

from __future__ import annotations

import pytest
import torch
from exactness import DEVICE

from triforce_kernels import dispatch
from triforce_kernels.dispatch import HOST, REFERENCE
from triforce_kernels.kv.gather_split import SplitChunkSource, gather_split_chunks
from triforce_kernels.kv.split_kv import SplitKV, decode_blocks, decode_chunks, encode_block
from triforce_offload.kv.block_format import SplitBlocks
from triforce_offload.kv.shape import KVShape, SplitBlockLayout

HEADS, TOKENS, HEAD_DIM = 4, 40, 16
ROOM = 32


def stored(
    heads: int = HEADS, tokens: int = TOKENS, head_dim: int = HEAD_DIM, blocks: int = 1
) -> tuple[torch.Tensor, SplitBlockLayout]:
    """Blocks side by side that hold anything, flat."""
    at = SplitBlockLayout.of(heads, tokens, head_dim)
    return torch.full((blocks, at.nbytes + 256), 0x5A, dtype=torch.uint8, device=DEVICE), at


def empty_split(heads: int = HEADS, tokens: int = TOKENS, head_dim: int = HEAD_DIM) -> SplitKV:
    """Of what holds anything."""
    blocks, at = stored(heads, tokens, head_dim)
    return SplitKV.of(blocks[0], at)


def normal(heads: int = HEADS, tokens: int = TOKENS, head_dim: int = HEAD_DIM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(heads, tokens, head_dim, generator=generator).bfloat16().to(DEVICE)


def of_each_kind() -> torch.Tensor:
    """Exceptions of each kind, the first number of the block among them."""
    block = normal()
    block[0, 0, 0] = block[3, 39, 15] = 1e-30
    block[0, 1, 2], block[1, 5, 8] = torch.inf, -torch.inf
    block[2, 7, 7] = torch.nan
    block[2, 8, 7] = 1e-40
    block[:, 9] = 0.0
    block[:, 10] = -0.0
    return block


def patterns() -> torch.Tensor:
    """Every pattern of 16 bits, of one exponent and sign in each channel but for the first two
    heads, which are zeros, subnormals, infinities and NaN.
    """
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return every.view(torch.bfloat16).view(4, 128, 128).transpose(1, 2).contiguous().to(DEVICE)


BLOCKS = {
    "normal": normal,
    "of each kind": of_each_kind,
    "a channel of one value": lambda: normal().index_fill(
        2, torch.tensor([3], device=DEVICE), -7.0
    ),
    "channels of other scales": lambda: (
        normal() * torch.logspace(-30, 30, HEAD_DIM).to(DEVICE).bfloat16()
    ),
    "zeros": lambda: torch.zeros_like(normal()),
    "not contiguous": lambda: normal(HEADS, 3 * TOKENS)[:, 7 : 7 + TOKENS],
    "one token": lambda: normal(HEADS, 1),
    "more than are coded at a time": lambda: normal(3, 1100, 128),
}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the last bit, NaNs included."""
    return torch.equal(
        found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)
    )


@pytest.mark.parametrize("name", BLOCKS)
def test_the_processor_decodes_what_the_reference_does(make, monkeypatch, name: str) -> None:
    """With heads of sizes that are no multiple of a vector, and damaged lists of exceptions."""
    monkeypatch.setattr(dispatch, "_forced", HOST)
    for width in (HEAD_DIM, 10, 2, 128):
        block = BLOCKS[name]().cpu()
        block = block.repeat(1, 1, -(-width // block.shape[2]))[..., :width].contiguous()
        stored_block, at = (
            part.cpu() if torch.is_tensor(part) else part for part in stored(*block.shape)
        )
        split = SplitKV.of(stored_block[0], at)
        if not encode_block(block, split):
            continue
        around = torch.full((block.shape[0], block.shape[1] + 4, width + 3), 3.0).bfloat16()
        into = around[:, 2:-2, :width]
        decode_blocks(stored_block, at, into[None])
        assert same(into, block)
        assert (around[:, :2] == 3).all()
        assert (around[:, -2:] == 3).all()
        assert (around[..., width:] == 3).all()
        split.places[-2:] = torch.tensor([-5, block.numel()])
        decode_blocks(stored_block, at, into[None])
        assert same(into, block)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_comes_back_to_the_last_bit(backend, name: str) -> None:
    block = BLOCKS[name]()
    blocks, at = stored(*block.shape)
    assert encode_block(block, SplitKV.of(blocks[0], at))
    found = torch.empty_like(block)
    decode_blocks(blocks, at, found[None])
    assert same(found, block)
    # And to where others lie on both sides.
    around = torch.full((block.shape[0], block.shape[1] + 4, block.shape[2]), 3.0)
    around = around.bfloat16().to(DEVICE)
    decode_blocks(blocks, at, around[None, :, 1:-3])
    assert same(around[:, 1:-3], block)
    assert (around[:, [0, -3, -2, -1]] == 3).all()


def test_blocks_that_lie_side_by_side_are_decoded_by_the_launches_of_one(
    backend, monkeypatch
) -> None:
    kinds = [of_each_kind(), normal(), torch.zeros_like(normal()), normal().flip(1), normal() * 3]
    shape = KVShape(1, HEADS // 2, HEAD_DIM, TOKENS, torch.bfloat16, split=True)
    scratch = torch.empty(2 * shape.dense_block_bytes + 8, dtype=torch.uint8, device=DEVICE)
    coder = SplitBlocks(shape, scratch)
    blocks, at = stored(blocks=len(kinds))
    for block, kind in zip(blocks, kinds, strict=True):
        assert encode_block(kind, SplitKV.of(block, at))
    decoded: list[int] = []
    decode = decode_blocks

    def counted(some: torch.Tensor, *rest: object) -> None:
        decoded.append(len(some))
        decode(some, *rest)

    monkeypatch.setattr("triforce_offload.kv.block_format.decode_blocks", counted)
    found = []
    for keys, values in coder.runs(blocks):
        found += [torch.cat(both) for both in zip(keys, values, strict=True)]
    assert decoded == [2, 2, 1], "as many at a time as there is room for"
    assert all(same(*both) for both in zip(found, kinds, strict=True))


@pytest.mark.parametrize("head", range(4))
def test_every_pattern_of_a_finite_number_comes_back(backend, head: int) -> None:
    block = patterns()[head : head + 1]
    block = block.where(block.isfinite(), 1.0)
    # An exponent and a sign in each channel: all of it has codes, but for what is subnormal.
    blocks, at = stored(*block.shape)
    if encode_block(block, SplitKV.of(blocks[0], at)):
        found = torch.empty_like(block)
        decode_blocks(blocks, at, found[None])
        assert same(found, block)
    else:
        assert ((block != 0) & (block.abs() < 2.0**-126)).sum() > ROOM


@pytest.mark.parametrize("more", [0, 1])
def test_a_block_with_more_exceptions_than_room_is_refused(backend, more: int) -> None:
    block = normal()
    # None is small by chance.
    block[block.abs() < 0.01] = 0.01
    block.view(-1)[torch.arange(ROOM + more) * 7 + 1] *= 2.0**-40
    blocks, at = stored()
    assert encode_block(block, SplitKV.of(blocks[0], at)) == (more == 0)
    if not more:
        found = torch.empty_like(block)
        decode_blocks(blocks, at, found[None])
        assert same(found, block)


def test_exceptions_of_every_slice_are_put_where_they_belong(monkeypatch) -> None:
    """Two heads are coded at a time: the second slice has exceptions of its own."""
    monkeypatch.setattr("triforce_kernels.limits.KV_CODED_AT_ONCE", 2 * TOKENS * HEAD_DIM)
    block = of_each_kind()
    blocks, at = stored()
    assert encode_block(block, SplitKV.of(blocks[0], at))
    found = torch.empty_like(block)
    decode_blocks(blocks, at, found[None])
    assert same(found, block)


def test_chunks_are_the_numbers_but_for_exceptions() -> None:
    block = of_each_kind()
    coded = empty_split()
    assert encode_block(block, coded)
    heads = torch.tensor([1, 0, 1], device=DEVICE)
    chunks = torch.tensor([4, 0, 1], device=DEVICE)
    found = decode_chunks(coded, heads, chunks, 8)
    listed = torch.zeros_like(block, dtype=torch.bool)
    listed.view(-1)[coded.places.long()] = True
    for half in range(2):
        for i, (head, chunk) in enumerate(zip(heads.tolist(), chunks.tolist(), strict=True)):
            where = 2 * half + head, slice(8 * chunk, 8 * chunk + 8)
            expected = block[where].masked_fill(listed[where], 0)
            assert same(found[half, i].masked_fill(listed[where], 0), expected)
            assert (found[half, i][listed[where]].abs() < 2.0**-126).all()


@pytest.mark.parametrize(("head_dim", "chunk"), [(16, 8), (20, 8), (16, 40)])
@pytest.mark.parametrize("sides", [1, 2])
def test_chunks_are_gathered_from_blocks_and_from_the_tail(
    backend, head_dim: int, chunk: int, sides: int
) -> None:
    layers, kv_heads, blocks, tokens, tail_tokens, slots = 2, 2, 2, 40, 80, 5
    shape = KVShape(layers, kv_heads, head_dim, tokens, torch.bfloat16, split=True, sides=sides)
    device = torch.device("cpu") if backend == REFERENCE else DEVICE
    made = normal(sides * kv_heads, layers * (blocks * tokens + tail_tokens), head_dim).to(device)
    # Without exceptions, which chunks come without.
    made = made.where(made.abs() > 0.01, 0.5)
    texts = made.view(sides, kv_heads, layers, -1, head_dim).unbind(2)
    stored = SplitBlocks(shape, torch.empty(shape.scratch_bytes, dtype=torch.uint8, device=device))
    kept: list[list[torch.Tensor]] = []
    for text in texts:
        parts = [
            torch.empty(shape.block_bytes, dtype=torch.uint8, device=device) for _ in range(blocks)
        ]
        for index, part in enumerate(parts):
            assert stored.write(part, text[:, :, index * tokens : (index + 1) * tokens])
        parts.append(text[:, :, blocks * tokens :].contiguous())
        kept.append(parts)
    table = [[part.data_ptr() for part in parts] for parts in kept]
    most = (blocks * tokens + tail_tokens) // chunk
    moves = torch.randint(
        -1, most, (layers, kv_heads, slots), generator=torch.Generator().manual_seed(1)
    )
    rows = torch.full((layers, sides, kv_heads, slots * chunk + 3, head_dim), 7.0).bfloat16()
    expected = rows.clone()
    for layer, head, slot in (moves >= 0).nonzero().tolist():
        first = int(moves[layer, head, slot]) * chunk
        there = slice(slot * chunk, (slot + 1) * chunk)
        expected[layer, :, head, there] = texts[layer][:, head, first : first + chunk].cpu()
    rows = rows.to(device)
    at = shape.parts
    gather_split_chunks(
        moves.to(device),
        SplitChunkSource(
            torch.tensor(table, device=device), tokens, tail_tokens, at.high, at.low, at.base
        ),
        rows[:, :, :, : slots * chunk].unflatten(3, (slots, chunk)),
    )
    assert same(rows.cpu(), expected)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "tokens"),
    [(8, 128, 4096), (3, 64, 512), (32, 128, 1024), (1, 64, 1024)],
)
def test_a_block_takes_twelve_bits_and_a_tenth(kv_heads: int, head_dim: int, tokens: int) -> None:
    shape = KVShape(1, kv_heads, head_dim, tokens, torch.bfloat16, split=True)
    assert 12 < shape.bits_per_number <= 12.1
    assert shape.slot_bytes == shape.dense_block_bytes == 16 / 8 * shape.numbers


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="encode_block"):
        encode_block(normal().float(), empty_split())
    blocks, at = stored()
    for into in (normal()[None, :, :, ::2], normal()[None].float(), normal()):
        with pytest.raises(ValueError, match="decode_blocks"):
            decode_blocks(blocks, at, into)
    with pytest.raises(ValueError, match="decode_blocks"):
        decode_blocks(blocks[:, : at.nbytes - 1], at, normal()[None])
    with pytest.raises(ValueError, match="encode_block"):
        encode_block(normal(HEADS, TOKENS + 1), empty_split())
    with pytest.raises(ValueError, match="decode_chunks"):
        decode_chunks(empty_split(), torch.tensor([0]), torch.tensor([0]), 7)
