"""KV in 8 bits: whole numbers of a scale a channel, and attention as over what they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kv_stores import SHAPE

from triforce_offload.errors import DoesNotFitError
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.fixed import FixedDense
from triforce_offload.kv.caches.rounded import RoundedKV
from triforce_offload.kv.sizes import dense_bytes, rounded_bytes
from triforce_offload.memory.device import DeviceMemory

CPU, CHUNK, SLOTS, HEADS = torch.device("cpu"), 4, 3, 4
SIZE = (SHAPE.layers, 2, SHAPE.kv_heads)


class Chunks:
    """A Reader of random chunks, some channels of which are far larger; what it is not asked for
    it leaves as it is.
    """

    bytes_read = 0

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = (*SIZE, SLOTS, CHUNK, SHAPE.head_dim)
        self.numbers = torch.randn(size, generator=generator)
        self.numbers *= 10 ** torch.linspace(-3, 2, SHAPE.head_dim)

    def copy(self, moves: torch.Tensor, target: torch.Tensor, first: int = 0) -> None:
        moved = (moves >= 0)[:, None, :, :, None, None].expand_as(target)
        target.fill_(float("nan"))
        target[moved] = self.numbers[first : first + len(moves)][moved]

    def count(self, moves: torch.Tensor, chunk_tokens: int) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def kv() -> RoundedKV:
    return RoundedKV(SHAPE, 32, DeviceMemory(CPU, None), "test")


def moves(*slots: int) -> torch.Tensor:
    """Of all layers and heads, into these slots."""
    made = torch.full((SHAPE.layers, SHAPE.kv_heads, SLOTS), -1)
    made[:, :, list(slots)] = 7
    return made


def stands_for(kv: RoundedKV) -> torch.Tensor:
    return kv.rows * kv.scale.unsqueeze(3)


def of_slots(kv: RoundedKV) -> torch.Tensor:
    return stands_for(kv)[:, :, :, : SLOTS * CHUNK].unflatten(3, (SLOTS, CHUNK))


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_what_is_gathered_is_right_to_half_a_step_of_its_channel(kv, monkeypatch, at_once) -> None:
    monkeypatch.setattr("triforce_offload.kv.sizes._ROUNDED_AT_ONCE", at_once)
    chunks = Chunks()
    kv.measure_again(6400)
    kv.gather(moves(0, 2), chunks, CHUNK)
    peaks = chunks.numbers[:, :, :, [0, 2]].abs().amax((3, 4))
    torch.testing.assert_close(kv.scale, peaks * 1.2125 / 127)
    step = kv.scale[:, :, :, None, None]
    assert ((of_slots(kv) - chunks.numbers).abs() <= step * 0.5001)[:, :, :, [0, 2]].all()
    assert kv.rows.abs().max() == round(127 / 1.2125)
    assert (of_slots(kv)[:, :, :, 1] == 0).all(), "what was not moved stays"


def test_half_precision_near_its_greatest_has_a_scale() -> None:
    kv = RoundedKV(replace(SHAPE, dtype=torch.float16), 32, DeviceMemory(CPU, None), "test")
    numbers = torch.full((*SIZE, 3, SHAPE.head_dim), 60000.0, dtype=torch.float16)
    kv.write(0, numbers)
    assert kv.scale.isfinite().all()
    near = (stands_for(kv)[:, :, :, :3] - numbers).abs()
    assert (near <= kv.scale.unsqueeze(3) * 0.5001).all()


def test_scales_stay_until_all_is_measured_again(kv) -> None:
    small, large = Chunks(0), Chunks(1)
    large.numbers *= 50
    kv.gather(moves(0, 1, 2), small, CHUNK)
    before = kv.scale.clone()
    kv.gather(moves(1), large, CHUNK)
    assert torch.equal(kv.scale, before)
    cut = large.numbers.clamp(min=-127 * before[:, :, :, None, None])
    cut = cut.minimum(127 * before[:, :, :, None, None])
    step = before[:, :, :, None, None]
    assert ((of_slots(kv) - cut).abs() <= step * 0.5001)[:, :, :, 1].all()
    assert ((of_slots(kv) - small.numbers).abs() <= step * 0.5001)[:, :, :, [0, 2]].all()
    kv.measure_again(100)
    kv.gather(moves(0, 1, 2), large, CHUNK)
    torch.testing.assert_close(kv.scale, large.numbers.abs().amax((3, 4)) * 1.3 / 127)


def test_a_text_of_no_whole_chunk_is_measured_as_it_is_written(kv) -> None:
    assert (kv.scale > 0).all()
    kv.write(0, torch.empty(*SIZE, 0, SHAPE.head_dim))
    numbers = torch.randn(*SIZE, 3, SHAPE.head_dim)
    numbers[:, :, :, :, 0] = 0
    kv.write(5, numbers)
    torch.testing.assert_close(kv.scale[..., 1:], numbers.abs().amax(3)[..., 1:] * 2.2 / 127)
    step = kv.scale.unsqueeze(3)
    assert ((stands_for(kv)[:, :, :, 5:8] - numbers).abs() <= step * 0.5001).all()
    assert (kv.rows[..., 0] == 0).all(), "a channel of zeros"


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("count", "parents"), [(1, None), (5, None), (5, (-1, 0, 0, -1, 3))])
def test_attention_is_that_over_what_the_numbers_stand_for(kv, on_device, count, parents) -> None:
    kv.gather(moves(0, 1, 2), Chunks(), CHUNK)
    kv.scale[..., :] = kv.scale.clamp(max=0.05)
    dense = DenseKV(SHAPE, 32, DeviceMemory(CPU, None), "test")
    kv.end = dense.end = SLOTS * CHUNK
    dense.rows.copy_(stands_for(kv))
    qkv = torch.randn(count, HEADS + 2 * SHAPE.kv_heads, SHAPE.head_dim)
    rotation = torch.ones(count, SHAPE.head_dim), torch.zeros(count, SHAPE.head_dim)
    batch = ForwardBatch(torch.arange(count), torch.arange(count), parents, rotation=rotation)
    # What lands behind the end is rounded too.
    both = qkv.clone()
    keys_values = both[:, HEADS:].transpose(0, 1).unflatten(0, (2, SHAPE.kv_heads))
    for layer in range(SHAPE.layers):
        step = kv.scale[layer].unsqueeze(2)
        keys_values.copy_((keys_values / step).add(0.5).floor().clamp(-127, 127) * step)
        cache = FixedDense(kv, CPU) if on_device else kv
        if on_device:
            cache.begin()
        out = cache.attend(layer, qkv, batch)
        expected = dense.attend(layer, both, batch)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        there = slice(kv.end, kv.end + count)
        torch.testing.assert_close(
            stands_for(kv)[layer, :, :, there], dense.rows[layer, :, :, there], rtol=0, atol=1e-5
        )
        both = qkv.clone()
        keys_values = both[:, HEADS:].transpose(0, 1).unflatten(0, (2, SHAPE.kv_heads))
    kept = stands_for(kv)[:, :, :, kv.end + count - 1].clone()
    kv.keep([count - 1])
    assert torch.equal(stands_for(kv)[:, :, :, kv.end - 1], kept)


def test_it_takes_what_was_planned_and_gives_it_back() -> None:
    memory = DeviceMemory(CPU, 1 << 20)
    kv = RoundedKV(SHAPE, 300, memory, "test")
    taken = (1 << 20) - memory.available_bytes
    assert taken <= rounded_bytes(SHAPE, 300) <= taken * 1.01
    assert taken < 0.3 * dense_bytes(SHAPE, 300), "a quarter of float32, and scales"
    kv.close()
    assert memory.available_bytes == 1 << 20
    short = DeviceMemory(CPU, taken - 1000)
    with pytest.raises(DoesNotFitError):
        RoundedKV(SHAPE, 300, short, "test")
    assert short.available_bytes == taken - 1000
