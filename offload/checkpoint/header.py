"""JSON headers of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from triforce_offload.errors import CheckpointError

_MAX_JSON_BYTES = 256 << 20


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raises CheckpointError."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is too large for a JSON header")
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return parsed
