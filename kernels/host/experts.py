"""Products with experts in any format, by the processor's compiled kernels."""

from __future__ import annotations

import ctypes

import torch

from triforce_kernels.experts.grouped import reference_product
from triforce_kernels.experts.routing import Choice
from triforce_kernels.host import structures
from triforce_kernels.host.library import library
from triforce_kernels.host.structures import Experts, Product
from triforce_kernels.host.weights import computes, rounding_format, weight_struct
from triforce_kernels.limits import EXPERT_TILE
from triforce_kernels.weights.linear import Weight
from triforce_kernels.weights.tiles import Tiles


def choose(
    products: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """`routing.choose`."""
    rows, count = products.shape
    chosen = torch.empty(rows, choice.active, dtype=torch.int64, device="cpu")
    weights = products.new_empty(chosen.shape)
    call = structures.Choice(
        rows,
        count,
        choice.active,
        choice.sigmoid,
        choice.normalised,
        choice.groups,
        choice.chosen_groups,
        choice.scale,
    )
    library().triforce_choose(
        ctypes.byref(call),
        products.data_ptr(),
        None if bias is None else bias.data_ptr(),
        chosen.data_ptr(),
        weights.data_ptr(),
        (ctypes.c_float * (3 * count))(),
    )
    return chosen, weights


def in_tiles(
    chosen: torch.Tensor, count: int, tiles: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grouped.in_tiles`."""
    order, own = chosen.new_empty(2, tiles * EXPERT_TILE).unbind()
    which, places = chosen.new_empty(tiles), chosen.new_empty(chosen.shape)
    fits = library().triforce_tiles(
        chosen.data_ptr(),
        *chosen.shape,
        count,
        tiles,
        EXPERT_TILE,
        order.data_ptr(),
        own.data_ptr(),
        which.data_ptr(),
        places.data_ptr(),
        (ctypes.c_int64 * count)(),
    )
    if not fits:
        raise IndexError(f"an expert is chosen that is none of {count}")
    return order, own, which, places


def product(x: torch.Tensor, weight: Weight, tiles: Tiles) -> torch.Tensor:
    """`grouped.product`."""
    if not computes(x.dtype):
        return reference_product(x, weight, tiles)
    there = (tiles.order >= 0).view(-1, tiles.rows)
    rows = x[tiles.order[there.flatten()]].float()
    counts = there.sum(1)
    out = rows.new_empty(len(tiles.order), tiles.columns)
    whole = weight_struct(weight)
    call = Experts(
        Product(
            ctypes.addressof(whole),
            rows.data_ptr(),
            out.data_ptr(),
            None,
            0,
            tiles.columns,
            rows.shape[1],
            tiles.columns,
            rounding_format(weight, x.dtype),
            factor=1.0,
        ),
        tiles.experts.data_ptr(),
        counts.data_ptr(),
        len(tiles.experts),
        tiles.rows,
    )
    library().triforce_experts(ctypes.byref(call), torch.get_num_threads())
    return out.to(x.dtype)


def weighted_sums(
    outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """`grouped.weighted_sums`."""
    wide, (rows, active) = outputs.float(), places.shape
    out = wide.new_zeros(rows, outputs.shape[1])
    library().triforce_weighted_sums(
        wide.data_ptr(),
        places.data_ptr(),
        weights.data_ptr(),
        rows,
        active,
        outputs.shape[1],
        out.data_ptr(),
    )
    return out.to(outputs.dtype)
