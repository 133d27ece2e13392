"""How fast each kernel is, beside what this GPU reaches and what PyTorch takes for the same.

Ceilings are measured in the same run: a copy on the device, one large product, a copy from pinned
host memory. Kernels run from a CUDA graph, several calls over different data, so that neither
launching nor the L2 cache flatters or hides them.

    python scripts/bench_kernels.py [--shape llama2-7b] [--context 131072] [--planes] [--json]

Without a GPU it times the references on the CPU, over a small context: that says that it runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict

import torch
from kernel_cases import KernelCases, KernelRow
from plane_cases import PlaneCases
from rich.console import Console
from rich.table import Table
from triforce_kernels.dispatch import REFERENCE, backend

from offload.machine.hardware import provenance
from offload.machine.probe import Rates, measure_cpu, measure_gpu
from triforce_core.model.shapes import read_shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--shape",
        default="llama2-7b-128k" if cuda else "smollm2-135m",
        help="a known model, or a config.json",
    )
    parser.add_argument("--context", type=int, default=131072 if cuda else 4096)
    parser.add_argument("--tokens", type=int, default=17, help="queries of a pass")
    parser.add_argument("--repeats", type=int, default=9 if cuda else 3)
    parser.add_argument("--planes", action="store_true", help="the kernels of planes alone")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda:0" if cuda else "cpu")
    rates = measure_gpu() if cuda else measure_cpu()
    dtype = torch.float16 if cuda else torch.float32
    with torch.inference_mode():
        cases = PlaneCases if args.planes else KernelCases
        bench = cases(
            read_shape(args.shape), args.context, args.tokens, device, dtype, rates, args.repeats
        )
        rows = list(bench.rows())
    if args.json:
        record = provenance(shlex.join(["python", "scripts/bench_kernels.py", *sys.argv[1:]]))
        record |= {"backend": backend(device), "shape": args.shape, "rates": asdict(rates)}
        print(json.dumps(record | {"rows": [asdict(row) for row in rows]}, indent=2))
        return
    show(rows, rates, backend(device))


def show(rows: list[KernelRow], rates: Rates, implementation: str) -> None:
    title = f"{implementation} kernels; copy {rates.memory_bytes_per_second / 1e9:.0f} GB/s, "
    title += f"matrix product {rates.flops_per_second / 1e12:.2f} TFLOP/s"
    if implementation == REFERENCE:
        title += "; REFERENCES, not the kernels"
    table = Table("kernel", "inputs", "us", "GB/s", "TFLOP/s", "of ceiling", "rival", title=title)
    for row in rows:
        rival = row.rival_seconds
        table.add_row(
            row.kernel,
            row.inputs,
            f"{row.seconds * 1e6:.1f}",
            f"{row.nbytes / row.seconds / 1e9:.1f}",
            f"{row.flops / row.seconds / 1e12:.2f}" if row.flops else "",
            f"{row.ceiling_seconds / row.seconds:.0%} {row.ceiling}",
            f"{rival / row.seconds:.2f} times as long: {row.rival}" if rival else "",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
