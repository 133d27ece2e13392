"""Snapshots of contexts on the host: the tokens, their KV and the scores of the chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from triforce_core.decoding.contexts import calls
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.kv_parts import StoreParts
from triforce_core.decoding.contexts.text import Text
from triforce_offload.kv.recent.marks import Mark
from triforce_offload.kv.recent.store import RecentStore

# Marks of a store: a length of the text, and tensors by name.
SavedMarks = Sequence[tuple[int, Mapping[str, torch.Tensor]]]


@dataclass(frozen=True)
class Snapshot:
    """What a context has computed.

    tokens: the tokens whose KV the snapshot has
    layers: number of layers
    layer_kv: returns the KV of a layer, [sides, kv_heads, tokens, head_dim] on the host
    scores: mass of each chunk so far, [layers, kv_heads, chunks] float32 on the host; None without
        a retrieval level
    scored_by: policy and chunk size of the scores
    marks: what each recent store holds at some lengths, by its kind: for each length, the tensors
        by name, with all heads; the last is at the length of the tokens
    about: additional texts that were saved with the context
    """

    tokens: list[int]
    layers: int
    layer_kv: Callable[[int], torch.Tensor]
    scores: torch.Tensor | None = None
    scored_by: str = ""
    marks: Mapping[str, SavedMarks] = field(default_factory=dict)
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


def known_marks(context: Context) -> dict[str, SavedMarks]:
    """Snapshot.marks. Raises RankError."""
    found = {}
    for store in context.sequence.recent:
        kind, names = store.shape.kind, store.shape.mark_tensors(0)
        found[kind] = [
            (length, {name: mark_part(context, kind, index, name) for name in names})
            for index, length in enumerate(store.saved_lengths)
        ]
    return found


def mark_part(context: Context, kind: str, index: int, name: str) -> torch.Tensor:
    """Return a tensor of one of a store's saved marks, with the heads of all ranks. Raises
    RankError.
    """
    store, parts = _store(context, kind)
    own = store.shape.by_heads(store.saved(index))[name]
    call = context.tell.signed(calls.MarkPart(kind, index, name))
    return parts.of(store.shape.mark_tensors(0)[name]).gathered(own, call)


def _store(context: Context, kind: str) -> tuple[RecentStore, StoreParts]:
    """Return a recent store, and the heads of each rank in it."""
    stores = zip(context.sequence.recent, context.models.recent_parts, strict=True)
    return next(each for each in stores if each[0].shape.kind == kind)


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
        lengths = {kind: [length for length, _ in marks] for kind, marks in saved.marks.items()}
        each = (lengths.get(kind, []) for kind in ("window", "state"))
        context.tell(calls.Restore(saved.tokens, scored, *each))
        restore_from(context, saved.tokens, scored, lengths, saved)
    except BaseException:
        context.models.kv_parts.give_up()
        raise


def restore_from(
    context: Context,
    tokens: Sequence[int],
    scored: bool,
    marks: Mapping[str, Sequence[int]],
    saved: Snapshot | None,
) -> None:
    """Restore on this rank; `restore` also tells the others.

    marks: lengths of the marks of each kind of store
    saved: the snapshot, None except on the first rank
    """
    parts = context.models.kv_parts
    context.reset(0, len(tokens), 0)
    context.sequence.restore(
        len(tokens), lambda layer: parts.scattered(saved and saved.layer_kv(layer))
    )
    for store in context.sequence.recent:
        kind = store.shape.kind
        known = saved.marks[kind] if saved else [None] * len(marks[kind])
        store.restore(
            [
                _restored(context, kind, length, each and each[1])
                for length, each in zip(marks[kind], known, strict=True)
            ]
        )
    if scored:
        sums, own = context.levels.scores.sums, parts.scattered(saved and saved.scores)
        sums[..., : own.shape[2]] = own.to(sums.device)
    parts.agree()
    context.text = Text(list(tokens))


def _restored(
    context: Context, kind: str, length: int, whole: Mapping[str, torch.Tensor] | None
) -> Mark:
    """Return this rank's part of a mark, whose tensors the first rank provides."""
    store, parts = _store(context, kind)
    tensors = {
        name: parts.of(tensor).scattered(whole and whole[name])
        for name, tensor in store.shape.mark_tensors(0).items()
    }
    return store.shape.mark_of(length, tensors)
