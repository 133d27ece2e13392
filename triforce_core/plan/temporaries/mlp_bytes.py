"""Upper bounds of the temporaries of an MLP on the device, in bytes."""

from __future__ import annotations

from triforce_core.model.feed_forward import MLP, Experts, ExpertsBeside
from triforce_kernels.counts import cdiv
from triforce_kernels.limits import (
    EXPERT_TILE,
    FEW_ROWS,
    expert_tile,
    most_expert_tiles,
    rows_in_tiles,
)


def mlp_bytes(mlp: MLP, hidden: int, tokens: int, itemsize: int, by_host: bool, tile: int) -> int:
    """Return the bytes of an MLP. Of experts: their results, the sums and the input in float32, and
    the scores of all experts; what leads to the results, either for places of tiles or for an
    expert that all tokens chose. Compiled kernels choose without temporaries, and what is float32
    is not copied.

    hidden: length of the input's rows
    by_host, tile: see `workspace.prompt_bytes`
    """
    if not mlp.width:
        return 0
    if not isinstance(mlp, Experts):
        return tokens * (hidden * 2 + mlp.width * 3) * itemsize
    widest, inner = max(mlp.width, mlp.shared), mlp.inner(hidden)
    # Of shorter vectors the input and the sum.
    latent = 2 * inner * bool(mlp.latent)
    results = inner * mlp.active
    if by_host:
        each = (hidden * 3 + latent) * itemsize + mlp.count * 4 * 3
        if itemsize < 4:
            each += (hidden * 2 + results + latent) * 4
    else:
        each = (hidden * 4 + latent) * itemsize + hidden * 4 * 4 + mlp.count * 4 * 6
    if isinstance(mlp, ExpertsBeside):
        # The router's input, and norms of both parts.
        each += hidden * (4 * 3 + itemsize * 2)
    few, each = min(tokens, FEW_ROWS), each + mlp.active * 48
    alone = (results + widest * 3) * itemsize
    most = few * (each + alone) + _tiles_bytes(mlp, inner, few, EXPERT_TILE, itemsize)
    tiled = min(tokens, rows_in_tiles(mlp.active, mlp.count, tile)) if tile else 0
    if tiled < tokens:
        most = max(most, tokens * (each + alone))
    if tiled:
        longest = expert_tile(cdiv(tiled * mlp.active, mlp.count))
        tiles = _tiles_bytes(mlp, inner, tiled, longest, itemsize)
        # Many rows are sorted by their experts.
        each += mlp.active * 48
        most = max(most, tiled * each + max(tiles, tiled * 3 * mlp.shared * itemsize))
    return most


def _tiles_bytes(mlp: Experts, inner: int, rows: int, tile: int, itemsize: int) -> int:
    """Return the bytes for the places of tiles of `tile` rows, some of them without rows: an
    activation beside its input or beside the result, and the rows of places.
    """
    places = tile * most_expert_tiles(rows, mlp.active, mlp.count, tile)
    return places * (max(3 * mlp.width, mlp.width + inner) * itemsize + 4 * 8)
