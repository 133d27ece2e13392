"""The same bits (B2): a row's logits do not depend on what is computed beside it.

The text is decoded token by token, and its logits are compared with those of passes of several
rows, of trees, of prefills, at every placement, and beside other sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from helpers import FAMILIES, make_model, random_ids

from triforce_core import Engine
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import Ask
from triforce_kernels.host.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")

BLOCK = 64
# Passes begin before, at and behind the edge of a block, of a window and of a folded state.
PROMPT, TEXT = 50, 150
ROWS = (1, 2, 5, 17, 65)
DTYPES = ("float32", "bfloat16", "float16")


def engine(path: Path, dtype: str, **options: object) -> Engine:
    drafts = {"method": "speculative", "draft": "ngram", "draft_tokens": 64}
    options = {"dtype": dtype, "max_context": 256, "block_tokens": BLOCK, **drafts, **options}
    return Engine.from_pretrained(path, device="cpu", **options)


def prefilled(running: Engine, tokens: Sequence[int]) -> tuple[Context, torch.Tensor]:
    context = Context(running.models)
    return context, context.prefill(tokens, TEXT, lambda layer: None).logits


def alone(running: Engine, text: Sequence[int]) -> torch.Tensor:
    """The logits of the text after the prompt, one token at a time: [tokens, vocab]."""
    context, logits = prefilled(running, text[:PROMPT])
    rows = [logits]
    for token in text[PROMPT:]:
        rows.append(context.run(Ask(torch.tensor([token]), is_kept=True)))
    context.close()
    return torch.cat(rows)


def in_passes(running: Engine, text: Sequence[int], rows: int) -> torch.Tensor:
    """The same in passes of so many rows. Of every second one only a part is kept at first."""
    context, logits = prefilled(running, text[:PROMPT])
    found, place = [logits], PROMPT
    while place < len(text):
        tokens = torch.tensor(text[place : place + rows])
        count = len(tokens) if len(found) % 2 else (len(tokens) + 1) // 2
        found.append(context.run(Ask(tokens))[:count])
        context.keep(range(count))
        place += count
    context.close()
    return torch.cat(found)


def in_trees(running: Engine, text: Sequence[int]) -> torch.Tensor:
    """The same in trees of 24 rows, of which every third one goes on with the text."""
    context, logits = prefilled(running, text[:PROMPT])
    found, place, others = [logits], PROMPT, random_ids(24, seed=5)
    while place < len(text):
        told = text[place : place + 8]
        path = [3 * index + 2 for index in range(len(told))]
        tokens, parents = others[: path[-1] + 1], []
        for row, token in zip(path, told, strict=True):
            tokens[row] = token
        for row in range(len(tokens)):
            # Two rows that lead nowhere: the first follows the text, the second the first.
            text_row = row // 3 * 3 - 1
            parents.append(row - 1 if row % 3 == 1 else text_row)
        logits = context.run(Ask(torch.tensor(tokens), tuple(parents)))
        found.append(logits[path])
        context.keep(path)
        place += len(told)
    context.close()
    return torch.cat(found)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in paths:
            paths[family] = tmp_path_factory.mktemp(family)
            make_model(family, paths[family])
        return paths[family]

    return of


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_forward(
    models, family: str, dtype: str, threads: int
) -> None:
    text = random_ids(TEXT, seed=1)
    with engine(models(family), dtype) as running:
        expected = alone(running, text)
        assert expected.std() > 1e-3, "it would be no test"
        different = {}
        for rows in ROWS:
            found = in_passes(running, text, rows)
            different[f"{rows} rows"] = (found != expected).any(1).sum().item()
        different["trees"] = (in_trees(running, text) != expected).any(1).sum().item()
        # Dynamic scaling rotates a longer prompt otherwise.
        for length in () if family == "dynamic-rope" else (PROMPT + 1, 100, TEXT):
            context, logits = prefilled(running, text[:length])
            context.close()
            different[f"prefill {length}"] = int(
                not torch.equal(logits[0], expected[length - PROMPT])
            )
    assert not any(different.values()), different
