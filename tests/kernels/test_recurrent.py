"""Short convolutions, the gated delta rule and Mamba-2, held against the recurrence row by row in
float64: chains and trees, rows in several steps, before and after they are folded.
"""

from __future__ import annotations

import random

import pytest
import torch
from exactness import DEVICE, INTERPRETED, TOLERANCE, assert_near

from triforce_kernels.recurrent.conv import Convolution, convolve
from triforce_kernels.recurrent.delta import DeltaRows, LeftRows, delta_chunks, delta_rule, fold
from triforce_kernels.recurrent.gates import (
    Skip,
    delta_gates,
    gated_norm,
    norm_of_gated,
    step_gates,
)

ROOM = 60
# Key heads, value heads, and the sizes of their heads.
SHAPES = [(2, 6, 16, 24), (1, 1, 40, 8), (2, 2, 128, 64)]


# Whether updates are corrected by what the state holds: the delta rule, and Mamba-2.
CORRECTS = pytest.mark.parametrize("corrects", [True, False])


def drawn_rows(
    draw, count: int, shape: tuple[int, ...], dtype: torch.dtype, corrects: bool = True
) -> DeltaRows:
    key_heads, value_heads, key_dim, value_dim = shape
    queries, keys = (draw(count, key_heads, key_dim, dtype=dtype) for _ in range(2))
    decays = -draw(count, value_heads).abs() / 4
    rates = draw(count, value_heads).sigmoid()
    values = draw(count, value_heads, value_dim, dtype=dtype)
    return DeltaRows(queries, keys, values, decays, rates, corrects)


def room(shape: tuple[int, ...]) -> LeftRows:
    """Room for rows. What lies there is not NaN, as in a store, which begins with zeros."""
    key_heads, value_heads, key_dim, value_dim = shape
    sizes = ((key_heads, ROOM, key_dim), (value_heads, ROOM, value_dim), (value_heads, ROOM))
    return LeftRows(*(torch.full(size, 7.0, device=DEVICE) for size in sizes))


def one_by_one(
    rows: DeltaRows, state: torch.Tensor, parents: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The recurrence in float64: the output of each row, and the state after it."""
    states, outs = [], []
    for row, parent in enumerate(parents):
        query, key, value, decay, rate = (each[row].double() for each in rows.tensors)
        if rows.corrects:
            query, key = (
                each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6)
                for each in (query, key)
            )
            query *= query.shape[1] ** -0.5
        group = len(value) // len(key)
        query, key = (each.repeat_interleave(group, 0) for each in (query, key))
        held = (states[parent] if parent >= 0 else state.double()) * decay.exp()[:, None, None]
        found = torch.einsum("hkv,hk->hv", held, key) if rows.corrects else 0
        update = rate[:, None] * (value - found)
        states.append(held + key.unsqueeze(2) * update.unsqueeze(1))
        outs.append(torch.einsum("hkv,hk->hv", states[-1], query))
    return torch.stack(outs), states


def visible(parents: list[int]) -> torch.Tensor:
    seen = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen.to(DEVICE)


def tree(count: int) -> list[int]:
    choose = random.Random(count)
    return [max(-1, row - choose.randint(1, 3)) for row in range(count)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("on_device", [False, True])
@CORRECTS
def test_steps_of_rows_are_the_recurrence(backend, draw, corrects, shape, on_device, dtype) -> None:
    """A chain in steps of several sizes, all over one state."""
    state = draw(shape[1], shape[2], shape[3]) / 4
    before, sizes = state.clone(), (1, 7, 20, 2)
    rows, left = drawn_rows(draw, sum(sizes), shape, dtype, corrects), room(shape)
    first, outs = 0, []
    for part in rows.split(sizes):
        begin = torch.tensor([first], device=DEVICE) if on_device else first
        outs.append(delta_rule(part, state, left, begin))
        first += len(part.keys)
    exact, states = one_by_one(rows, state, list(range(-1, sum(sizes) - 1)))
    assert torch.equal(state, before), "the state is only read"
    assert_near(torch.cat(outs), exact, TOLERANCE[dtype])
    assert (left.keys[:, first:] == 7).all(), "nothing is written behind the rows"
    fold(state, [left.part(0, 8), left.part(8, first)])
    assert_near(state, states[-1], TOLERANCE[torch.float32])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 17, 33])
@CORRECTS
def test_any_path_of_a_tree_folds_to_the_recurrence_over_it(
    backend, draw, corrects, shape, count
) -> None:
    state, behind = draw(shape[1], shape[2], shape[3]) / 4, 5
    rows = drawn_rows(draw, behind + count, shape, torch.float32, corrects)
    left = room(shape)
    some, more = rows.split((behind, count))
    delta_rule(some, state, left, 0)
    parents = tree(count)
    out = delta_rule(more, state, left, behind, visible(parents))
    whole = [*range(-1, behind - 1), *(behind + max(parent, -1) for parent in parents)]
    exact, states = one_by_one(rows, state, whole)
    assert_near(out, exact[behind:], TOLERANCE[torch.float32])
    for last in (0, count // 2, count - 1):
        path, at = [], last
        while at >= 0:
            path.insert(0, behind + at)
            at = parents[at]
        kept = LeftRows(*(each[:, [*range(behind), *path]] for each in left))
        folded = state.clone()
        fold(folded, [kept])
        assert_near(folded, states[behind + last], TOLERANCE[torch.float32])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "chunk"), [(32, 32), (96, 32), (48, 16), (24, 8)])
@pytest.mark.parametrize("dtype", INTERPRETED)
@CORRECTS
def test_chunks_are_the_recurrence(backend, draw, corrects, shape, count, chunk, dtype) -> None:
    state = draw(shape[1], shape[2], shape[3]) / 4
    rows = drawn_rows(draw, count, shape, dtype, corrects)
    exact, states = one_by_one(rows, state, list(range(-1, count - 1)))
    assert_near(delta_chunks(rows, state, chunk), exact, TOLERANCE[dtype])
    assert_near(state, states[-1], TOLERANCE[torch.float32])


def test_equal_keys_and_full_rates_are_stable(backend, draw) -> None:
    """Repeated tokens, with no decay: a system of ones, whose powers would overflow."""
    shape = SHAPES[0]
    rows = drawn_rows(draw, 32, shape, torch.float32)
    rows = rows._replace(
        keys=rows.keys[:1].expand(32, -1, -1).contiguous(),
        decays=torch.zeros_like(rows.decays),
        rates=torch.ones_like(rows.rates),
    )
    state = draw(shape[1], shape[2], shape[3])
    exact, _ = one_by_one(rows, state, list(range(-1, 31)))
    assert_near(delta_rule(rows, state, room(shape), 0), exact, TOLERANCE[torch.float32])
    assert_near(delta_chunks(rows, state, 32), exact, TOLERANCE[torch.float32])


def test_strong_decays_forget(backend, draw) -> None:
    """Decays whose products are 0 in float32, and whose inverses would be infinite."""
    shape = SHAPES[0]
    rows = drawn_rows(draw, 32, shape, torch.float32)
    rows = rows._replace(decays=rows.decays - 20)
    state = draw(shape[1], shape[2], shape[3])
    exact, _ = one_by_one(rows, state, list(range(-1, 31)))
    assert_near(delta_rule(rows, state, room(shape), 0), exact, TOLERANCE[torch.float32])
    assert_near(delta_chunks(rows, state, 32), exact, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("taps", [3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_convolutions_see_the_rows_they_follow(backend, draw, dtype, taps, bias, rows) -> None:
    channels = 70
    inputs, weight = draw(taps - 1 + rows, channels, dtype=dtype), draw(channels, 1, taps)
    weight, offset = weight.to(dtype), draw(channels, dtype=dtype) if bias else None
    exact = torch.nn.functional.conv1d(
        inputs.double().T[None], weight.double(), offset if offset is None else offset.double(),
        groups=channels,
    )[0].T  # fmt: skip
    convolution = Convolution(weight, offset)
    assert_near(convolve(inputs, convolution, None), exact, TOLERANCE[dtype])
    active = convolve(inputs, convolution._replace(activates=True), None)
    assert_near(active, torch.nn.functional.silu(exact), TOLERANCE[dtype])
    # The same as a tree whose rows see those of a chain, in another order.
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    lineage = order[:, None] + torch.arange(taps, device=DEVICE)
    assert_near(convolve(inputs, convolution, lineage), exact[order], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_gates_are_those_of_the_formula(backend, draw, dtype) -> None:
    joint = (draw(5, 20) * 8).to(dtype)
    decays, rates = joint[:, 3:9], joint[:, 10:16]
    factor, bias = -draw(6).exp(), draw(6) * 4
    logs, soft = delta_gates(decays, rates, factor, bias)
    exact = torch.nn.functional.softplus(decays.double() + bias) * factor
    assert_near(logs, exact, TOLERANCE[torch.float32])
    assert_near(soft, rates.double().sigmoid(), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("size", [24, 128])
def test_gated_norms_are_those_of_the_formula(backend, draw, dtype, size) -> None:
    x, weight = draw(4, 3, size, dtype=dtype), draw(size, dtype=dtype)
    gate = draw(4, 3 * size + 7, dtype=dtype)[:, 5 : 5 + 3 * size]
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    exact = (exact * weight).flatten(1) * torch.nn.functional.silu(gate.double())
    assert_near(gated_norm(x, weight, gate, 1e-5), exact, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_gates_of_steps_are_those_of_the_formula(backend, draw, dtype) -> None:
    steps = (draw(5, 20) * 8).to(dtype)[:, 3:9]
    factor, bias = -draw(6).exp(), draw(6) * 4
    logs, rates = step_gates(steps, factor, bias)
    exact = torch.nn.functional.softplus(steps.double() + bias)
    assert_near(rates, exact, TOLERANCE[torch.float32])
    assert_near(logs, exact * factor, TOLERANCE[torch.float32])
    # Small steps are as exact as large ones.
    small = torch.linspace(-30, 30, 600, device=DEVICE)[:, None].to(dtype)
    _, rates = step_gates(small, -torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE))
    relative = rates.double() / torch.nn.functional.softplus(small.double()) - 1
    assert relative.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(("heads", "groups"), [(6, 1), (6, 3), (3, 3)])
def test_norms_of_gated_groups_are_those_of_the_formula(
    backend, draw, dtype, heads, groups
) -> None:
    width = heads * 20
    x, values, factor = draw(4, width), draw(4, width + 9)[:, 4:-5], draw(heads)
    weight, gate = draw(width, dtype=dtype), draw(4, width + 7, dtype=dtype)[:, 5:-2]
    skipped = values.double().unflatten(1, (heads, -1)) * factor[:, None]
    exact = (x + skipped.flatten(1)) * torch.nn.functional.silu(gate.double())
    exact = exact.unflatten(1, (groups, -1))
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
    ours = norm_of_gated(x, Skip(values, factor), weight, gate, 1e-5, groups)
    assert ours.dtype == dtype
    assert_near(ours, exact.flatten(1) * weight, 2 * TOLERANCE[dtype])


def test_what_does_not_fit_is_reported(backend, draw) -> None:
    shape = SHAPES[0]
    rows, state = drawn_rows(draw, 3, shape, torch.float32), draw(*shape[1:])
    with pytest.raises(ValueError, match=r"delta_rule cannot take .*first 58"):
        delta_rule(rows, state, room(shape), 58)
    with pytest.raises(ValueError, match=r"delta_rule cannot take queries \(3, 2, 8\)"):
        delta_rule(rows._replace(queries=rows.queries[..., :8]), state, room(shape), 0)
    wide, factor = draw(2, 12), draw(5)
    with pytest.raises(ValueError, match=r"norm_of_gated cannot take .*groups 3"):
        norm_of_gated(wide, Skip(wide, factor), wide[0], wide, 1e-5, 3)
    with pytest.raises(ValueError, match=r"step_gates cannot take steps \(2, 12\)"):
        step_gates(wide, factor, factor)
    with pytest.raises(ValueError, match=r"convolve cannot take inputs \(2, 5\)"):
        convolve(draw(2, 5), Convolution(draw(5, 1, 3)), None)
