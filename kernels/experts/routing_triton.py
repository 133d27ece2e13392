"""`routing` and the tiles of `grouped` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triforce_kernels.counts import cdiv, next_power_of_2
from triforce_kernels.experts.routing import Choice

# Pairs of a row and an expert that a program compares with all experts at a time.
_PAIRS = 32
# Columns of a row that a program sums.
_COLUMNS = 1024


@triton.jit
def _route_kernel(
    products, bias, chosen, weights, count, scale, size,
    ACTIVE: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr,
    BIASED: tl.constexpr, NORMALISED: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, GROUP_SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, COUNT)
    real = expert < count
    x = tl.load(products + row * count + expert, mask=real, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    wanted = scores
    if BIASED:
        wanted += tl.load(bias + expert, mask=real, other=0.0)
    wanted = tl.where(real, wanted, float("-inf"))
    if GROUPS > 1:
        group = tl.arange(0, GROUP_SLOTS)
        best = tl.full([GROUP_SLOTS], float("-inf"), tl.float32)
        for each in tl.static_range(GROUPS):
            own = tl.where(expert // size == each, wanted, float("-inf"))
            both = tl.max(own, 0)
            if size > 1:
                both += tl.max(tl.where(expert == tl.argmax(own, 0), float("-inf"), own), 0)
            best = tl.where(group == each, both, best)
        allowed = expert < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            which = tl.argmax(best, 0)
            allowed |= expert // size == which
            best = tl.where(group == which, float("-inf"), best)
        wanted = tl.where(allowed, wanted, float("-inf"))
    slot = tl.arange(0, SLOTS)
    picked = tl.zeros([SLOTS], tl.int64)
    weight = tl.zeros([SLOTS], tl.float32)
    for each in tl.static_range(ACTIVE):
        # Where numbers are not finite, some expert is as good as another.
        which = tl.minimum(tl.argmax(wanted, 0), count - 1)
        own = tl.sum(tl.where(expert == which, scores, 0.0), 0)
        picked = tl.where(slot == each, which.to(tl.int64), picked)
        weight = tl.where(slot == each, own, weight)
        wanted = tl.where(expert == which, float("-inf"), wanted)
    if NORMALISED:
        weight = weight / tl.sum(weight, 0)
    there = slot < ACTIVE
    tl.store(chosen + row * ACTIVE + slot, picked, mask=there)
    tl.store(weights + row * ACTIVE + slot, weight * scale, mask=there)


def choose(
    products: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """`routing.choose`."""
    rows, count = products.shape
    chosen = torch.empty((rows, choice.active), dtype=torch.int64, device=products.device)
    weights = torch.empty(chosen.shape, dtype=torch.float32, device=products.device)
    _route_kernel[(rows,)](
        products, products if bias is None else bias, chosen, weights, count, choice.scale,
        count // choice.groups,
        ACTIVE=choice.active, COUNT=next_power_of_2(count),
        SLOTS=next_power_of_2(choice.active), SIGMOID=choice.sigmoid,
        BIASED=bias is not None, NORMALISED=choice.normalised, GROUPS=choice.groups,
        CHOSEN_GROUPS=choice.chosen_groups, GROUP_SLOTS=next_power_of_2(choice.groups),
        num_warps=4,
    )  # fmt: skip
    return chosen, weights


@triton.jit(do_not_specialize=["pairs"])
def _tiles_kernel(
    chosen, order, own, experts, places, pairs, active, count,
    COUNT: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.arange(0, COUNT)
    step = tl.arange(0, PAIRS)
    sizes = tl.zeros([COUNT], tl.int32)
    for start in range(0, pairs, PAIRS):
        which = tl.load(chosen + start + step, mask=start + step < pairs, other=-1)
        sizes += tl.sum((which[:, None] == expert[None, :]).to(tl.int32), 0)
    tiles = (sizes + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    ours = tl.sum((ends <= tile).to(tl.int32), 0)
    is_ours = expert == ours
    exists = ours < count
    # The first of the expert's rows that is in this tile, and the number of those behind it.
    first = (tile - tl.sum(tl.where(is_ours, ends - tiles, 0), 0)) * TILE
    left = tl.sum(tl.where(is_ours, sizes, 0), 0) - first
    tl.store(experts + tile, tl.where(exists, ours, -1).to(tl.int64))
    lane = tl.arange(0, TILE)
    empty = (lane >= left) | (not exists)
    nothing = tl.full([TILE], -1, tl.int64)
    tl.store(order + tile * TILE + lane, nothing, mask=empty)
    tl.store(own + tile * TILE + lane, nothing, mask=empty)
    before = 0
    for start in range(0, pairs, PAIRS):
        pair = start + step
        which = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        nowhere = (tile == 0) & (which < 0) & (pair < pairs)
        tl.store(places + pair, tl.full([PAIRS], -1, tl.int64), mask=nowhere)
        match = ((which == ours) & exists).to(tl.int32)
        rank = before + tl.cumsum(match, 0) - match - first
        before += tl.sum(match, 0)
        here = (match > 0) & (rank >= 0) & (rank < TILE)
        place = (tile * TILE + rank).to(tl.int64)
        tl.store(order + place, (pair // active).to(tl.int64), mask=here)
        tl.store(own + place, place, mask=here)
        tl.store(places + pair, place, mask=here)


def in_tiles(
    chosen: torch.Tensor, count: int, tiles: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grouped.in_tiles`."""
    order = torch.empty(tiles * tile, dtype=torch.int64, device=chosen.device)
    own, experts = torch.empty_like(order), order.new_empty(tiles)
    places = torch.empty_like(chosen)
    _tiles_kernel[(tiles,)](
        chosen, order, own, experts, places, chosen.numel(), chosen.shape[1], count,
        COUNT=next_power_of_2(count), PAIRS=_PAIRS, TILE=tile, num_warps=4,
    )  # fmt: skip
    return order, own, experts, places


@triton.jit
def _sum_kernel(outputs, places, weights, out, columns, ACTIVE: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < columns
    acc = tl.zeros([COLUMNS], tl.float32)
    for each in range(ACTIVE):
        place = tl.load(places + row * ACTIVE + each)
        weight = tl.load(weights + row * ACTIVE + each, mask=place >= 0, other=0.0)
        own = tl.load(outputs + place * columns + column, mask=real & (place >= 0), other=0.0)
        acc += own.to(tl.float32) * weight
    tl.store(out + row * columns + column, acc.to(out.dtype.element_ty), mask=real)


def weighted_sums(
    outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`grouped.weighted_sums`."""
    (rows, active), columns = places.shape, outputs.shape[1]
    out = torch.empty((rows, columns), dtype=outputs.dtype, device=outputs.device)
    _sum_kernel[(rows, cdiv(columns, _COLUMNS))](
        outputs, places, weights, out, columns, ACTIVE=active, COLUMNS=_COLUMNS, num_warps=4
    )
    return out
