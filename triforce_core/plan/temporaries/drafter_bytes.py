"""Bytes of the temporaries of a draft model or a head. No tensors are created here."""

from __future__ import annotations

from triforce_core.model.config import ModelConfig
from triforce_core.plan.temporaries.product_bytes import decode_bytes
from triforce_core.plan.temporaries.workspace import forward_bytes

# Number of tokens of a draft model's longest forward, which catches up with a text. Such forwards
# are not recorded.
_CATCH_UP = 512


def drafter_bytes(
    config: ModelConfig, decoded: int, itemsize: int, context: int, drafted: int
) -> int:
    """Return the bytes of the temporaries of its longest forward.

    decoded: number of elements of the largest matrix that is decoded before it is multiplied by
    context: number of tokens of the longest sequence
    drafted: number of tokens of the largest draft
    """
    joins, rows = config.joins, _CATCH_UP
    if joins and joins.copies_keys:
        # It runs over no tokens of the text but the last.
        rows = drafted + 1
    forward = forward_bytes(config, rows, itemsize, context)
    if decoded:
        forward += decode_bytes(config, rows, decoded, itemsize)
    if joins:
        # Embeddings and states, as they come, normed and joined, of which ranks have all.
        width = joins.width if joins.copies_keys else config.hidden
        forward = max(forward, rows * 7 * width * itemsize)
    return forward
