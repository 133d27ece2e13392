"""Whether a product gives a row the same bits wherever it is and whatever is beside it.

Dense products of PyTorch, on a GPU if there is one: rows at several places of a batch, beside zeros
and beside other rows. What `--same-bits` needs of a library on a GPU.

    python scripts/checks product_bits [--rows 8 16 32 64 128 256] [--hidden 4096]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from frame import Benchmark, Figures, Option

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    hidden = args.hidden
    shapes = [(hidden, hidden), (5 * hidden, hidden), (hidden, 3 * hidden), (hidden // 4, hidden)]
    for name, dtype in DTYPES.items():
        for out, width in shapes:
            weight = torch.randn(out, width, device=device).to(dtype)
            x = torch.randn(max(args.rows), width, device=device).to(dtype)
            results = {count: x[:count] @ weight.T for count in args.rows}
            changed = {str(count): _changed(x, weight, results[count]) for count in args.rows}
            first = results[args.rows[-1]][0]
            alike = [count for count in args.rows if torch.equal(results[count][0], first)]
            row = {"dtype": name, "out": out, "in": width, "changed": changed}
            yield {"device": device.type, "rows": [row | {f"same_as_{args.rows[-1]}": alike}]}


def _changed(x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor) -> str:
    """Return how many of the tried products changed a row, and how many were tried."""
    count, changed, tried = len(expected), 0, 0
    for row in (0, 1, count // 2, count - 1):
        for place in (0, 1, count // 2, count - 1):
            for beside in (0.0, 1.0):
                moved = (torch.randn_like(x[:count]) * beside).to(x.dtype)
                moved[place] = x[row]
                changed += not torch.equal((moved @ weight.T)[place], expected[row])
                tried += 1
    return f"{changed}/{tried}"


main = Benchmark(
    __doc__,
    None,
    measure,
    (
        Option("--rows", [8, 16, 32, 64, 128, 256], "numbers of rows"),
        Option("--hidden", 4096, "columns of the smallest matrices"),
    ),
)
