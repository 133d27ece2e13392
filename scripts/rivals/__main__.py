"""The comparison with other systems: `python scripts/rivals compare [OPTIONS]`."""

import sys
from pathlib import Path

# Scripts import each other from the parent folder, as bench.*, checks.* and rivals.*.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from commands import run  # noqa: E402

sys.exit(run("rivals"))
