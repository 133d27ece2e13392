"""`triforce env`: describe this machine."""

from __future__ import annotations

from triforce_core.cli.terminal.console import Printer
from triforce_offload.machine.hardware import Gpu, Machine, inspect_machine
from triforce_offload.machine.probe import remeasured
from triforce_offload.units import format_bytes


def print_machine(*, probe: bool) -> None:
    """Print a description of the machine to stdout, because the description is the command's
    result.

    probe: whether to discard cached rates and measure them again
    """
    rows = _found(inspect_machine())
    if probe:
        rates = remeasured()
        rows += [
            ("memory", f"{rates.memory_bytes_per_second / 1e9:.1f} GB/s read"),
            ("matrix products", f"{rates.flops_per_second / 1e12:.3g} TFLOP/s"),
            ("kernel launch", f"{rates.launch_seconds * 1e6:.1f} us"),
        ]
        if rates.link_bytes_per_second:
            rows.append(("link", f"{rates.link_bytes_per_second / 1e9:.1f} GB/s to the device"))
        if rates.processor_bytes_per_second and rates.host_flops_per_second:
            memory, products = rates.processor_bytes_per_second, rates.host_flops_per_second
            words = f"{memory / 1e9:.1f} GB/s of host memory, {products / 1e12:.3g} TFLOP/s"
            rows.append(("CPU", words))
        rows.append(("rates", rates.source))
    Printer().table(("", ""), rows)


def _found(machine: Machine) -> list[tuple[str, str]]:
    gpus = [(f"GPU {index}", _describe(gpu)) for index, gpu in enumerate(machine.gpus)]
    memory, free = format_bytes(machine.host_bytes), format_bytes(machine.host_available_bytes)
    limit = machine.pinning_limit_bytes
    return [
        *(gpus or [("GPU", "none found; the link will be emulated (--device cpu)")]),
        ("driver", machine.driver or "none"),
        ("host memory", f"{memory}, {free} free"),
        ("pinning limit", "none" if limit is None else format_bytes(limit)),
        ("cores", str(machine.cores)),
        ("host kernels", machine.vectors or "not compiled: see docs/install.md"),
        # A platform's name is too long for a line of a narrow terminal.
        ("system", f"Python {machine.python}, {machine.platform.replace('-with-', ' with ')}"),
        *((name, found or "not installed") for name, found in machine.packages.items()),
    ]


def _describe(gpu: Gpu) -> str:
    link = (
        f"PCIe {gpu.link_generation or '?'}.0 x{gpu.link_width or '?'} now, "
        f"{gpu.link_generation_most or '?'}.0 x{gpu.link_width_most or '?'} at most"
    )
    return f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, {link}"
