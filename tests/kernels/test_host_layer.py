"""The small operations and the attention of the processor's compiled kernels, for every make of
vector units that runs here: float64's numbers, and the same bits at every place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from exactness import TOLERANCE, assert_near

from triforce_kernels import dispatch, elementwise, layer
from triforce_kernels.attention.streaming import Running, attend_blocks, attend_cache, attend_tail
from triforce_kernels.dispatch import HOST
from triforce_kernels.experts.routing import Choice, choose, reference_choose
from triforce_kernels.host.layer import of_length_one
from triforce_kernels.host.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_forced", HOST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus", "tanh"])
def test_functions_are_those_of_float64_at_every_place(make, name: str, dtype) -> None:
    function: Callable = getattr(elementwise, name)
    wide = torch.linspace(-40, 40, 1003, dtype=torch.float64)
    small = torch.logspace(-30, 0, 200, dtype=torch.float64)
    x = torch.cat((wide, small, -small, torch.tensor([0.0, 100.0, -100.0]))).to(dtype)
    found, exact = function(x), elementwise.reference(x.double(), name)
    assert (found.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    # Near zero, too, where numbers are not denormal.
    normal = exact.abs() > torch.finfo(dtype).tiny
    relative = (found.double() / exact - 1).abs()[normal]
    assert relative.max() <= 8 * torch.finfo(dtype).eps
    odd = torch.tensor([float("nan"), float("inf"), float("-inf")]).to(dtype)
    special, wanted = function(odd), elementwise.reference(odd, name)
    assert torch.equal(special.isnan(), wanted.isnan())
    assert torch.equal(special.nan_to_num(7.0), wanted.nan_to_num(7.0))
    for first in (1, 3, 15, 17):
        assert torch.equal(function(x[first:]), found[first:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 96, 1500])
def test_norms_and_activations_have_the_same_bits_at_every_place(make, dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(17, 4, 2 * width + 3, generator=generator).to(dtype)[:, 1:3, : 2 * width]
    weight, delta = torch.randn(2, 2 * width, generator=generator).to(dtype)
    halves = x[..., :width]
    double = halves.double()
    scale = torch.rsqrt(double.square().mean(-1, keepdim=True) + 1e-5)
    runs = {
        "rms": lambda rows: layer.rms_norm(rows, weight[:width], 1e-5),
        "rms + 1": lambda rows: layer.rms_norm(rows, weight[:width], 1e-5, offset=1.0),
        "layer": lambda rows: layer.layer_norm(rows, weight[:width], 1e-5),
    }
    exact = {
        "rms": double * scale * weight[:width].double(),
        "rms + 1": double * scale * (weight[:width].double() + 1),
        "layer": F.layer_norm(double, (width,), weight[:width].double(), None, 1e-5),
    }
    for name, run in runs.items():
        whole = run(halves)
        # Rounded before the product with the weight, too.
        assert_near(whole, exact[name], 2 * TOLERANCE[dtype])
        for row in (0, 7, 16):
            assert torch.equal(run(halves[row : row + 1]), whole[row : row + 1]), name
    added = halves.clone()
    normed = layer.rms_norm(added, weight[:width], 1e-5, delta[:width].expand_as(halves))
    assert torch.equal(added, halves + delta[:width])
    assert torch.equal(normed, layer.rms_norm(added, weight[:width], 1e-5))
    unit = of_length_one(halves, 1e-6, 0.5)
    assert unit.shape == (2, 17, width)
    length = (double.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_near(unit, (double / length * 0.5).transpose(0, 1), TOLERANCE[torch.float32])
    rows = x.flatten(0, 1)
    for gated in (layer.swiglu, layer.geglu, layer.clamped_swiglu):
        whole = gated(rows)
        reference = getattr(layer, f"reference_{gated.__name__}")
        assert_near(whole, reference(rows.double()), 4 * TOLERANCE[dtype])
        for row in (0, 9, 33):
            assert torch.equal(gated(rows[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 64, 80])
def test_rope_rounds_as_the_reference(make, dtype, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(9, 8, head_dim, generator=generator).to(dtype)
    cos, sin = torch.randn(2, 9, head_dim, generator=generator).to(dtype)
    results = []
    for run in (layer.rope_into, partial(layer.reference_rope_into, scale=None)):
        cache = torch.zeros(2, 2, 16, head_dim, dtype=dtype)
        results.append((run(heads, cos, sin, *cache, 5), cache))
    (ours, cache), (reference, expected) = results
    assert torch.equal(ours, reference)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    "choice",
    [
        Choice(3),
        Choice(2, normalised=False, scale=2.5),
        Choice(4, sigmoid=True, groups=4, chosen_groups=2),
        Choice(1, sigmoid=True, groups=12, chosen_groups=3),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_chosen_as_the_reference_chooses(choice: Choice, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    products = torch.randn(40, 12, generator=generator) * 3
    bias = torch.randn(12, generator=generator) if biased else None
    chosen, weights = choose(products, bias, choice)
    wide = None if bias is None else bias.double()
    expected, shares = reference_choose(products.double(), wide, choice)
    assert torch.equal(chosen, expected)
    assert_near(weights, shares, TOLERANCE[torch.float32])
    alone = [choose(products[row : row + 1], bias, choice) for row in range(40)]
    assert torch.equal(torch.cat([each for _, each in alone]), weights)


KV_HEADS, GROUP, TOKENS = 2, 3, 200


@pytest.fixture
def text() -> Callable:
    """Queries [heads, tokens, head_dim], keys and values of a text."""

    def make(dtype: torch.dtype, head_dim: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(KV_HEADS * GROUP, TOKENS, head_dim, generator=generator)
        keys = torch.randn(2, KV_HEADS, TOKENS, head_dim, generator=generator)
        return query.to(dtype), *keys.to(dtype)

    return make


def packed(query: torch.Tensor, first: int, end: int) -> torch.Tensor:
    return query[:, first:end].reshape(KV_HEADS, -1, query.shape[2])


def unpacked(out: torch.Tensor, tokens: int) -> torch.Tensor:
    return out.reshape(KV_HEADS * GROUP, tokens, -1)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float32, 64), (torch.bfloat16, 80), (torch.float16, 300)],
)
@pytest.mark.parametrize("window", [None, 20, 100])
def test_a_row_attends_alike_alone_in_a_pass_and_in_a_prompt(
    make, text, dtype, head_dim: int, window: int | None
) -> None:
    query, key, value = text(dtype, head_dim)
    rows = [
        attend_cache(packed(query, at, at + 1), key, value, 1, at, window).out
        for at in range(TOKENS)
    ]
    alone = torch.cat([unpacked(row, 1) for row in rows], 1)
    whole = attend_cache(packed(query, 0, TOKENS), key, value, TOKENS, 0, window).out
    assert torch.equal(unpacked(whole, TOKENS), alone)
    for first, count in ((0, 17), (60, 5), (63, 65), (130, 1)):
        part = packed(query, first, first + count)
        later = 0 if window is None else max(0, first + 1 - window) // 3
        held = (key[:, later:], value[:, later:])
        out = attend_cache(part, *held, count, first - later, window, first=later).out
        assert torch.equal(unpacked(out, count), alone[:, first : first + count])
        if window is not None:
            continue
        running, blocks = Running.of(part), first // 64 * 64
        for at in range(0, blocks, 64):
            here = slice(at, at + 64)
            attend_blocks(running, part, key[None, :, here], value[None, :, here])
        tail = slice(blocks, first + count)
        out = attend_tail(running, part, key[:, tail], value[:, tail], count).out
        assert torch.equal(unpacked(out, count), alone[:, first : first + count])


@pytest.mark.parametrize("window", [None, 10, 70])
def test_a_row_of_a_tree_attends_as_its_path_alone(make, text, window: int | None) -> None:
    query, key, value = text(torch.float32, 64)
    rng, before, rows = random.Random(0), 110, 40
    visible = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        parent = rng.randint(max(-1, row - 6), row - 1)
        if parent >= 0:
            visible[row] |= visible[parent]
    key, value = key[:, : before + rows], value[:, : before + rows]
    tree = attend_cache(
        packed(query, 0, rows), key, value, rows, before, window, visible=visible
    ).out
    tree = unpacked(tree, rows)
    for row in range(rows):
        path = before + visible[row].nonzero().flatten()
        seen = torch.cat((torch.arange(before), path))
        at = len(seen) - 1
        out = attend_cache(
            packed(query, row, row + 1), key[:, seen], value[:, seen], 1, at, window
        ).out
        assert torch.equal(unpacked(out, 1), tree[:, row : row + 1])
    # And beside rows that were computed before.
    last = attend_cache(
        packed(query, 30, rows), key, value, rows - 30, before + 30, window, visible=visible[30:]
    ).out
    assert torch.equal(unpacked(last, rows - 30), tree[:, 30:])
