"""Which processors share a memory node with a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_SYS = Path("/sys")


def cpus_near(device: torch.device) -> tuple[int, ...]:
    """Return the processors of the GPU's memory node that this process may use, if any."""
    gpu = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    return tuple(cpu for cpu in node_cpus(address) if cpu in allowed)


def node_cpus(pci_address: str, sys: Path = _SYS) -> tuple[int, ...]:
    """Return the processors of a PCI device's memory node as Linux reports it, if any."""
    try:
        node = int((sys / "bus/pci/devices" / pci_address / "numa_node").read_text())
        if node < 0:
            return ()
        return parse_cpus((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return ()


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the processors in a list such as "0-3,8,10-11". Raises ValueError."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)
