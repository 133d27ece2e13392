"""How much memory is available."""

from __future__ import annotations

from pathlib import Path

import psutil

# Part of a GPU's budget for memory that nothing allocates explicitly: workspaces of libraries, and
# the allocator's rounding.
LIBRARY_BYTES = 128 << 20
_CGROUP = Path("/sys/fs/cgroup")
# Left free on a GPU: kernels are loaded when they are first used, and a display may need more.
_SPARE_BYTES = 768 << 20
# Size of a GPU's page tables for each GiB of registered host memory.
_PAGE_TABLE_BYTES = 2 << 20


def available_host_bytes() -> int:
    """Return the memory that a new mapping can count on: what the machine has left, or its
    container if that is less.
    """
    available = psutil.virtual_memory().available
    limit = _CGROUP / "memory.max"
    if limit.exists() and limit.read_text().strip().isdigit():
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get("inactive_file", 0))
        available = min(available, max(0, int(limit.read_text()) - used + reclaimable))
    return available


def lendable_bytes(free_bytes: int, registered_bytes: int) -> int:
    """Return how much of a GPU's free memory may be used if the user gives no budget.

    registered_bytes: upper bound of the host memory that will be registered with the driver
    """
    tables = -(-registered_bytes // (1 << 30)) * _PAGE_TABLE_BYTES
    return max(0, free_bytes - _SPARE_BYTES - tables)
