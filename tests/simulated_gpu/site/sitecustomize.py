"""Python runs this as it starts where PYTHONPATH names this folder: commands and ranks that a test
starts find the simulated GPUs that SIMULATED_GPUS counts.
"""

import os

if int(os.environ.get("SIMULATED_GPUS", "0")):
    from simulated_gpu.processes import take_part

    take_part()
