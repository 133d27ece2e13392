"""Products with experts in any format, by the processor's compiled kernels."""

from __future__ import annotations

import ctypes

import torch

from triforce_kernels.experts import grouped
from triforce_kernels.experts.routing import Choice
from triforce_kernels.host import structures
from triforce_kernels.host.layer import Operation
from triforce_kernels.host.library import library
from triforce_kernels.host.structures import FORMATS, ExpertMLP, Experts, Gate, Product
from triforce_kernels.host.weights import computes, weight_struct
from triforce_kernels.layer import clamped_swiglu, geglu, swiglu
from triforce_kernels.weights.linear import Weight
from triforce_kernels.weights.tiles import Tiles

_OPERATIONS = {
    swiglu: Operation.SILU,
    geglu: Operation.GELU,
    clamped_swiglu: Operation.CLAMPED,
}
_NO_EXPERT = "an expert is chosen that is none of {}"


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
    chosen: torch.Tensor, count: int, tiles: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grouped.in_tiles`."""
    order, own = chosen.new_empty(2, tiles * tile).unbind()
    which, places = chosen.new_empty(tiles), chosen.new_empty(chosen.shape)
    fits = library().triforce_tiles(
        chosen.data_ptr(),
        *chosen.shape,
        count,
        tiles,
        tile,
        order.data_ptr(),
        own.data_ptr(),
        which.data_ptr(),
        places.data_ptr(),
        (ctypes.c_int64 * count)(),
    )
    if not fits:
        raise IndexError(_NO_EXPERT.format(count))
    return order, own, which, places


def gated(
    x: torch.Tensor,
    experts: grouped.Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gated: grouped.Gated,
) -> torch.Tensor:
    """`grouped.gated_experts`, of float32 rows in one call."""
    operation = _OPERATIONS.get(gated)
    if x.dtype != torch.float32 or operation is None:
        return grouped.by_tiles(x, experts, chosen, weights, gated)
    count, gate_up, down, biases = experts
    (rows, active), pairs = chosen.shape, chosen.numel()
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    first, second = biases or (None, None)
    width, hidden = down.shape[1], x.shape[1]
    out = torch.empty_like(x)
    room = torch.empty(pairs * (2 * hidden + experts.rows + width), device="cpu")
    matrices = weight_struct(gate_up), weight_struct(down)
    call = ExpertMLP(
        _each(matrices[0], experts.rows, first),
        _each(matrices[1], hidden, second),
        Gate(format=FORMATS["F32"], operation=operation, width=width),
        x.data_ptr(),
        out.data_ptr(),
        chosen.data_ptr(),
        weights.data_ptr(),
        rows,
        active,
        count,
        room.data_ptr(),
        ctypes.addressof(numbers := (ctypes.c_int64 * (4 * pairs + count))()),
    )
    fits = library().triforce_expert_mlp(ctypes.byref(call), torch.get_num_threads())
    del numbers
    if not fits:
        raise IndexError(_NO_EXPERT.format(count))
    return out


def _each(struct: structures.Weight, outputs: int, bias: torch.Tensor | None) -> Product:
    """Return a product with one expert's matrix. struct: of all experts, outlives the product"""
    added = None if bias is None else bias.data_ptr()
    return Product(ctypes.addressof(struct), bias=added, outputs=outputs, factor=1.0)


def product(x: torch.Tensor, weight: Weight, tiles: Tiles) -> torch.Tensor:
    """`grouped.product`."""
    if not computes(x.dtype):
        return grouped.reference_product(x, weight, tiles)
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
