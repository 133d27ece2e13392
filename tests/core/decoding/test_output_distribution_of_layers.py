"""L3 of models whose layers differ, in bfloat16: the distribution of three tokens, enumerated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import assistant_files
import dflash_files
import pytest
import torch
from eagle3_heads import Made, RandomHead
from exact_distributions import PROMPT, TOKENS, VOCAB, distribution_of_engine, drawing, outcomes
from helpers import BLOCK, PLACEMENTS, add_head, make_model, turns
from law_tests import LEAST_P, p_value

from triforce_core import Engine

# The prompt has 40 tokens: some have left every window, and drafts cross their edges.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 12,
    "initializer_range": 0.2,
}
# Gemma's norms and scaled embeddings make random models far too certain.
FAMILIES: dict[str, dict[str, object]] = {
    "gemma3": {"initializer_range": 0.05},
    "gemma4": {"initializer_range": 0.15},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"], "sliding_window": None},
    "lfm2": {"layer_types": ["conv", "full_attention"], "sliding_window": None},
    "granite4-h": {
        "layer_types": ["linear_attention", "full_attention"],
        "sliding_window": None,
        "logits_scaling": 4.0,
    },
    "gpt-oss-moe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"layer_types": None, "sliding_window": None, "moe_intermediate_size": 16},
}
# Tokens choose 8 of the 40 tokens by themselves, so there is no retrieval level.
CHOOSING: dict[str, dict[str, object]] = {
    "qwen4_exp-moe": {
        "layer_types": ["linear_attention", "full_attention"],
        "ple_layer_ids": [1],
        "indexer_budget": 8,
        "sliding_window": None,
        # No text ends.
        "eos_token_id": VOCAB,
    }
}
# A retrieval cache of 8 of 40 tokens, chains and trees.
WAYS: dict[str, dict[str, object]] = {
    "retrieval": {"draft": "none", "budget": 8, "chunk_size": 4, "draft_tokens": 2},
    "retrieval, n-grams": {"draft": "ngram", "budget": 8, "chunk_size": 4, "draft_tokens": 2},
    "tree": {"method": "speculative", "draft": "{drafter}", "tree": 7},
    "coupled": {"budget": 8, "chunk_size": 4, "draft_tokens": 2, "accept": "coupled"},
}
# A random head: its drafts cost time, and no token.
WITH_HEAD: dict[str, dict[str, object]] = {
    "mtp": {"method": "speculative", "draft": "mtp", "draft_tokens": 2},
    "mtp, trees": {"method": "speculative", "draft": "mtp", "tree": 7},
    "retrieval, mtp": {"draft": "mtp", "budget": 8, "chunk_size": 4, "draft_tokens": 2},
}
# Likewise, a head in files of its own that knows half of the tokens.
WITH_EAGLE3: dict[str, dict[str, object]] = {
    "eagle3": {"method": "speculative", "draft": "{head}", "draft_tokens": 2},
    "eagle3, trees": {"method": "speculative", "draft": "{head}", "tree": 7},
    "retrieval, eagle3": {"draft": "{head}", "budget": 8, "chunk_size": 4, "draft_tokens": 2},
}
# Likewise, a drafter of blocks, whose tokens are among three candidates.
BLOCKS = dflash_files.Made(
    rows=4, taps=(0, 1), second=True, convolved=2, group=8, best=3, mask=VOCAB - 1
)
WITH_DFLASH: dict[str, dict[str, object]] = {
    "dflash": {"method": "speculative", "draft": "{blocks}", "draft_tokens": 2},
    "dflash, trees": {"method": "speculative", "draft": "{blocks}", "tree": 7},
    "retrieval, dflash": {"draft": "{blocks}", "budget": 8, "chunk_size": 4, "draft_tokens": 2},
}
# Likewise, an assistant, which attends to keys of the model.
WITH_ASSISTANT: dict[str, dict[str, object]] = {
    "assistant": {"method": "speculative", "draft": "{assistant}", "draft_tokens": 2},
    "assistant, trees": {"method": "speculative", "draft": "{assistant}", "tree": 7},
    "retrieval, assistant": {
        **{"draft": "{assistant}", "budget": 8, "chunk_size": 4, "draft_tokens": 2}
    },
}
OPTIONS = {"device": "cpu", "dtype": "bfloat16", "max_context": 64, "block_tokens": BLOCK}
SAMPLES = 2_000


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """A model of each family, and the exact distribution of its texts."""
    found = {}
    for family, own in (FAMILIES | CHOOSING).items():
        path = tmp_path_factory.mktemp(family)
        model = make_model(family, path, **SIZES | own)
        if family in ("qwen3_5", *CHOOSING):
            add_head(path, model)
        if family == "gemma3":
            RandomHead(
                model, path / "head", Made(tokens=VOCAB // 2, tapped=(0, 1), style="speculators")
            )
            dflash_files.RandomDrafter(model, path / "blocks", BLOCKS)
        if family == "gemma4":
            assistant_files.RandomAssistant(
                model, path / "assistant", assistant_files.KINDS["usual"]
            )
        with Engine.from_pretrained(path, method="autoregressive", **OPTIONS) as plain:
            found[family] = path, distribution_of_engine(plain)
    return found


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter")
    windows = ("layer_types", "sliding_window")
    make_model("llama", path, **{name: SIZES[name] for name in SIZES if name not in windows})
    return path


@pytest.mark.parametrize(
    ("family", "way", "samples"),
    [
        ("qwen3_5", "retrieval, mtp", SAMPLES // 5),
        ("qwen4_exp-moe", "mtp, trees", SAMPLES // 5),
        pytest.param("qwen4_exp-moe", "mtp", SAMPLES, marks=pytest.mark.slow),
        ("gemma3", "dflash, trees", SAMPLES // 5),
        ("gemma4", "assistant, trees", SAMPLES // 5),
        pytest.param("gemma4", "retrieval", SAMPLES // 5, marks=pytest.mark.slow),
        *(
            pytest.param(family, way, SAMPLES, marks=pytest.mark.slow)
            for index, family in enumerate(FAMILIES)
            for way in turns(WAYS, index, 1)
        ),
        *(pytest.param("qwen3_5", way, SAMPLES, marks=pytest.mark.slow) for way in WITH_HEAD),
        *(pytest.param("gemma3", way, SAMPLES, marks=pytest.mark.slow) for way in WITH_EAGLE3),
        *(pytest.param("gemma3", way, SAMPLES, marks=pytest.mark.slow) for way in WITH_DFLASH),
        *(pytest.param("gemma4", way, SAMPLES, marks=pytest.mark.slow) for way in WITH_ASSISTANT),
    ],
)
def test_three_tokens_have_the_exact_distribution(
    distributions, drafter: Path, family: str, way: str, samples: int
) -> None:
    path, exact = distributions[family]
    options = dict((WAYS | WITH_HEAD | WITH_EAGLE3 | WITH_DFLASH | WITH_ASSISTANT)[way])
    own = {name: path / name for name in ("head", "blocks", "assistant")}
    options["draft"] = str(options.get("draft", "ngram")).format(drafter=drafter, **own)
    assert exact.max() < 0.3, "no text is certain"
    counts: Counter = Counter()
    accepted: Counter = Counter()
    placed = {"placement": PLACEMENTS["kv-in-part"]}
    with Engine.from_pretrained(path, **OPTIONS, **placed, **options) as engine:
        for seed in range(samples):
            result = engine.generate(PROMPT, drawing(seed))
            counts[tuple(result.token_ids[:TOKENS])] += 1
            for length, count in enumerate(result.stats["acceptance"]["accepted_lengths"]):
                accepted[length] += count
    row = torch.tensor([[counts[outcome] for outcome in outcomes()]])
    assert p_value(row, exact.unsqueeze(0)) > LEAST_P
    assert min(accepted[i] for i in range(3)) > 20, "none, some and all of a draft"
