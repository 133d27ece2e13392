"""Recurrent layers after long prompts: the texts of transformers, wherever weights and KV are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import PLACEMENTS, make_model, random_ids
from oracle import LogitsRecorder, assert_equal_but_for_ties, greedy

from triforce_core import Engine
from triforce_offload.plan.placement import Placement

NEW = 24
TOKENS = (1000, 3000)
FAMILIES = ("qwen3_5", "lfm2", "granite4-h")
WHERE = {
    "kv": PLACEMENTS["kv"],
    "weights": PLACEMENTS["weights"],
    "both": PLACEMENTS["both"],
    # Each pass reads layers from the checkpoint: two recurrent ones, and one with attention.
    "files": Placement((0, 1, 2), False, 4, 2, 3, 2, file_layers=(0, 1, 2)),
}
RUNS = {
    "plain": {"method": "autoregressive"},
    "ngram": {"method": "speculative", "draft": "ngram", "draft_tokens": 6},
    "tree": {"method": "speculative", "draft": "ngram", "tree": 16, "draft_tokens": 6},
}
Made = Callable[[str, int], tuple[Path, list[int], torch.nn.Module, list[int]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made(family, tokens): a model, a prompt, and transformers' text after it, made once."""
    models: dict[str, tuple[Path, torch.nn.Module]] = {}
    texts: dict[tuple[str, int], tuple[list[int], list[int]]] = {}

    def make(family: str, tokens: int) -> tuple[Path, list[int], torch.nn.Module, list[int]]:
        if family not in models:
            folder = tmp_path_factory.mktemp(family)
            models[family] = folder, make_model(family, folder, max_position_embeddings=4096)
        folder, model = models[family]
        if (family, tokens) not in texts:
            # It repeats itself, so that n-grams are found.
            part = random_ids(tokens // 3, tokens)
            prompt = (part * 4)[:tokens]
            theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            texts[family, tokens] = prompt, theirs[0, tokens:].tolist()
        prompt, theirs = texts[family, tokens]
        return folder, prompt, model, theirs

    return make


def engine(path: Path, where: Placement, run: str) -> Engine:
    options = {"device": "cpu", "dtype": "float32", "block_tokens": 64, "max_context": 3100}
    return Engine.from_pretrained(path, placement=where, **options, **RUNS[run])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("run", RUNS)
def test_texts_after_long_prompts_equal_transformers(
    made: Made, monkeypatch: pytest.MonkeyPatch, tokens: int, family: str, where: str, run: str
) -> None:
    """A prompt of several parts, which leaves several marks; then cut to the prompt, and again.
    All logits are bitwise those of a model that is wholly on the device.
    """
    folder, prompt, model, theirs = made(family, tokens)
    recorder, logits = LogitsRecorder(monkeypatch), []
    for placement in (PLACEMENTS["resident"], WHERE[where]):
        with engine(folder, placement, run) as ours:
            assert len(ours.config.recurrent_layers) == 2
            results = [ours.generate(prompt, greedy(NEW)) for _ in range(2)]
        logits.append(recorder.take())
        for result in results:
            assert_equal_but_for_ties(model, prompt, result.token_ids, theirs)
            streams = result.stats["link"]["bytes_to_device"] > 0
            assert streams == (placement is not PLACEMENTS["resident"])
            placed = result.stats["placement"]
            assert placed["file_layers"] == len(placement.file_layers)
    assert torch.equal(*logits)
