"""Experts: which are chosen, with what weights, and products with those of several rows at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near

from triforce_kernels import dispatch
from triforce_kernels.experts import grouped
from triforce_kernels.experts.grouped import (
    Experts,
    gated_experts,
    has_kernels,
    in_tiles,
    product,
    reference_product,
)
from triforce_kernels.experts.routing import Choice, choose, reference_choose
from triforce_kernels.layer import swiglu
from triforce_kernels.limits import EXPERT_TILE, FEW_ROWS, expert_tile, rows_in_tiles
from triforce_kernels.weights.block_types import BLOCK_TYPES
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.high_bits import HighBitsWeight
from triforce_kernels.weights.integers import quantise
from triforce_kernels.weights.linear import Weight, dense_rows, rows_of
from triforce_kernels.weights.split_bf16 import encode
from triforce_kernels.weights.split_experts import SplitExpertsWeight
from triforce_kernels.weights.tiles import Tiles
from triforce_offload.weights.split_formats import SplitBF16, SplitExperts


def numbers(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([rows for _, rows in dense_rows(weight, dtype)])


def formats(draw, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Weight]:
    """A matrix in every format that has a kernel for experts."""
    dense = draw(rows, columns, dtype=dtype)
    split = encode((dense.float() * torch.logspace(-30, 3, columns, device=DEVICE)).bfloat16())
    bits = torch.randint(0, 200, (rows, BLOCK_TYPES["Q8_0"].row_bytes(columns)))
    data = bits.to(DEVICE, torch.uint8)
    data.unflatten(1, (-1, 34))[..., :2] = torch.tensor([0, 0x24], dtype=torch.uint8)
    three = {} if columns % 64 else {"int3": quantise(dense, bits=3)}
    return {
        "dense": dense,
        "int4": quantise(dense, 32),
        **three,
        "split": split,
        "apart": apart(dense, 5),
        "high": HighBitsWeight(split.high, split.base),
        "blocks": BlockWeight(data, BLOCK_TYPES["Q8_0"], columns),
    }


def apart(dense: torch.Tensor, count: int) -> SplitExpertsWeight:
    """Experts that are split each for itself, with some exceptions in each."""
    rows, columns = dense.shape[0] // count, dense.shape[1]
    form = SplitExperts(count, SplitBF16(rows, columns))
    made = form.view(torch.zeros(form.nbytes, dtype=torch.uint8, device=DEVICE))
    numbers = dense[: rows * count].float()
    numbers[::5, 1] *= 1e-9
    made.write(numbers.bfloat16())
    return made


@pytest.mark.parametrize("tile", [16, 64])
def test_rows_are_in_tiles_of_their_experts(backend, tile: int) -> None:
    """Also more rows than a kernel divides."""
    generator = torch.Generator().manual_seed(1)
    for rows, active, count in ((1, 2, 8), (17, 3, 5), (40, 2, 60), (33, 1, 1), (150, 3, 7)):
        chosen = torch.rand(rows, count, generator=generator).topk(active).indices
        size, order, own, experts, places = in_tiles(chosen.to(DEVICE), count, tile)
        assert size == tile
        assert torch.equal(own >= 0, order >= 0)
        assert torch.equal(own[own >= 0], (own >= 0).nonzero().squeeze(1))
        assert order.shape == (len(experts) * tile,)
        assert places.unique().numel() == rows * active, "each has a place of its own"
        assert torch.equal(
            order[places], torch.arange(rows, device=DEVICE)[:, None].expand(-1, active)
        )
        assert torch.equal(experts[places // tile], chosen.to(DEVICE))
        assert int((order >= 0).sum()) == rows * active
        used = (order.view(-1, tile) >= 0).any(1)
        assert torch.equal(used, experts >= 0), "no tile without rows is multiplied"


def test_rows_without_an_expert_are_in_no_tile(backend) -> None:
    chosen = torch.tensor([[2, -1], [-1, -1], [0, 2], [-1, 1]], device=DEVICE)
    _, order, own, experts, places = in_tiles(chosen, 3)
    assert torch.equal(places < 0, chosen < 0)
    assert order[places[chosen >= 0]].tolist() == [0, 2, 2, 3]
    assert experts[places[chosen >= 0] // EXPERT_TILE].tolist() == [2, 0, 2, 1]
    assert int((order >= 0).sum()) == int((own >= 0).sum()) == 4
    assert int((experts >= 0).sum()) == 3


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("name", ["dense", "int4", "int3", "split", "apart", "high", "blocks"])
@pytest.mark.parametrize("tile", [EXPERT_TILE, 32])
def test_products_equal_those_with_each_expert(backend, draw, tile: int, name, dtype) -> None:
    """The number of columns is no multiple of a tile, nor of what lists of exceptions count in."""
    count, columns, depth = 5, 40, 192
    weight = formats(draw, count * columns, depth, dtype)[name]
    x = draw(18, depth + 8, dtype=dtype)[:, :depth]
    generator = torch.Generator().manual_seed(2)
    chosen = torch.rand(18, count, generator=generator).topk(2).indices.to(DEVICE)
    tile, order, _, experts, places = in_tiles(chosen, count, tile)
    found = product(x, weight, Tiles(tile, columns, order, experts))[places]
    exact = numbers(weight).double().view(count, columns, depth)[chosen]
    expected = (exact @ x.double()[:, None, :, None]).squeeze(-1)
    assert_near(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["dense", "int4", "int3", "split", "high", "blocks"])
def test_rows_of_a_weight_are_its_rows(draw, name) -> None:
    weight = formats(draw, 90, 64, torch.float32)[name]
    assert torch.equal(numbers(rows_of(weight, 37, 70)), numbers(weight)[37:70])


@pytest.mark.parametrize("rows", [1, 7, 70])
def test_weighted_sums_of_gated_experts(backend, draw, rows: int) -> None:
    """By tiles where there are kernels, and on a processor many by one expert after another."""
    count, width, hidden = 6, 24, 64
    gate_up, down = draw(count * 2 * width, hidden), draw(count * hidden, width)
    x, generator = draw(rows, hidden), torch.Generator().manual_seed(3)
    chosen = torch.rand(rows, count, generator=generator).topk(2).indices.to(DEVICE)
    weights = draw(rows, 2).abs()
    found = gated_experts(x, Experts(count, gate_up, down), chosen, weights, swiglu)
    exact = torch.zeros(rows, hidden, dtype=torch.float64, device=DEVICE)
    for row in range(rows):
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            both = gate_up.view(count, -1, hidden)[expert].double() @ x[row].double()
            gate, up = both.chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            exact[row] += weight * (down.view(count, hidden, -1)[expert].double() @ inner)
    assert_near(found, exact, 4 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_a_choice_of_no_expert_adds_nothing(backend, draw, rows: int) -> None:
    """Experts of two places are computed apart, and their sums added (`ExpertPool`). What does not
    count may be anything, as may what no product has written.
    """
    count, width, hidden = 6, 24, 64
    experts = Experts(count, draw(count * 2 * width, hidden), draw(count * hidden, width))
    x, generator = draw(rows, hidden), torch.Generator().manual_seed(4)
    chosen = torch.rand(rows, count, generator=generator).topk(2).indices.to(DEVICE)
    weights = draw(rows, 2).abs()
    whole = gated_experts(x, experts, chosen, weights, swiglu)
    here = chosen % 3 == 0
    parts = [
        gated_experts(x, experts, chosen.where(own, -1), weights.where(own, torch.nan), swiglu)
        for own in (here, ~here)
    ]
    assert_near(sum(parts), whole.double(), 4 * TOLERANCE[torch.float32])
    none = ~here.any(1)
    assert none.any() or rows == 1
    assert not parts[0][none].any()


@pytest.mark.parametrize(("each", "tile"), [(1, 16), (16, 16), (20, 32), (64, 64), (1024, 64)])
def test_tiles_are_as_long_as_experts_have_rows(each: int, tile: int) -> None:
    assert expert_tile(each) == tile


def test_experts_with_many_rows_are_multiplied_one_by_one() -> None:
    """Of a prompt's 1,024 rows an expert of Mixtral has 256, and one of Qwen3-30B-A3B has 64."""
    assert rows_in_tiles(8, 128) == 2048
    assert rows_in_tiles(2, 8) == 512 < 1024
    assert rows_in_tiles(2, 8, most=16) == 128
    assert rows_in_tiles(2, 2, most=16) == FEW_ROWS


def test_many_rows_wait_for_no_choice_where_kernels_multiply_by_tiles(draw, monkeypatch) -> None:
    """A prompt launches a handful of kernels for a layer's experts, however many there are."""
    monkeypatch.setattr(dispatch, "_forced", dispatch.TRITON)
    multiplied: list[Tiles] = []

    def matrices(x: torch.Tensor, weight: Weight, tiles: Tiles) -> torch.Tensor:
        multiplied.append(tiles)
        return reference_product(x, weight, tiles)

    monkeypatch.setattr(grouped, "product", matrices)
    count, width, hidden, rows = 4, 16, 32, FEW_ROWS + 36
    experts = Experts(count, draw(count * 2 * width, hidden), draw(count * hidden, width))
    chosen = torch.rand(rows, count).topk(2).indices.to(DEVICE)
    x, weights = draw(rows, hidden).bfloat16(), draw(rows, 2).softmax(1)
    experts = experts._replace(gate_up=experts.gate_up.bfloat16(), down=experts.down.bfloat16())
    found = gated_experts(x, experts, chosen, weights, swiglu, come=never)
    assert [tiles.rows for tiles in multiplied] == [64, 64]
    monkeypatch.setattr(dispatch, "_forced", dispatch.REFERENCE)
    assert_near(found, gated_experts(x, experts, chosen, weights, swiglu), TOLERANCE[x.dtype])


def never(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the host waits for the device")


def test_a_block_type_without_a_kernel_goes_expert_by_expert(backend) -> None:
    kind = BLOCK_TYPES["IQ1_S"]
    weight = BlockWeight(
        torch.zeros(8, kind.row_bytes(256), dtype=torch.uint8, device=DEVICE), kind, 256
    )
    assert not has_kernels(Experts(1, weight, weight))


def test_experts_are_chosen_by_their_scores(backend) -> None:
    products = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, -1.0, 4.0, 5.0]], device=DEVICE)
    chosen, weights = choose(products, None, Choice(2))
    assert chosen.tolist() == [[1, 2], [3, 2]]
    # Normalised, the softmax of all is that of the chosen ones.
    expected = torch.tensor([[3.0, 2.0], [5.0, 4.0]], device=DEVICE).softmax(-1)
    torch.testing.assert_close(weights, expected)
    _, plain = choose(products, None, Choice(2, normalised=False))
    torch.testing.assert_close(plain, products.softmax(-1).gather(1, chosen))


def test_a_bias_chooses_and_does_not_weigh(backend) -> None:
    products = torch.tensor([[0.5, 0.0, -0.5]], device=DEVICE)
    bias = torch.tensor([0.0, 0.0, 1.0], device=DEVICE)
    chosen, weights = choose(products, bias, Choice(1, sigmoid=True, normalised=False, scale=2.0))
    assert chosen.tolist() == [[2]]
    torch.testing.assert_close(weights, 2.0 * products[:, 2:].sigmoid())


def test_groups_are_chosen_by_their_two_best_experts(backend) -> None:
    """The best expert is in a group whose second is bad."""
    products = torch.tensor([[9.0, -9.0, 2.0, 2.5, 0.0, 0.5]], device=DEVICE)
    choice = Choice(2, sigmoid=True, groups=3, chosen_groups=1)
    chosen, _ = choose(products, None, choice)
    assert sorted(chosen[0].tolist()) == [2, 3]
    chosen, _ = choose(products, None, Choice(2, sigmoid=True))
    assert 0 in chosen[0].tolist()


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("count", "groups"), [(128, 1), (60, 4), (3, 3)])
def test_every_way_to_choose_is_the_references(backend, draw, count, groups, sigmoid) -> None:
    choice = Choice(
        min(6, count // groups * 2), sigmoid=sigmoid, scale=1.5, groups=groups, chosen_groups=2
    )
    if groups == 1:
        choice = replace(choice, chosen_groups=1)
    products, bias = draw(33, count), 0.1 * draw(count)
    for added in (None, bias):
        chosen, weights = choose(products, added, choice)
        expected, theirs = reference_choose(products, added, choice)
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(weights, theirs, rtol=1e-5, atol=1e-7)


def test_products_that_are_not_numbers_choose_experts_that_exist(backend, draw) -> None:
    products = draw(4, 5)
    products[1], products[2, 3] = torch.nan, torch.inf
    chosen, weights = choose(products, None, Choice(3))
    assert chosen.min() >= 0
    assert chosen.max() < 5
    assert weights[1].isnan().all()
