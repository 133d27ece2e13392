"""`triforce env`: describe this machine."""

from __future__ import annotations

from rich.table import Table

from triforce_core.cli.terminal.console import Printer
from triforce_offload.machine.hardware import Gpu, inspect_machine
from triforce_offload.machine.probe import remeasured
from triforce_offload.units import format_bytes


def print_machine(*, probe: bool) -> None:
    """Print a description of the machine to stdout, because the description is the command's
    result.

    probe: whether to discard cached rates and measure them again
    """
    machine = inspect_machine()
    table = Table(show_header=False)
    for index, gpu in enumerate(machine.gpus):
        table.add_row(f"GPU {index}", _describe(gpu))
    if not machine.gpus:
        table.add_row("GPU", "none found; the link will be emulated (--device cpu)")
    table.add_row("driver", machine.driver or "none")
    table.add_row(
        "host memory",
        f"{format_bytes(machine.host_bytes)}, {format_bytes(machine.host_available_bytes)} free",
    )
    limit = machine.pinning_limit_bytes
    table.add_row("pinning limit", "none" if limit is None else format_bytes(limit))
    table.add_row("cores", str(machine.cores))
    table.add_row("host kernels", machine.vectors or "not compiled: see docs/install.md")
    table.add_row("system", f"Python {machine.python}, {machine.platform}")
    for name, found in machine.packages.items():
        table.add_row(name, found or "not installed")
    if probe:
        rates = remeasured()
        table.add_row("memory", f"{rates.memory_bytes_per_second / 1e9:.1f} GB/s read")
        table.add_row("products", f"{rates.flops_per_second / 1e12:.3g} TFLOP/s")
        table.add_row("launching", f"{rates.launch_seconds * 1e6:.1f} us")
        if rates.link_bytes_per_second:
            table.add_row("link", f"{rates.link_bytes_per_second / 1e9:.1f} GB/s to the device")
        table.add_row("rates", rates.source)
    Printer().print(table)


def _describe(gpu: Gpu) -> str:
    link = (
        f"PCIe {gpu.link_generation or '?'}.0 x{gpu.link_width or '?'} now, "
        f"{gpu.link_generation_most or '?'}.0 x{gpu.link_width_most or '?'} at most"
    )
    return f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, {link}"
