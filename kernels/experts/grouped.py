"""MLPs of experts: each chosen expert of a forward once, over the rows that chose it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from triforce_kernels import same_bits
from triforce_kernels.checks import require
from triforce_kernels.counts import cdiv
from triforce_kernels.dispatch import HOST, REFERENCE, TRITON, backend, implementation
from triforce_kernels.limits import (
    EXPERT_TILE,
    FEW_ROWS,
    expert_tile,
    most_expert_tiles,
    rows_in_tiles,
)
from triforce_kernels.weights.linear import Weight, linear, rows_of
from triforce_kernels.weights.slices import most_rows
from triforce_kernels.weights.tiles import Tiles

# Activation of an expert: of a gate and an up projection, [rows, 2 width] to [rows, width], or of
# an up projection alone, [rows, width].
Gated = Callable[[torch.Tensor], torch.Tensor]


# Of gate and up projections, [count, 2 width], and of down projections, [count, hidden] or None.
Biases = tuple[torch.Tensor, torch.Tensor | None]


class Experts(NamedTuple):
    """The matrices of experts, expert after expert.

    gate_up: [count * 2 width, hidden]; without gates [count * width, hidden]
    down: [count * hidden, width]
    biases: theirs, or None
    """

    count: int
    gate_up: Weight
    down: Weight
    biases: Biases | None = None

    @property
    def rows(self) -> int:
        """Number of rows that an expert has in `gate_up`."""
        return self.gate_up.shape[0] // self.count


def gated_experts(
    x: torch.Tensor,
    experts: Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gated: Gated,
    come: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu,
) -> torch.Tensor:
    """Return the weighted sums of the experts of each row, [rows, hidden] in x's dtype, summed in
    float32.

    x: [rows, hidden]
    chosen, weights: experts of each row and their weights, [rows, active] int64 and float32; -1 for
        none, whose weight does not count
    come: returns a tensor of the device on the host, which takes until it is there: if there are
        no kernels for the format, or an expert has many rows
    Raises ValueError.
    """
    count, gate_up, down, _ = experts
    rows, hidden = x.shape
    require(
        "gated_experts",
        chosen.shape == weights.shape
        and chosen.shape[0] == rows
        and gate_up.shape[0] in (2 * count * down.shape[1], count * down.shape[1])
        and gate_up.shape[1] == hidden
        and down.shape[0] == count * hidden,
        x=x,
        chosen=chosen,
        weights=weights,
        count=count,
    )
    if x.dtype != torch.float64 and has_kernels(experts):
        if rows <= FEW_ROWS:
            gated_few = implementation("gated_experts", x.device)
            return gated_few(x, experts, chosen, weights, gated)
        most = rows_in_tiles(chosen.shape[1], count, _most_rows(x, (gate_up, down)))
        tiled = same_bits.wanted() or rows <= most
        if tiled and backend(x.device) == TRITON:
            return by_tiles(x, experts, chosen, weights, gated)
    return _one_by_one(x, experts, chosen, weights, gated, come)


def has_kernels(experts: Experts) -> bool:
    """Whether kernels multiply by all chosen experts at once."""
    if backend(experts.gate_up.device) == REFERENCE:
        return False
    return all(map(kernel_of, (experts.gate_up, experts.down)))


def product(x: torch.Tensor, weight: Weight, tiles: Tiles) -> torch.Tensor:
    """Multiply rows of x [rows, in] by transposed matrices that stand one above the other in a
    weight: [tiles * rows of a tile, columns], in which only the places of rows are defined.

    Raises ValueError.
    """
    kernel = kernel_of(weight)
    require(
        "product",
        (kernel is not None or backend(x.device) == REFERENCE)
        and x.dim() == 2
        and x.stride(1) == 1
        and x.shape[1] == weight.shape[1]
        and weight.shape[0] % tiles.columns == 0
        and tiles.order.shape == (len(tiles.experts) * tiles.rows,)
        and tiles.rows <= FEW_ROWS
        and tiles.experts.dtype == tiles.order.dtype == torch.int64
        and tiles.experts.is_contiguous()
        and _multiplies(x, weight, tiles.columns)
        and x.device == weight.device == tiles.order.device == tiles.experts.device,
        x=x,
        order=tiles.order,
        experts=tiles.experts,
        columns=tiles.columns,
    )
    return implementation(kernel or "dense_experts", x.device)(x, weight, tiles)


def _multiplies(x: torch.Tensor, weight: Weight, columns: int) -> bool:
    """Return whether kernels multiply rows by experts of `columns` rows of a weight. A processor's
    convert numbers of either dtype.
    """
    if not isinstance(weight, torch.Tensor):
        return weight.expert_rows in (None, columns)
    return weight.stride(1) == 1 and (x.dtype == weight.dtype or backend(x.device) == HOST)


class Divided(NamedTuple):
    """Rows in tiles of which each belongs to one expert.

    rows, order, experts: see `Tiles`
    own: the same as `order`, for rows that are in their places already
    places: place of each expert of each row, [rows, active] int64; -1 for none
    """

    rows: int
    order: torch.Tensor
    own: torch.Tensor
    experts: torch.Tensor
    places: torch.Tensor


def in_tiles(chosen: torch.Tensor, count: int, tile: int = EXPERT_TILE) -> Divided:
    """Divide rows into tiles. The number of tiles depends on shapes alone, and nothing waits for
    the device.

    chosen: experts of each row, [rows, active] int64; -1 for none
    tile: rows of a tile
    Raises ValueError.
    """
    require(
        "in_tiles",
        chosen.dim() == 2 and chosen.dtype == torch.int64 and chosen.is_contiguous(),
        chosen=chosen,
        count=count,
    )
    tiles, few = most_expert_tiles(*chosen.shape, count, tile), len(chosen) <= FEW_ROWS
    # A kernel compares each expert with all pairs of a row and an expert: many are sorted instead.
    divide = implementation("expert_tiles", chosen.device) if few else reference_in_tiles
    return Divided(tile, *divide(chosen, count, tiles, tile))


def reference_in_tiles(
    chosen: torch.Tensor, count: int, tiles: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, active = chosen.shape
    pairs, device = rows * active, chosen.device
    flat = chosen.flatten()
    # Those without an expert come last, and go to a place that is dropped.
    expert, pair = flat.where(flat >= 0, count).sort(stable=True)
    first = torch.searchsorted(expert, torch.arange(count + 1, device=device))
    ends = ((first.diff() + tile - 1) // tile).cumsum(0)
    first_tile = torch.cat((ends.new_zeros(1), ends))
    within = torch.arange(pairs, device=device) - first[expert]
    place = (first_tile[expert] * tile + within).where(expert < count, tiles * tile)
    order = flat.new_full((tiles * tile + 1,), -1).scatter_(0, place, pair // active)[:-1]
    which = torch.searchsorted(ends, torch.arange(tiles, device=device), right=True)
    places = torch.empty_like(flat).scatter_(0, pair, place.where(expert < count, -1))
    own = torch.arange(len(order), device=device).masked_fill_(order < 0, -1)
    return order, own, which.masked_fill_(which == count, -1), places.view(rows, active)


def weighted_sums(
    outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sums of outputs of experts, [rows, columns] in their dtype, summed in
    float32.

    outputs: [places, columns]
    places, weights: places of each row's experts and their weights, [rows, active] int64 and
        float32; places of -1 do not count
    Raises ValueError.
    """
    require(
        "weighted_sums",
        outputs.dim() == 2
        and places.shape == weights.shape
        and (places.dtype, weights.dtype) == (torch.int64, torch.float32)
        and all(each.is_contiguous() for each in (outputs, places, weights)),
        outputs=outputs,
        places=places,
        weights=weights,
    )
    return implementation("sum_experts", outputs.device)(outputs, places, weights)


def reference_weighted_sums(
    outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = outputs.new_zeros(len(places), outputs.shape[1], dtype=torch.float32)
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        there = (place >= 0).unsqueeze(1)
        own = outputs[place.clamp(min=0)].float() * weight.unsqueeze(1)
        out += own.where(there, 0)
    return out.to(outputs.dtype)


def kernel_of(weight: Weight) -> str | None:
    """Return the name of the kernel that multiplies by experts in a weight; None without one."""
    return "dense_experts" if isinstance(weight, torch.Tensor) else weight.experts_kernel


def by_tiles(
    x: torch.Tensor, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor, gated: Gated
) -> torch.Tensor:
    """`gated_experts`, by kernels that multiply by all chosen experts at once."""
    count, gate_up, down, biases = experts
    first, second = biases or (None, None)
    tile = rows_of_tile(x, (gate_up, down), cdiv(chosen.numel(), count))
    _, order, own, which, places = in_tiles(chosen, count, tile)
    inner = product(x, gate_up, Tiles(tile, experts.rows, order, which))
    if first is not None:
        _add_to_tiles(inner, first, which)
    inner = gated(inner)
    outer = product(inner, down, Tiles(tile, x.shape[1], own, which))
    if second is not None:
        _add_to_tiles(outer, second, which)
    return weighted_sums(outer, places, weights)


def rows_of_tile(x: torch.Tensor, weights: Iterable[Weight], each: int) -> int:
    """Return the rows of a tile of products with experts in some weights, each of which `each` of
    the rows of x chose on average: always as many where rows are to have the same bits.
    """
    if same_bits.wanted() or len(x) <= FEW_ROWS:
        return EXPERT_TILE
    return min(_most_rows(x, weights), expert_tile(each))


def _most_rows(x: torch.Tensor, weights: Iterable[Weight]) -> int:
    """Return how many rows of x a program multiplies by an expert at a time, at most."""
    stored = (weight for weight in weights if not isinstance(weight, torch.Tensor))
    return min((most_rows(x), *(weight.most_tile_rows for weight in stored)))


def _add_to_tiles(out: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor) -> None:
    """Add each tile's bias, [count, columns], in place."""
    out.unflatten(0, (len(experts), -1)).add_(bias[experts.clamp(min=0)].unsqueeze(1))


def _one_by_one(
    x: torch.Tensor,
    experts: Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gated: Gated,
    come: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    count, gate_up, down, biases = experts
    (rows, active), hidden, width = chosen.shape, x.shape[1], experts.rows
    flat = chosen.flatten()
    # Those without an expert come last, and no product has them.
    which, order = flat.where(flat >= 0, count).sort(stable=True)
    row = order // active
    outputs, first = x.new_empty(rows * active, hidden), 0
    sizes = come(which.bincount(minlength=count + 1))
    for expert, size in enumerate(sizes[:count].tolist()):
        if size:
            part = rows_of(gate_up, expert * width, (expert + 1) * width)
            bias, second = (None if b is None else b[expert] for b in biases or (None, None))
            inner = gated(linear(x[row[first : first + size]], part, bias))
            part = rows_of(down, expert * hidden, (expert + 1) * hidden)
            outputs[first : first + size] = linear(inner, part, second)
            first += size
    places = torch.empty_like(flat)
    places[order] = torch.arange(rows * active, device=x.device).where(which < count, -1)
    return weighted_sums(outputs, places.view(rows, active), weights)


def reference_product(x: torch.Tensor, weight: Weight, tiles: Tiles) -> torch.Tensor:
    size, columns = tiles.rows, tiles.columns
    out = x.new_empty(len(tiles.order), columns)
    for tile, expert in enumerate(tiles.experts.tolist()):
        place = slice(tile * size, (tile + 1) * size)
        row = tiles.order[place]
        there = row >= 0
        if expert >= 0:
            part = rows_of(weight, expert * columns, (expert + 1) * columns)
            out[place][there] = linear(x[row[there]], part)
    return out
