"""Tokens that choose the keys that they attend to, and n-gram embeddings (Qwen3.8-Flash-Next)."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from allocations import allocated_peak
from helpers import random_ids
from recent_walks import walk_cuts, walk_trees
from safetensors.torch import load_file, save_file

from triforce_core import Engine, SamplingParams
from triforce_core.model import elsewhere
from triforce_core.model.families.hf import from_hf
from triforce_core.model.layers import Attention
from triforce_core.model.parts.ngrams import NGramTable
from triforce_core.model.parts.specs import Indexer, NGrams
from triforce_core.plan.temporaries.parts_bytes import chosen_in_prompt_bytes
from triforce_kernels import dispatch
from triforce_kernels.attention.selection import (
    Newest,
    Selection,
    attend_selected,
    attend_text_selected,
    block_scores,
    slots_of_rows,
)
from triforce_kernels.dispatch import REFERENCE
from triforce_offload.errors import CheckpointError, UnsupportedModelError, UsageError
from triforce_offload.forward_batch import ForwardBatch, lines_of

FAMILY = "qwen4_exp-moe"
GREEDY = SamplingParams(max_new_tokens=30, temperature=0)


def engine(path: Path, **options: object) -> Engine:
    return Engine.from_pretrained(path, **{"device": "cpu", "max_context": 200} | options)


def test_rows_of_trees_choose_by_their_own_paths(tiny) -> None:
    path, model = tiny(FAMILY)
    with engine(path, draft_tokens=64) as ours:
        assert walk_trees(ours, model) > 2


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_texts_are_cut_anywhere(tiny, seed: str) -> None:
    path, model = tiny(FAMILY)
    with engine(path) as ours:
        walk_cuts(ours, model, seed)


def test_texts_beside_each_other_are_those_of_one(tiny) -> None:
    path, _ = tiny(FAMILY)
    prompts = [random_ids(length, length) for length in (70, 12, 40)]
    with engine(path) as alone:
        expected = [alone.generate(prompt, GREEDY).token_ids for prompt in prompts]
    with engine(path, sequences=3) as together:
        found = [each.token_ids for each in together.generate_all(prompts, GREEDY)]
    assert found == expected


def test_a_saved_context_goes_on(tiny, tmp_path: Path) -> None:
    path, _ = tiny(FAMILY)
    prompt, more = random_ids(70), random_ids(9, 4)
    with engine(path) as first:
        known = prompt + first.generate(prompt, GREEDY).token_ids
        first.save_context(tmp_path / "context")
        expected = first.generate(known + more, GREEDY)
    with engine(path) as second:
        second.load_context(tmp_path / "context")
        result = second.generate(known + more, GREEDY)
    assert result.token_ids == expected.token_ids
    assert result.stats["reused_tokens"] == expected.stats["reused_tokens"] > 70


@pytest.mark.parametrize("parts", ["shards", "shards of their own scales", "whole", "whole, inv"])
def test_a_table_in_8_bits_is_multiplied_by_its_scale(tiny, tmp_path: Path, parts: str) -> None:
    path, _ = tiny(FAMILY)
    texts, scale = [], torch.tensor([0.25])
    tensors = load_file(path / "model.safetensors")
    shards = sorted(name for name in tensors if ".ngram_embedding." in name)
    table = {name: tensors.pop(name) for name in shards}
    before = f"{shards[0].partition('ngram_embedding')[0]}ngram_embedding."
    if parts.startswith("whole"):
        table = {f"{before}weight": torch.cat(list(table.values()))}
    coded = {name: (each / scale).to(torch.float8_e4m3fn) for name, each in table.items()}
    scales = {
        "shards": [f"{before}weight_scale"],
        "shards of their own scales": [f"{name}_scale" for name in shards],
        "whole": [f"{before}weight_scale"],
        "whole, inv": [f"{before}weight_scale_inv"],
    }[parts]
    files = {
        "dense": {name: each.float() * scale for name, each in coded.items()},
        "coded": coded | {name: scale.clone() for name in scales},
    }
    for name, changed in files.items():
        shutil.copytree(path, tmp_path / name)
        save_file(tensors | changed, tmp_path / name / "model.safetensors", {"format": "pt"})
        with engine(tmp_path / name) as ours:
            texts.append(ours.generate(random_ids(40), GREEDY).token_ids)
    assert texts[0] == texts[1]


def test_scales_of_the_rows_of_a_table_are_refused(tiny, tmp_path: Path) -> None:
    path, _ = tiny(FAMILY)
    shutil.copytree(path, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".ngram_embedding." in name)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"\d+ scales; rows of a file"):
        engine(tmp_path / "model")


def test_a_conversation_waits_in_host_memory_while_another_is_served(tiny) -> None:
    path, _ = tiny(FAMILY)
    prompt = random_ids(70)
    with engine(path) as ours:
        known = prompt + ours.generate(prompt, GREEDY).token_ids
        expected = ours.generate(known, GREEDY).token_ids
        ours.generate(prompt, GREEDY)
        kept = ours.copy_context()
        ours.generate(random_ids(90, 5), GREEDY)
        ours.restore(kept)
        result = ours.generate(known, GREEDY)
    assert result.token_ids == expected
    assert result.stats["reused_tokens"] >= 70


def test_a_layer_that_the_processor_computes_rotates_its_index_there(tiny, monkeypatch) -> None:
    """As beside a GPU: positions and angles are on a device, and vectors are not."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    path, _ = tiny(FAMILY)
    with engine(path) as ours:
        model = ours.models.target
        mixer = model._mixers[model.config.kv_layers[-1]]
        index = model.config.attention.index
        width, heads = model.config.attention.head_dim, model.config.attention.heads
    monkeypatch.setattr(dispatch, "_forced", REFERENCE)
    monkeypatch.setattr(elsewhere, "come", lambda tensor: tensor)
    taken = []

    class Taking:
        def attend_selected(self, layer, heads, parts, batch, selection):
            taken.append((parts, selection))
            return heads[:, :1]

    def angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert positions.device.type in ("cpu", "cuda")
        return (torch.empty(len(positions), index.dim, device="cuda"),) * 2

    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = ForwardBatch(
            torch.empty(3, dtype=torch.int64, device="cuda"),
            torch.empty(3, dtype=torch.int64, device="cuda"),
            index_rotation=angles,
        )
        here = {f"index_{each}_norm": torch.empty(index.dim) for each in "qk"}
        mixer._attended(
            here, torch.empty(3, heads, width), torch.empty(3, index.rows), Taking(), batch
        )
        parts, selection = taken[0]
        found = selection.grouped(torch.empty(2, index.dim), torch.empty(2, dtype=torch.int64))
    assert parts.device.type == found.device.type == "cpu"


@pytest.mark.parametrize("group", [1, 12])
def test_a_prompts_attention_takes_the_memory_that_is_planned(group: int) -> None:
    tokens, rows, dim = 16384, 48, 128
    index = Indexer(heads=4, dim=32, budget=512, block=4)
    mixer = Attention(group, 1, dim, index=index)
    selection = Selection(index.budget, index.block, lambda means, numbers: means)
    key = torch.randn(1, tokens, dim).bfloat16()
    query = torch.randn(group, rows, dim).bfloat16()
    queries = torch.randn(rows, index.heads, index.dim).bfloat16()
    vectors = torch.randn(tokens, index.dim).bfloat16()

    def run() -> None:
        blocks = selection.blocks_of(vectors, 0)
        attend_text_selected(selection, query, key, key, queries, blocks)

    own = query.numel() * 2
    assert allocated_peak(run, 0) <= chosen_in_prompt_bytes(mixer, rows, 2, tokens) + 2 * own


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ple_layer_ids": [9]}, CheckpointError, "ple_layer_ids 9 is no recurrent one of"),
        ({"ple_layer_ids": [0]}, CheckpointError, "ple_layer_ids 0 is no recurrent one of"),
        ({"ple_layer_ids": [1, 2]}, UnsupportedModelError, "of several layers"),
        ({"indexer_n_heads": None}, UnsupportedModelError, "without an index of keys"),
        ({"indexer_budget": 17}, CheckpointError, "17 tokens .indexer_budget. are no whole blocks"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tiny, change, error, message) -> None:
    path, _ = tiny(FAMILY)
    raw = json.loads((path / "config.json").read_text())
    with pytest.raises(error, match=message):
        from_hf(raw | change, {})


def test_nothing_is_retrieved(tiny) -> None:
    path, _ = tiny(FAMILY)
    with pytest.raises(UsageError, match="choose the keys that they attend to by themselves"):
        engine(path, budget=32)
    with pytest.raises(UsageError, match="no kernel chooses the keys"):
        engine(path, same_bits="on")


BLOCK, HEADS, KV_HEADS, INDEX_HEADS, DIM = 4, 4, 2, 3, 8
SELECTION = Selection(
    budget=16, block=BLOCK, grouped=lambda means, numbers: means + numbers[:, None]
)


def expected_rows(vectors: torch.Tensor, queries: torch.Tensor) -> list[int]:
    """Which of some tokens the last one attends to, by the definition."""
    seen = len(vectors)
    whole = seen // BLOCK
    blocks = SELECTION.blocks_of(vectors[: whole * BLOCK], 0)
    scores = block_scores(queries[None], blocks)[0].tolist()
    best = sorted(range(whole), key=lambda block: (-scores[block], block))[: 16 // BLOCK]
    places = [block * BLOCK + each for block in sorted(best) for each in range(BLOCK)]
    return places + list(range(whole * BLOCK, seen))


@pytest.mark.parametrize("length", [21, 22, 23, 24, 57])
@pytest.mark.parametrize("rows", [1, 7])
def test_what_a_row_chooses(length: int, rows: int) -> None:
    """In a prompt, in a pass and in a tree: the same keys, by the definition."""
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    total = length + rows
    vectors, index = random(total, DIM), random(rows, INDEX_HEADS, DIM)
    query, key, value = random(HEADS, rows, 16), *random(2, KV_HEADS, total, 16)
    blocks = SELECTION.blocks_of(vectors[: length // BLOCK * BLOCK], 0)
    parents = [-1, *(max(-1, row - 1 - row % 2) for row in range(1, rows))]
    for lineage in (lines_of([row - 1 for row in range(rows)], rows), lines_of(parents, rows)):
        newest = Newest.of(BLOCK, length, lineage)
        slots, counted = slots_of_rows(SELECTION, index, blocks, vectors, newest)
        out = attend_selected(query, key, value, slots, counted)
        for row in range(rows):
            path = [length + each for each in lineage[row].tolist() if each >= 0]
            own = torch.tensor([*range(length), *path])
            places = own[expected_rows(vectors[own], index[row])]
            assert sorted(slots[row][counted[row]].tolist()) == sorted(places.tolist())
            exact = attention(query[:, row], key[:, places], value[:, places])
            assert torch.allclose(out[:, row], exact, atol=1e-5)
    text = SELECTION.blocks_of(vectors[: total // BLOCK * BLOCK], 0)
    out = attend_text_selected(SELECTION, query, key, value, index, text)
    for row in range(rows):
        places = torch.tensor(expected_rows(vectors[: length + row + 1], index[row]))
        exact = attention(query[:, row], key[:, places], value[:, places])
        assert torch.allclose(out[:, row], exact, atol=1e-5)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Of one row, [heads, head_dim]."""
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (key, value))
    scores = (query[:, None] * key).sum(2) * query.shape[1] ** -0.5
    return (scores.softmax(1)[..., None] * value).sum(1)


def test_of_equal_scores_earlier_blocks_are_chosen() -> None:
    scores = torch.zeros(2, 7)
    scores[1, 5] = 1
    scores[1, 6] = float("-inf")
    chosen = SELECTION.chosen(scores)
    assert chosen[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert chosen[1].nonzero().flatten().tolist() == [0, 1, 2, 5]
    assert SELECTION.chosen(scores[:, 3:])[1].tolist() == [True, True, True, False]
    best, counted = SELECTION.best(scores)
    assert best.tolist() == [[0, 1, 2, 3], [5, 0, 1, 2]]
    assert counted.all()
    best, counted = SELECTION.best(scores[:, 3:])
    assert (best[1].tolist(), counted[1].tolist()) == ([2, 0, 1, 3], [True, True, True, False])


class Counting:
    """A table whose rows are their numbers."""

    shape = (1000, 1)

    def lookup(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows.to(dtype)[:, None]


def test_ngrams_of_a_row_are_those_of_its_path() -> None:
    """By the definition: tokens before the end of a text count as such ends."""
    spec = NGrams(sizes=(11, 13), multipliers=(3, 5, 7), width=1, taps=4, end=2, streams=2)
    table = NGramTable(spec, [Counting()])

    def expected(*tokens: int) -> list[int]:
        """tokens: the last one first"""
        seen, ended = [tokens[0]], False
        for token in tokens[1:]:
            ended = ended or token == spec.end
            seen.append(spec.end if ended else token)
        two = seen[0] * 3 ^ seen[1] * 5
        return [two % 11, 11 + (two ^ seen[2] * 7) % 13]

    text = [9, 4, 2, 8, 6]
    batch = ForwardBatch.text(torch.tensor(text), 3, torch.device("cpu")).after([5, 1, 7], 3, 2)
    rows = [list(each) for each in table.rows_of(batch).tolist()]
    whole = [1, 7, *text]
    assert rows == [expected(*whole[i : i + 3][::-1]) for i in range(5)]
    tree = ForwardBatch.tree(torch.tensor(text), 3, (-1, 0, 0, 2, -1), torch.device("cpu"))
    paths = [(9, 7, 1), (4, 9, 7), (2, 9, 7), (8, 2, 9), (6, 7, 1)]
    found = table.rows_of(tree.after([5, 1, 7], 3, 2)).tolist()
    assert found == [expected(*path) for path in paths]
    # At the beginning of a text, and with two texts side by side.
    first = ForwardBatch.text(torch.tensor([4]), 0, torch.device("cpu")).after([], 0, 2)
    both = ForwardBatch.side_by_side([first, batch])
    assert table.rows_of(both).tolist() == [expected(4, 2, 2), *rows]
    assert table.looked_up(table.rows_of(first), torch.float32).tolist() == [expected(4, 2, 2)]
    assert all(one != two for one, two in pairwise(rows))
