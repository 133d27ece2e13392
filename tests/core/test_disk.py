"""Models larger than host memory: layers that stream are read from their files in each pass."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from gguf_files import write_gguf
from helpers import BLOCK, make_model, random_ids
from oracle import assert_own_texts

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import DoesNotFitError, LinkError
from triforce_offload.plan.placement import Placement

PROMPT, NEW = random_ids(60), 20
GREEDY = SamplingParams(NEW, temperature=0)
LAYERS = 8
ALL = tuple(range(LAYERS))
STREAMED = Placement(ALL, False, 0, 2, 3, 2)


def engine(path: Path, **options: object) -> Engine:
    return Engine.from_pretrained(
        path,
        **{
            "device": "cpu",
            "max_context": 90,
            "block_tokens": BLOCK,
            "placement": STREAMED,
            "method": "autoregressive",
            **options,
        },
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    twin = make_model("llama", path, num_hidden_layers=LAYERS, hidden_size=128)
    write_gguf(twin, path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    return path


@pytest.mark.first
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_the_text_is_the_same_with_host_memory_for_less_than_the_weights(
    model, stored: bool, slots: int
) -> None:
    path = model / "m.gguf" if stored else model
    options = {"weights": "stored" if stored else "auto"}
    options["placement"] = Placement(ALL, False, 0, slots, 3, 2)
    with engine(path, **options) as whole:
        expected = whole.generate(PROMPT, GREEDY)
        needed = whole.runtime.host.nbytes
        layer = max(whole.runtime.plan.requirements.layer_bytes)
    assert expected.stats["placement"]["file_layers"] == 0
    seen = []
    for less in (layer, 3 * layer, 5 * layer):
        with engine(path, **options, host_memory=needed - less) as part:
            result = part.generate(PROMPT, GREEDY)
            host = part.runtime.host.nbytes
            again = part.generate(PROMPT, GREEDY)
            assert " on disk" in part.plan_line
        assert result.token_ids == again.token_ids == expected.token_ids
        assert host <= needed - less
        seen.append(result.stats["placement"]["file_layers"])
        # What crosses the link is the same.
        crossed = [r.stats["link"]["bytes_to_device"] for r in (expected, result)]
        assert crossed[0] == crossed[1]
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1]


# With experts in all layers but two, with states, and with windows.
OTHERS = {
    "qwen3_moe": {"mlp_only_layers": [1, 4]},
    "qwen3_5": {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
    "gemma3": {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2},
}


@pytest.mark.parametrize("method", ["autoregressive", "speculative"])
@pytest.mark.parametrize("family", OTHERS)
def test_layers_of_other_kinds_come_from_disk_and_the_text_is_the_models(
    tmp_path, family: str, method: str
) -> None:
    twin = make_model(family, tmp_path, num_hidden_layers=LAYERS, **OTHERS[family])
    # Twice the same, so that n-grams draft, and rows are rejected.
    prompt, options = random_ids(30) * 2, {"method": method}
    with engine(tmp_path, **options) as whole:
        results = [whole.generate(prompt, GREEDY)]
        plan, layer = whole.memory_plan, max(whole.memory_plan.requirements.layer_bytes)
    seen = [results[0].stats["placement"]["file_layers"]]
    for less in (layer, 3 * layer):
        with engine(tmp_path, **options, host_memory=plan.host_bytes - less) as part:
            results += [part.generate(prompt, GREEDY), part.generate(prompt, GREEDY, reuse=False)]
        seen.append(results[-1].stats["placement"]["file_layers"])
        crossed = [each.stats["link"]["bytes_to_device"] for each in results[:1] + results[-1:]]
        assert crossed[0] == crossed[1]
    assert 0 == seen[0] < seen[1] < seen[2]
    assert_own_texts(twin, [prompt], [GREEDY], *([each] for each in results))


def test_drafts_come_from_the_device_while_layers_come_from_disk(model) -> None:
    placement = Placement(ALL, False, 0, 2, 3, 2, copied_layers=ALL)
    options = {"method": "triforce", "budget": 32, "placement": placement, "draft_tokens": 4}
    with engine(model) as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    # Made of files first, and then read from the cache.
    for _ in range(2):
        with engine(model, **options, host_memory="1500kB") as drafting:
            result = drafting.generate(PROMPT, GREEDY)
        assert result.token_ids == expected
        assert result.stats["levels"] == ["ngram", "retrieval", "target"]
        assert result.stats["placement"]["file_layers"] > 4


def test_a_file_that_changes_under_a_run_ends_it_with_an_error(tmp_path) -> None:
    make_model("llama", tmp_path, num_hidden_layers=LAYERS)
    with engine(tmp_path, host_memory="600kB") as running:
        assert running.generate(PROMPT, GREEDY).stats["placement"]["file_layers"]
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes())
        with pytest.raises(LinkError, match="changed while it was in use"):
            running.generate(random_ids(60, 5), GREEDY)


def test_a_deleted_file_is_still_there_for_who_has_it_open(tmp_path) -> None:
    make_model("llama", tmp_path, num_hidden_layers=LAYERS)
    with engine(tmp_path, host_memory="600kB") as running:
        expected = running.generate(PROMPT, GREEDY).token_ids
        (tmp_path / "model.safetensors").unlink()
        assert running.generate(PROMPT, GREEDY, reuse=False).token_ids == expected


def test_what_is_no_weight_must_fit_on_the_host(model) -> None:
    with pytest.raises(DoesNotFitError, match="host memory for 90 tokens of context"):
        engine(model, host_memory="100kB")
