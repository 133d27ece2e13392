"""A CUDA device that is not there: a test double on CPU memory, for the very code of the CUDA path.

`with simulated(Adversary.LATE):` replaces what `torch.cuda` offers. Inside, tensors say `cuda:0`,
streams and events have an order, and host memory is pinned or it is not. What a GPU would refuse is
an error; what a GPU would do wrong only now and then is an error each time:

- `tensor`: tensors of a device. An operation that mixes devices fails.
- `order`: streams, events, and copies that an adversary makes as late or as early as waits allow.
- `races`: every two uses of the same bytes must be ordered by events, or `RaceError`.
- `memory`: bytes of each device up to its cap; which host memory is pinned.
- `capture`: graphs, which refuse what a capture refuses.
- `interpreter`: Triton's kernels, run by its interpreter on the memory of the device.

Nothing here is a measurement: seconds are virtual and results are the CPU's.
"""

import torch

from simulated_gpu.install import simulated
from simulated_gpu.order import Adversary
from simulated_gpu.races import RaceError

# Whether there is a GPU that need not be simulated.
REAL = torch.cuda.is_available()

# Tokens of a text that tests generate: a simulated GPU takes a second for three of them.
TOKENS = 45 if REAL else 12

__all__ = ["REAL", "TOKENS", "Adversary", "RaceError", "simulated"]
