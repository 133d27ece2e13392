"""Which keys each row sees, of consecutive tokens and of trees."""

from __future__ import annotations

import torch


def window_mask(tokens: int, before: int, window: int, device: torch.device) -> torch.Tensor:
    """Return which keys each of consecutive tokens sees, [tokens, before + tokens] bool: the last
    `window` up to its own.

    before: number of keys before the first token's own
    """
    seen = torch.ones(tokens, before + tokens, dtype=torch.bool, device=device)
    return seen.tril_(before).triu_(before + 1 - window)


def tree_mask(visible: torch.Tensor, before: int, window: int | None) -> torch.Tensor:
    """Return which keys each row of a tree sees, [rows, before + rows] bool: the last `window` of
    its path, or all.

    visible: as for `attend_tail`
    before: number of keys before those in `visible`
    """
    columns = torch.arange(-before, visible.shape[1], device=visible.device)
    return tree_columns(visible, columns, window)


def tree_columns(visible: torch.Tensor, columns: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return which keys each row of a tree sees, [rows, keys] bool.

    columns: column of `visible` of each key, [keys]; all rows see keys with a negative column, and
        none sees keys behind the last column
    """
    known = columns.clamp(0, visible.shape[1] - 1)
    seen = (columns < 0) | (visible[:, known] & (columns < visible.shape[1]))
    if window is None:
        return seen
    # Places on the row's path, counted from the first key in `visible`.
    places = torch.where(columns < 0, columns, visible.cumsum(1)[:, known] - 1)
    return seen & (places > visible.sum(1, keepdim=True) - 1 - window)
