"""How much host memory there is to take."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Memory a new mapping can count on: what the machine has left, or its container if less."""
    available = psutil.virtual_memory().available
    limit = _CGROUP / "memory.max"
    if limit.exists() and limit.read_text().strip().isdigit():
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get("inactive_file", 0))
        available = min(available, max(0, int(limit.read_text()) - used + reclaimable))
    return available
