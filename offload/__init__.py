"""Where the bytes of weights and KV are, and how they cross the link. Knows no vocabulary."""

import os
import sys

# The one exception to the rule that nothing happens at import. By default an idle OpenMP thread
# busy-waits for milliseconds, and beside other processes it takes processor time from threads that
# work. OpenMP reads these variables when torch is loaded, so they must be set before.
# `triforce_offload.machine.openmp` is for programs that load torch first.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
