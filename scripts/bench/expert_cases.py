"""The cases of `bench kernels --experts`: a layer's products with experts, of a pass and a prompt.

The rows choose at random. The rival is PyTorch's grouped product with dense experts, of rows that
are sorted already; on GPUs before compute capability 9.0 it multiplies by one expert after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from bench.kernel_cases import KernelCases, KernelRow
from triforce_core.model.feed_forward import Experts
from triforce_core.plan.sizes import PREFILL_CHUNK
from triforce_kernels.experts.grouped import in_tiles, product, rows_of_tile
from triforce_kernels.limits import FEW_ROWS
from triforce_kernels.weights.block_types import ALL_TYPES
from triforce_kernels.weights.blocks import BlockWeight
from triforce_kernels.weights.linear import Weight
from triforce_kernels.weights.tiles import Tiles
from triforce_offload.errors import UsageError

GROUPED = "grouped_mm, dense"
TYPES = ("Q4_K", "Q6_K", "MXFP4", "F8_E4M3")


@dataclass(frozen=True)
class ExpertCases(KernelCases):
    def rows(self) -> Iterator[KernelRow]:
        """Yield the figures of gate and up projections, the larger of two products."""
        mlps = (spec.mlp for spec in self.config.layers)
        mlp = next((each for each in mlps if isinstance(each, Experts)), None)
        if mlp is None:
            raise UsageError("--experts needs a --shape with experts")
        columns, depth = 2 * mlp.width, mlp.inner(self.config.hidden)
        dense = (self.draw(mlp.count * columns, depth) * 0.02).bfloat16()
        matrices: dict[str, tuple[Weight, int]] = {"dense": (dense, dense.nbytes)}
        for name in TYPES:
            kind = ALL_TYPES[name]
            shape = len(dense), kind.row_bytes(depth)
            data = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            matrices[name] = BlockWeight(data, kind, depth), data.nbytes
        for rows in (1, 17, FEW_ROWS, PREFILL_CHUNK):
            generator = torch.Generator().manual_seed(rows)
            scores = torch.rand(rows, mlp.count, generator=generator)
            chosen = scores.topk(mlp.active).indices.to(self.device)
            for name, (weight, nbytes) in matrices.items():
                yield self._case(mlp, dense, chosen, name, weight, nbytes)

    def _case(
        self,
        mlp: Experts,
        dense: torch.Tensor,
        chosen: torch.Tensor,
        name: str,
        weight: Weight,
        nbytes: int,
    ) -> KernelRow:
        """nbytes: of all experts"""
        (rows, active), depth = chosen.shape, dense.shape[1]
        columns = len(dense) // mlp.count
        x = self.draw(rows, depth, dtype=torch.bfloat16)
        tile = rows_of_tile(x, [weight], -(-chosen.numel() // mlp.count))
        _, order, _, experts, _ = in_tiles(chosen, mlp.count, tile)
        sizes = chosen.flatten().bincount(minlength=mlp.count)
        ends, pairs = sizes.cumsum(0).to(torch.int32), chosen.numel()
        # Grouped products need a row after those of the last group.
        sorted_rows = self.draw(pairs + 1, depth, dtype=torch.bfloat16)
        stacked = dense.view(mlp.count, columns, depth).transpose(1, 2)
        rival = partial(F.grouped_mm, sorted_rows, stacked, offs=ends)
        read = nbytes * int((sizes > 0).sum()) // mlp.count
        return self.row(
            f"{name} experts", f"{rows} rows, {active} of {mlp.count} x {depth} by {columns}",
            read, 2.0 * pairs * depth * columns,
            [partial(product, x, weight, Tiles(tile, columns, order, experts))],
            (GROUPED, [rival]) if self._records_rival else None,
        )  # fmt: skip

    @property
    def _records_rival(self) -> bool:
        """Whether the rival waits for nothing, as a recorded graph needs."""
        return self.device.type == "cpu" or torch.cuda.get_device_capability(self.device) >= (9, 0)
