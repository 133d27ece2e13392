"""Tables of IQ2 and IQ3: an index of 8 to 10 bits stands for 4 or 8 numbers of a byte each.

The gguf package has the numbers, which ggml's authors chose.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch


@cache
def grid(name: str, device: torch.device) -> torch.Tensor:
    """Return the table of one of `WITH_TABLES`: [words] int32, the first number lowest."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    numbers = torch.from_numpy(kind.grid.reshape(-1).astype(np.uint8))
    return numbers.view(torch.int32).to(device)
