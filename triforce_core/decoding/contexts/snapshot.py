"""Snapshots of contexts on the host: the tokens, their KV and the scores of the chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from triforce_core.decoding.contexts import calls
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text
from triforce_offload.kv.windows.marks import Mark


@dataclass(frozen=True)
class Snapshot:
    """What a context has computed.

    tokens: the tokens whose KV the snapshot has
    layers: number of layers
    layer_kv: returns the KV of a layer, [2, kv_heads, tokens, head_dim] on the host
    scores: mass of each chunk so far, [layers, kv_heads, chunks] float32 on the host; None without
        a retrieval level
    scored_by: policy and chunk size of the scores
    marks: KV of layers with a window, the last at the length of the tokens; empty if there are none
    about: additional texts that were saved with the context
    """

    tokens: list[int]
    layers: int
    layer_kv: Callable[[int], torch.Tensor]
    scores: torch.Tensor | None = None
    scored_by: str = ""
    marks: Sequence[Mark] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    def has_scores(self, by: str, chunk_size: int) -> bool:
        """Whether there is a score for every chunk of `chunk_size` tokens. by: see `scored_by`"""
        if self.scores is None or self.scored_by != by:
            return False
        return self.scores.shape[2] == len(self.tokens) // chunk_size

    def copied(self) -> Snapshot:
        """Return a snapshot that owns a copy of all layers. Raises LinkError or RankError."""
        layers = [self.layer_kv(layer) for layer in range(self.layers)]
        return replace(self, layer_kv=layers.__getitem__)


def snapshot_of(context: Context) -> Snapshot:
    """Return a snapshot of the context, with the heads of all ranks. Its layers are read on demand,
    before the context does anything else. Raises LinkError or RankError.
    """
    models = context.models
    tokens, layers = context.text.tokens[: context.length], context.sequence.kv.shape.layers
    # If ranks share a head, each knows only the scores of its own query heads.
    scored = context.levels.retrieval and models.kv_parts.are_apart
    return Snapshot(
        tokens,
        layers,
        lambda layer: layer_kv(context, layer),
        known_scores(context) if scored else None,
        models.method.scored_by,
        known_marks(context),
    )


def layer_kv(context: Context, layer: int) -> torch.Tensor:
    """Snapshot.layer_kv. Raises LinkError or RankError."""
    own = context.sequence.kv.on_host(layer)
    return context.models.kv_parts.gathered(own, context.tell.signed(calls.LayerKV(layer)))


def known_marks(context: Context) -> list[Mark]:
    """Snapshot.marks. Raises RankError."""
    windows = context.sequence.windows
    count = len(windows.saved_lengths) if windows else 0
    return [window_mark(context, index) for index in range(count)]


def window_mark(context: Context, index: int) -> Mark:
    """Return one of the saved windows, with the heads of all ranks. Raises RankError."""
    mark = context.sequence.windows.saved(index)
    call = context.tell.signed(calls.WindowMark(index))
    # As [layers * 2, kv_heads, tokens, head_dim], in which heads are gathered.
    rows = context.models.window_parts.gathered(mark.rows.flatten(0, 1), call)
    return Mark(mark.length, rows.unflatten(0, (-1, 2)))


def known_scores(context: Context) -> torch.Tensor:
    """Snapshot.scores. Raises RankError."""
    chunks = context.length // context.models.method.chunk_size
    own = context.levels.scores.sums[..., :chunks].to("cpu", copy=True)
    return context.models.kv_parts.gathered(own, context.tell.signed(calls.ChunkScores()))


@torch.inference_mode()
def restore(context: Context, saved: Snapshot) -> None:
    """Restore a context from a snapshot. Its drafter starts afresh.

    Raises DoesNotFitError, LinkError or RankError; the context is unusable then.
    """
    method = context.models.method
    scored = bool(context.levels.retrieval) and saved.has_scores(
        method.scored_by, method.chunk_size
    )
    try:
        lengths = [mark.length for mark in saved.marks]
        context.tell(calls.Restore(saved.tokens, scored, lengths))
        restore_from(context, saved.tokens, scored, lengths, saved)
    except BaseException:
        context.models.kv_parts.give_up()
        raise


def restore_from(
    context: Context,
    tokens: Sequence[int],
    scored: bool,
    marks: Sequence[int],
    saved: Snapshot | None,
) -> None:
    """Restore on this rank; `restore` also tells the others.

    marks: lengths of the marks
    saved: the snapshot, None except on the first rank
    """
    parts, windows = context.models.kv_parts, context.models.window_parts
    context.reset(0, len(tokens), 0)
    context.sequence.restore(
        len(tokens), lambda layer: parts.scattered(saved and saved.layer_kv(layer))
    )
    if context.sequence.windows:
        context.sequence.windows.restore(
            [
                Mark(length, rows.contiguous().unflatten(0, (-1, 2)))
                for index, length in enumerate(marks)
                for rows in [windows.scattered(saved and saved.marks[index].rows.flatten(0, 1))]
            ]
        )
    if scored:
        sums, own = context.levels.scores.sums, parts.scattered(saved and saved.scores)
        sums[..., : own.shape[2]] = own.to(sums.device)
    parts.agree()
    context.text = Text(list(tokens))
