"""Time each kernel, beside the limits of this GPU and PyTorch's own operations.

The limits are measured in the same run: a copy on the device, one large product, a copy from pinned
host memory. Kernels run from a CUDA graph, in several calls over different data, so that neither
launches nor the L2 cache affect their times.

    python scripts/bench kernels [--shape llama2-7b] [--context 131072] [--split] [--json]
    python scripts/bench kernels --experts [--shape qwen3-30b-a3b]

Without a GPU, it times the PyTorch references on the CPU, over a small context.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

import torch

from bench.expert_cases import ExpertCases
from bench.kernel_cases import KernelCases
from bench.split_cases import SplitCases
from frame import Benchmark, Figures, Option, print_table
from triforce_core.model.known.shapes import read_shape
from triforce_kernels.dispatch import TRITON, backend
from triforce_offload.machine.probe import measure_cpu, measure_gpu


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    rates = measure_gpu() if cuda else measure_cpu()
    whole = "qwen3-30b-a3b" if args.experts else "llama2-7b-128k"
    shape = args.shape or (whole if cuda or args.experts else "smollm2-135m")
    kind = ExpertCases if args.experts else SplitCases if args.split else KernelCases
    cases = kind(
        read_shape(shape),
        args.context or (131072 if cuda else 4096),
        args.tokens,
        device,
        torch.float16 if cuda else torch.float32,
        rates,
        args.repeats or (9 if cuda else 3),
    )
    yield {"backend": backend(device), "shape": shape, "rates": asdict(rates)}
    with torch.inference_mode():
        for row in cases.rows():
            yield {"rows": [asdict(row)]}


def show(record: Figures) -> None:
    rates = record["rates"]
    print(
        f"{record['backend']} kernels; copy {rates['memory_bytes_per_second'] / 1e9:.0f} GB/s, "
        f"matrix product {rates['flops_per_second'] / 1e12:.2f} TFLOP/s"
        + ("; REFERENCES, not the kernels" if record["backend"] != TRITON else "")
    )
    cells = {f"{row['kernel']}: {row['inputs']}": cells_of(row) for row in record["rows"]}
    print_table("kernel and inputs", cells, ["us", "GB/s", "TFLOP/s", "of ceiling", "rival"])


def cells_of(row: Figures) -> dict[str, str]:
    seconds, rival = row["seconds"], row["rival_seconds"]
    return {
        "us": f"{seconds * 1e6:.1f}",
        "GB/s": f"{row['nbytes'] / seconds / 1e9:.1f}",
        "TFLOP/s": f"{row['flops'] / seconds / 1e12:.2f}" if row["flops"] else "",
        "of ceiling": f"{row['ceiling_seconds'] / seconds:.0%} {row['ceiling']}",
        "rival": f"{rival / seconds:.2f} times as long: {row['rival']}" if rival else "",
    }


main = Benchmark(
    __doc__,
    None,
    measure,
    (
        Option("--shape", help="a known model, or a config.json (llama2-7b-128k; smollm2-135m)"),
        Option("--context", type=int, help="tokens of KV (131072; 4096 without a GPU)"),
        Option("--tokens", 17, "queries of a pass"),
        Option("--repeats", type=int, help="rounds of each kernel (9; 3 without a GPU)"),
        Option("--split", False, "the kernels of weights and KV split alone"),
        Option(
            "--experts", False, "products with experts alone, of the shape of a model with some"
        ),
    ),
    show,
)
