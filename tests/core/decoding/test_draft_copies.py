"""What drafts in 3 or 4 bits while exact weights stream: the text is the target's in any case."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import BLOCK, FAMILIES, PLACEMENTS, make_model, random_ids
from tiny_families import CHOOSE_KEYS

from triforce_core import Engine, SamplingParams
from triforce_kernels.weights.integers import IntegerWeight, quantise
from triforce_offload.errors import UsageError
from triforce_offload.files import cache_directory
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.weights.draft_copies import DraftCopies
from triforce_offload.weights.formats import Dense, Groups
from triforce_offload.weights.layouts import FlatLayout

PROMPT, NEW = random_ids(75), 40
GREEDY = SamplingParams(NEW, temperature=0)


def engine(path: Path, **options: object) -> Engine:
    return Engine.from_pretrained(
        path,
        **{
            "device": "cpu",
            "max_context": 120,
            "block_tokens": BLOCK,
            "budget": 32,
            "draft_tokens": 5,
            **options,
        },
    )


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """Where draft copies are kept, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_directory() / "layers"


@pytest.mark.one_in(40)
@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in CHOOSE_KEYS])
def test_the_text_is_that_of_exact_weights(tiny, family: str) -> None:
    path, _ = tiny(family)
    with engine(path, method="autoregressive") as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
        layers = len(plain.config.layers)
    for count, bits, options in (
        (3, 4, {"placement": PLACEMENTS["int4"]}),
        (3, 3, {"placement": PLACEMENTS["int4"], "copy_bits": 3}),
        (2, 4, {"placement": PLACEMENTS["int4-in-part"]}),
        (layers, 4, {"placement": PLACEMENTS["kv"], "draft_weights": "int4"}),
    ):
        if family == "gpt-oss-moe":
            # Copies of its experts as stored would be no smaller.
            options["weights"] = "dense"
        with engine(path, **options) as drafting:
            result = drafting.generate(PROMPT, GREEDY)
            line = drafting.plan_line
        assert result.token_ids == expected
        assert result.stats["levels"] == ["ngram", "retrieval", "target"]
        assert result.stats["draft_tokens"]["mean"] > 1
        assert result.stats["placement"]["copied_layers"] == count
        assert result.stats["retrieval"]["copy_bits"] == bits
        assert f"retrieval budget 32 with {count} layers in {bits} bits" in line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_draft_better_with_more_bits(tmp_path, dtype: str) -> None:
    """And those in few bits well enough to be worth their bytes."""
    path = tmp_path / "model"
    make_model("llama", path, initializer_range=0.15, hidden_size=128, intermediate_size=256)
    held = {}
    for name, weights, bits in (
        ("kv", "exact", "auto"),
        ("int4-in-part", "auto", "auto"),
        ("kv", "int4", "auto"),
        ("int4", "auto", 3),
    ):
        options = {"placement": PLACEMENTS[name], "draft_weights": weights, "draft": "none"}
        with engine(path, dtype=dtype, budget=112, copy_bits=bits, **options) as drafting:
            params = SamplingParams(NEW, temperature=1.0, seed=3)
            held[name, weights] = drafting.generate(PROMPT, params).stats["acceptance"]["target"]
    exact, *others, three = held.values()
    assert exact > 0.99
    assert all(0.4 < other < exact for other in others)
    assert 0.2 < three < min(others)


def test_copies_have_3_bits_where_those_in_4_do_not_fit(tmp_path) -> None:
    """As device memory grows: no copies, copies in 3 bits, copies in 4, and no layer streams."""
    path = tmp_path / "model"
    make_model("llama", path, num_hidden_layers=12, hidden_size=128, intermediate_size=512)
    seen, texts = [], set()
    for memory in (5_000_000, 7_500_000, 10_000_000, 14_000_000):
        with engine(path, device_memory=memory, budget=None) as drafting:
            result = drafting.generate(PROMPT, GREEDY)
        copied, cache = result.stats["placement"]["copied_layers"], result.stats["retrieval"]
        assert (copied > 0) == (cache is not None)
        seen.append(cache and cache["copy_bits"])
        texts.add(tuple(result.token_ids))
        assert result.stats["memory"]["device_peak_bytes"] <= memory
    assert len(texts) == 1
    assert seen == [None, 3, 4, None]


def test_bits_that_are_asked_for_are_those_of_the_copies(tiny) -> None:
    path, _ = tiny("llama")
    for bits in (3, 4):
        with engine(path, placement=PLACEMENTS["int4"], copy_bits=bits) as drafting:
            views = drafting.models.draft_copies.views
            found = [each for view in views.values() for each in view.values()]
            assert {each.bits for each in found if isinstance(each, IntegerWeight)} == {bits}
    for wrong, message in ((2, "2 is not one of auto, 4, 3"), (3.0, "must be auto, 4 or 3")):
        with pytest.raises(UsageError, match=f"copy_bits {message}"):
            engine(path, copy_bits=wrong)
    # Copies of all layers have 4.
    method = {"copy_bits": 3, "draft_weights": "int4", "placement": PLACEMENTS["kv"]}
    with engine(path, **method) as drafting:
        assert "3 layers in 4 bits" in drafting.plan_line


@pytest.mark.slow
def test_less_memory_than_the_weights_take_still_drafts_from_the_device(tmp_path) -> None:
    path = tmp_path / "model"
    make_model("llama", path, num_hidden_layers=12)
    layer = None
    seen, texts = [], set()
    for memory in range(900_000, 3_000_000, 100_000):
        try:
            with engine(path, device_memory=memory, budget=None) as drafting:
                result = drafting.generate(PROMPT, GREEDY)
                demand = drafting.runtime.plan.requirements
                placement = drafting.runtime.plan.placement
        except Exception as error:
            assert "device memory" in str(error)
            assert not seen
            continue
        layer = layer or demand.layer_bytes[0]
        texts.add(tuple(result.token_ids))
        drafts = "retrieval" in result.stats["levels"]
        seen.append((len(placement.streamed_layers), drafts))
        assert result.stats["memory"]["device_peak_bytes"] <= memory
        if drafts:
            assert placement.copied_layers == placement.streamed_layers
    assert len(texts) == 1
    assert any(streamed and drafts for streamed, drafts in seen)
    first = seen.index(next(each for each in seen if each[1]))
    streaming = [each for each in seen[first:] if each[0]]
    assert all(drafts for _, drafts in streaming), "once they fit they stay"
    counts = [streamed for streamed, _ in streaming]
    assert counts == sorted(counts, reverse=True)


def test_every_slice_of_a_copy_is_made_of_its_own_rows(monkeypatch) -> None:
    """A matrix is quantised some rows at a time: here 3 of 10."""
    monkeypatch.setattr("triforce_kernels.limits.DECODED_AT_ONCE", 3 * 128)
    exact = torch.randn(10, 128, generator=torch.Generator().manual_seed(1))
    layout = FlatLayout.of(
        {"matrix": Groups(10, 128, 64, torch.float32), "norm": Dense((10,), torch.float32)}
    )
    copies = DraftCopies({2: layout}, DeviceMemory(torch.device("cpu"), None))
    copies.make(2, {"matrix": exact, "norm": exact[:, 0]})
    found, expected = copies.views[2]["matrix"], quantise(exact, 64)
    assert torch.equal(found.packed, expected.packed)
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.offset, expected.offset)
    assert torch.equal(copies.views[2]["norm"], exact[:, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "alike"),
    [
        *(("llama", ()), ("qwen3_5", ()), ("deepseek_v2-moe", ("experts_down", "v_up"))),
        *(("qwen3_moe", ("experts_down",)), ("gemma4-moe", ("experts_down",))),
    ],
)
def test_copies_are_rounded_by_what_their_matrices_multiply(
    tiny, monkeypatch, kept, family: str, alike: tuple[str, ...], dtype: str
) -> None:
    """alike: matrices of whose columns all count alike"""
    path, _ = tiny(family)
    original, found = DraftCopies.make, {}

    def noting(copies: DraftCopies, layer: int, exact, inputs) -> None:
        for name, view in copies.views[layer].items():
            if isinstance(view, IntegerWeight):
                found[layer, name] = inputs(name)
        original(copies, layer, exact, inputs)

    monkeypatch.setattr(DraftCopies, "make", noting)
    with engine(path, dtype=dtype, placement=PLACEMENTS["int4"]) as drafting:
        copied = drafting.models.draft_copies.views
        assert {layer for layer, _ in found} == copied.keys()
        assert not drafting.models.draft_copies.missing
    for (_, name), sizes in found.items():
        if name in alike:
            assert sizes is None
        else:
            assert sizes is not None, name
            assert sizes.std() > 0


def test_exact_weights_alone_may_be_asked_for(tiny) -> None:
    path, _ = tiny("llama")
    options = {"placement": PLACEMENTS["int4"], "draft_weights": "exact"}
    with engine(path, budget=None, **options) as drafting:
        assert drafting.generate(PROMPT, GREEDY).stats["levels"] == ["ngram", "target"]
        assert "no retrieval level, since weights stream" in drafting.plan_line
    with pytest.raises(UsageError, match="needs all weights on the device, themselves, their"):
        engine(path, **options)
    with pytest.raises(UsageError, match="draft_weights 'int3' is not one of auto, exact, int4"):
        engine(path, draft_weights="int3")


def test_dropping_the_level_gives_its_weights_back(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, placement=PLACEMENTS["int4"]) as drafting:
        drafting.generate(PROMPT, GREEDY)
        purposes = drafting.runtime.memory.by_purpose()
        assert purposes["draft copies"] == sum(drafting.runtime.plan.requirements.copy_bytes)
        drafting._contexts.latest.levels.give_up()
        assert "draft copies" not in drafting.runtime.memory.by_purpose()
