"""Trees of the retrieval level: rows see their own path alone, and rejected ones choose no chunks.
Planted faults in either are noticed. Models with recurrent layers draft no such trees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from float_bounds import assert_within, forward_bound
from helpers import random_ids
from test_hierarchy import engine

from triforce_core import Engine, SamplingParams
from triforce_core.decoding import speculative
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import PassInput, Step
from triforce_core.decoding.drafters.drafted_rows import DraftedRows, TreeRows
from triforce_core.decoding.drafters.retrieval import RetrievalCache
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.recent.drafted import Drafted
from triforce_offload.kv.scores import ChunkScores

PROMPT = random_ids(60, 2)
# Rows of a tree that three forwards run; those that something follows are kept.
PARENTS = (-1, 0, 0, 1, 2, 2, 3, 4, -1, 8)
FORWARDS = ((0, 1, 2), (3, 4, 5, 8), (6, 9, 7))


def path_to(row: int) -> list[int]:
    path = []
    while row >= 0:
        path.insert(0, row)
        row = PARENTS[row]
    return path


def drafted(own: Context, tokens: Sequence[int]) -> dict[int, torch.Tensor]:
    """Logits of the retrieval level after each row of a tree."""
    found, kept = {}, []
    for rows in FORWARDS:
        known = {row: place for place, row in enumerate([-1, *kept, *rows], start=-1)}
        fed = torch.tensor([tokens[row] for row in rows])
        logits = own.levels.draft(fed, tuple(known[PARENTS[row]] for row in rows))
        found |= {row: logits[place].clone() for place, row in enumerate(rows)}
        keeps = [place for place, row in enumerate(rows) if row in PARENTS]
        own.levels.keep_drafted(keeps)
        kept += [rows[place] for place in keeps]
    return found


def walk(ours: Engine, model: torch.nn.Module) -> None:
    """Logits of rows of trees are those of an exact model over the text and the rows' paths: the
    retrieval cache has room for all of the text.

    Raises AssertionError where they are not.
    """
    exact, bound = copy.deepcopy(model).double(), forward_bound(model, 90).logits
    own, text = Context(ours.models), list(PROMPT)
    scored = own.prefill(text, 60, lambda _: None).scored
    for seed in range(3):
        own.refresh(scored)
        tokens = random_ids(len(PARENTS), seed)
        found = drafted(own, tokens)
        for row, logits in found.items():
            branch = [tokens[each] for each in path_to(row)]
            with torch.no_grad():
                expected = exact(torch.tensor([text + branch])).logits[0, -1]
            assert_within(logits, expected, bound)
        # A pass accepts one branch, and a later draft sees nothing of the others.
        own.run(PassInput(torch.tensor(tokens), PARENTS))
        path = path_to(7)
        own.keep(path)
        own.text.commit([tokens[row] for row in path])
        text += [tokens[row] for row in path]
        scored = 1
    own.end()
    own.close()


FAMILIES = ("llama", "gemma3", "olmoe")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_logits_of_their_own_path(tiny, family: str) -> None:
    path, model = tiny(family)
    with engine(path, draft="none", budget=400, tree=20) as ours:
        walk(ours, model)


def _all_visible(
    rows: DraftedRows, count: int, parents: Sequence[int] | None, start: int
) -> TreeRows | None:
    """Each row sees all rows before it, siblings and their children too."""
    found = _follow(rows, count, parents, start)
    return found and found._replace(visible=torch.ones_like(found.visible).tril(len(rows)))


def _one_sibling(
    rows: DraftedRows, count: int, parents: Sequence[int] | None, start: int
) -> TreeRows | None:
    """The last row sees one row more than its path has."""
    found = _follow(rows, count, parents, start)
    if found is not None:
        hidden = (~found.visible[-1, : len(rows)]).nonzero()
        found.visible[-1, hidden[:1]] = True
    return found


def _one_late(
    rows: DraftedRows, count: int, parents: Sequence[int] | None, start: int
) -> TreeRows | None:
    """Places of rows are counted in the order of the KV, not along paths."""
    found = _follow(rows, count, parents, start)
    places = start + len(rows) + torch.arange(count)
    return found and found._replace(positions=places)


def _kept_in_order(cache: DenseKV, rows: Sequence[int]) -> None:
    """The first rows of a forward are kept in the place of those that are asked for."""
    _keep(cache, range(len(rows)))


def _stale_branch(cache: RetrievalCache, end: int) -> None:
    """Rows of the last draft stay behind the text."""
    stale = len(cache._drafted)
    _forget_drafted(cache, end)
    cache.kv.end += min(stale, 1)


def _stale_recent(drafted: Drafted) -> None:
    """Windows go on from the last draft's rows."""


_follow, _keep = DraftedRows.follow, DenseKV.keep
_forget_drafted = RetrievalCache._forget_drafted
OF_ROWS: dict[str, tuple[type, str, Callable]] = {
    "rows see all rows before them": (DraftedRows, "follow", _all_visible),
    "a row sees a sibling": (DraftedRows, "follow", _one_sibling),
    "places of a chain": (DraftedRows, "follow", _one_late),
    "KV of other rows is kept": (DenseKV, "keep", _kept_in_order),
    "a branch of the last draft is seen": (RetrievalCache, "_forget_drafted", _stale_branch),
    "windows have the last draft's rows": (Drafted, "forget", _stale_recent),
}


@pytest.mark.parametrize("fault", OF_ROWS)
def test_a_planted_fault_of_rows_is_noticed(tiny, monkeypatch, fault: str) -> None:
    """In a model with windows in some layers."""
    path, model = tiny("gemma3")
    monkeypatch.setattr(*OF_ROWS[fault])
    with (
        engine(path, draft="none", budget=400, tree=20) as ours,
        pytest.raises(AssertionError, match="off by up to"),
    ):
        walk(ours, model)


def sums_after(ours: Engine, rows: Sequence[int], parents: tuple[int, ...] | None) -> torch.Tensor:
    """The mass of chunks after a pass of which the first two rows were accepted."""
    own = Context(ours.models)
    own.refresh(own.prefill(PROMPT, 60, lambda _: None).scored)
    own.run(PassInput(torch.tensor(rows), parents))
    own.keep([0, 1])
    own.text.commit(list(rows[:2]))
    own.refresh(2)
    sums = own.levels.scores.sums.clone()
    own.end()
    own.close()
    return sums


def assert_rejected_rows_do_not_count(ours: Engine) -> None:
    """The first two of eight rows score chunks as they do in a pass of their own: each row has a
    group of scores to itself.
    """
    rows, parents = random_ids(8, 3), (-1, 0, 0, 1, 2, 2, -1, 6)
    chunks = len(PROMPT) // ours.models.method.chunk_size
    tree = sums_after(ours, rows, parents)[..., :chunks]
    alone = sums_after(ours, rows[:2], None)[..., :chunks]
    # Scores of a pass are kept in bfloat16.
    assert_within(tree, alone, 2 * torch.finfo(torch.bfloat16).eps * alone.abs())


def test_rejected_rows_give_chunks_no_scores(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, draft="none", budget=16, tree=20) as ours:
        assert_rejected_rows_do_not_count(ours)


def _all_rows(scores: ChunkScores, tokens: int, chunks: int) -> torch.Tensor:
    """Scores of rejected rows are taken too."""
    return _take(scores, scores._tokens, chunks)


_take = ChunkScores.take


def test_scores_taken_from_rejected_rows_are_noticed(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    monkeypatch.setattr(ChunkScores, "take", _all_rows)
    with (
        engine(path, draft="none", budget=16, tree=20) as ours,
        pytest.raises(AssertionError, match="off by up to"),
    ):
        assert_rejected_rows_do_not_count(ours)


def scored_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Of each pass of some texts, how many of its rows chose chunks, and which were kept."""
    scored: list[tuple[int, list[int]]] = []
    kept: list[list[int]] = []
    refresh, keep = Context.refresh, Context.keep

    def refreshed(own: Context, rows: int) -> None:
        scored.append((rows, kept.pop() if kept else []))
        refresh(own, rows)

    def noted(own: Context, rows: Sequence[int]) -> None:
        kept.append(list(rows))
        keep(own, rows)

    monkeypatch.setattr(Context, "refresh", refreshed)
    monkeypatch.setattr(Context, "keep", noted)
    with engine(path, draft="none", budget=16, tree=20) as ours:
        for seed in range(4):
            kept.clear()
            ours.generate(random_ids(60, seed), SamplingParams(24, temperature=1.0, seed=seed))
    return [(rows, path) for rows, path in scored if path]


@pytest.mark.parametrize("planted", [False, True])
def test_only_the_first_rows_that_were_kept_choose_chunks(tiny, monkeypatch, planted: bool) -> None:
    """Up to the first that was rejected, of a pass in which a sibling may have been accepted. If
    all that were accepted were counted, some would be rows before them that were not.
    """
    path, _ = tiny("llama")

    def step(tokens: list[int], *of_pass: object, **of_prompt: object) -> Step:
        made = Step(tokens, *of_pass, **of_prompt)
        return made._replace(scored=len(tokens)) if of_pass else made

    if planted:
        monkeypatch.setattr(speculative, "Step", step)
    after = scored_rows(path, monkeypatch)
    assert any(path != list(range(len(path))) for _, path in after), "a sibling was accepted"
    assert all(path[:rows] == list(range(rows)) for rows, path in after) != planted
