"""MTP heads, EAGLE-3 heads, DFlash drafters and assistants on a real device. Simulated without a
GPU.
"""

from __future__ import annotations

from pathlib import Path

import assistant_files
import dflash_files
import pytest
from eagle3_heads import KINDS, RandomHead
from helpers import BLOCK, add_head, make_model, placed, random_ids
from simulated_gpu import TOKENS

from triforce_core import Engine, SamplingParams

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0)
OPTIONS = {"max_context": 200, "block_tokens": BLOCK, "dtype": "float32"}
METHODS = {
    "triforce": {"method": "triforce", "budget": 32, "draft_tokens": 6},
    "chains": {"method": "speculative", "draft_tokens": 6},
    "trees": {"method": "speculative", "tree": 9},
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """A model with a head of each kind, and what `draft` is then."""
    found = {}
    families = {"mtp": "qwen3_5", "eagle3": "llama", "dflash": "qwen3", "assistant": "gemma4"}
    for kind, family in families.items():
        path = tmp_path_factory.mktemp(family)
        model = make_model(family, path)
        if kind == "mtp":
            add_head(path, model)
            found[kind] = path, kind
        elif kind == "dflash":
            made = dflash_files.RandomDrafter(model, path / "blocks", dflash_files.KINDS["second"])
            found[kind] = path, str(made.directory)
        elif kind == "assistant":
            usual = assistant_files.KINDS["usual"]
            made = assistant_files.RandomAssistant(model, path / "assistant", usual)
            found[kind] = path, str(made.directory)
        else:
            head = RandomHead(model, path / "head", KINDS["specforge"])
            found[kind] = path, str(head.directory)
    return found


@pytest.mark.first
@pytest.mark.usefixtures("recorded_passes")
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "assistant"])
@pytest.mark.parametrize(
    ("method", "placement"),
    [
        *zip(METHODS, ("kv", "both", "kv"), strict=True),
        *(("chains", "resident"), ("trees", "resident")),
    ],
)
def test_a_head_changes_no_greedy_text(heads, kind: str, method: str, placement: str) -> None:
    """Also where forwards are recorded: its own, and those whose hidden states it takes."""
    path, draft = heads[kind]
    prompt = random_ids(38) * 2
    with Engine.from_pretrained(path, device="cuda:0", method="autoregressive", **OPTIONS) as plain:
        expected = plain.generate(prompt, GREEDY).token_ids
    options = placed(placement, {**OPTIONS, **METHODS[method], "draft": draft})
    with Engine.from_pretrained(path, device="cuda:0", **options) as engine:
        result = engine.generate(prompt, GREEDY)
        assert result.token_ids == expected
        assert result.stats["levels"][0] == kind
        # A text that turns back.
        assert (
            engine.generate(prompt[:50], GREEDY).token_ids
            == engine.generate(prompt[:50], GREEDY, reuse=False).token_ids
        )


@pytest.mark.slow
@pytest.mark.strict
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "assistant"])
@pytest.mark.parametrize("method", ["triforce", "trees"])
def test_the_host_never_waits_without_a_limit(heads, kind: str, method: str) -> None:
    path, draft = heads[kind]
    options = placed("kv", {**OPTIONS, **METHODS[method], "draft": draft})
    params = SamplingParams(8, temperature=0.8, seed=1)
    with Engine.from_pretrained(path, device="cuda:0", **options) as engine:
        assert len(engine.generate(random_ids(38) * 2, params).token_ids) == 8
