"""The table of n-gram embeddings in a checkpoint, which stays in its files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from triforce_core.model.config import ModelConfig
from triforce_core.model.parts.specs import NGrams
from triforce_offload.checkpoint.source import TensorSource
from triforce_offload.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from triforce_core.model.parts.ngrams import NGramTable

# The factor of all numbers of a table in 8 bits.
_SCALE = "ngram_embedding.weight_scale"
# What else belongs to a table in safetensors files, and is computed here.
COMPUTED = tuple(
    f".ple_embedding.{name}"
    for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets", _SCALE)
)


def table_names(held: Collection[str], patterns: Sequence[str], layer: int) -> list[str]:
    """Return the names of the parts of the table in order, of those that files hold.

    patterns: of the whole table, or of its parts, with a place for their numbers
    """
    for pattern in patterns:
        name = pattern.format(layer=layer, part="@")
        if name in held:
            return [name]
        if "@" in name:
            ends = re.escape(name).replace("@", r"(\d+)")
            matches = (re.fullmatch(ends, each) for each in held)
            found = {int(match[1]): match[0] for match in matches if match}
            if found:
                return [found[number] for number in sorted(found)]
    return []


def faults_of_table(
    source: TensorSource, config: ModelConfig, names: Sequence[str]
) -> Iterator[CheckpointError]:
    """Yield what is wrong with the table of a model."""
    spec = config.ngrams
    if spec is None:
        return
    file = source.files[0]
    if not names:
        yield CheckpointError(f"{file} lacks the table of n-gram embeddings")
        return
    parts = [source.rows(name).shape for name in names]
    heights, wanted = [rows for rows, _ in parts], sum(spec.sizes)
    if sum(heights) < wanted or any(width != spec.width for _, width in parts):
        yield CheckpointError(
            f"{file}: the table of n-gram embeddings has {sum(heights)} rows of {parts[0][1]}, its "
            f"config says {wanted} of {spec.width}"
        )
    if len({*heights[:-1], max(heights)}) > 1:
        yield UnsupportedModelError(f"{file}: parts of the table of n-grams have different heights")


def table_of(source: TensorSource, spec: NGrams, names: Sequence[str]) -> NGramTable:
    """Return the table. Raises CheckpointError."""
    import torch

    from triforce_core.model.parts.ngrams import NGramTable

    scale = torch.ones(1)
    prefix = names[0].rpartition("ngram_embedding")[0]
    # That of a whole table is read with its rows.
    stored = prefix + _SCALE
    if stored in source.names() and names[0] + "_scale" != stored:
        source.read(stored, scale)
    return NGramTable(spec, [source.rows(name) for name in names], float(scale))
