"""L3: the whole engine's output law, by enumeration of every outcome of the first three tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from exact_distributions import (
    PROMPT,
    TOKENS,
    VOCAB,
    distribution_of_engine,
    drawing,
    outcomes,
    target_and_drafter,
)
from helpers import BLOCK, PLACEMENTS
from law_tests import LEAST_P, p_value
from thread_ranks import ThreadLeader

from triforce_core import Completion, Engine, SamplingParams
from triforce_core.decoding.distributions import distributions
from triforce_kernels.weights.high_bits import HighBitsWeight
from triforce_kernels.weights.integers import IntegerWeight
from triforce_offload.plan.placement import Placement

# For all ways together, as many for each. More, and at more temperatures: scripts/checks long_laws.
SAMPLES = 8_000
# How samples are made: every drafter, both rules, whatever the retrieval model
# computes with, random bytes included, all with the same exact law; on two ranks; several at once;
# and once with nothing kept from one request to the next.
STREAMED = Placement((0,), False, 1, 1, 2, 1, copied_layers=(0,))
WAYS: dict[str, dict[str, object]] = {
    "ngram": {"draft": "ngram"},
    "none": {"draft": "none"},
    "model": {"draft": "{model}"},
    "speculative": {"method": "speculative", "draft": "{model}"},
    "tree": {"method": "speculative", "draft": "{model}", "tree": 7},
    "trie": {"method": "speculative", "draft": "ngram", "tree": 7},
    "coupled tree": {
        "method": "speculative",
        "draft": "{model}",
        "tree": 7,
        "accept": "coupled",
        "sequences": 3,
    },
    "retrieval tree": {"draft": "{model}", "tree": 7},
    "retrieval tree, coupled": {"draft": "ngram", "tree": 9, "accept": "coupled"},
    "retrieval tree, ranks": {"draft": "none", "tree": 7, "gpus": 2},
    "retrieval tree, noise": {"draft": "{model}", "tree": 7, "draft_kv": "int8"},
    "coupled": {"draft": "{model}", "accept": "coupled"},
    "afresh": {"draft": "{model}"},
    "int4": {"draft": "{model}", "draft_weights": "int4"},
    "int4, no drafter": {"draft": "none", "placement": STREAMED},
    "noise": {"draft": "{model}", "placement": STREAMED},
    "noisy cache": {"draft": "{model}", "draft_kv": "int8"},
    "ranks": {"draft": "{model}", "gpus": 2},
    "together": {"draft": "{model}", "sequences": 8},
    "processor": {
        "draft": "{model}",
        "placement": Placement(
            *((0,), True, 2, 1, 2, 1), copied_layers=(0,), processor_layers=(0,), processor_kv=0.6
        ),
    },
}
Sample = tuple[Counter, Counter, Counter]


@dataclass(frozen=True)
class Job:
    directory: Path
    drafter: Path
    way: str
    temperature: float
    top_p: float
    first_seed: int
    samples: int


@contextmanager
def making_noise() -> Iterator[None]:
    """Random bytes, some of which are no numbers, in the place of every matrix in 4 bits."""

    def fill(exact: torch.Tensor, into: IntegerWeight, *_: object) -> None:
        generator = torch.Generator().manual_seed(exact.numel())
        for part in (into.packed, into.scale, into.offset):
            part.view(torch.uint8).random_(generator=generator)

    uncached = patch("triforce_core.loading.execution.Execution._copies_cache", lambda *_: None)
    with patch("triforce_offload.weights.draft_copies._quantise_into", fill), uncached:
        yield


def noisy_round(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In the place of what a retrieval cache in 8 bits is gathered and written as."""
    generator = torch.Generator().manual_seed(numbers.numel())
    return torch.randint(-127, 128, numbers.shape, generator=generator).to(torch.int8)


@contextmanager
def spoilt(way: str) -> Iterator[None]:
    """What a way does to what it drafts with."""
    with ExitStack() as stack:
        if way == "noise":
            stack.enter_context(making_noise())
        if way in ("noisy cache", "retrieval tree, noise"):
            for module in ("triforce_offload.kv.caches.rounded", "triforce_kernels.kv.rounding"):
                stack.enter_context(patch(f"{module}.rounded", noisy_round))
        yield


def sample(job: Job) -> Sample:
    """Outcomes of many requests, and how many tokens of drafts the two levels accepted."""
    options = {"placement": PLACEMENTS["kv-in-part"], "draft_tokens": 2} | WAYS[job.way]
    options["draft"] = str(options.get("draft", "auto")).format(model=job.drafter)
    counts, accepted, inner = Counter(), Counter(), Counter()
    with (
        spoilt(job.way),
        patch("triforce_core.parallel.leader.lead", ThreadLeader),
        Engine.from_pretrained(
            job.directory,
            device="cpu",
            # The retrieval cache holds 8 of 40 tokens, so drafts are often wrong.
            budget=8,
            chunk_size=4,
            inner_draft_tokens=1,
            max_context=64,
            block_tokens=BLOCK,
            **options,
        ) as engine,
    ):
        for result in results(engine, job):
            counts[tuple(result.token_ids[:TOKENS])] += 1
            for lengths, counter in (
                ("accepted_lengths", accepted),
                ("inner_accepted_lengths", inner),
            ):
                for length, count in enumerate(result.stats["acceptance"][lengths]):
                    counter[length] += count
    return counts, accepted, inner


def results(engine: Engine, job: Job) -> Iterator[Completion]:
    """As many at once as the engine has sequences."""
    last, at_once = job.first_seed + job.samples, engine.runtime.plan.requirements.sequences
    for first in range(job.first_seed, last, at_once):
        each = [
            SamplingParams(TOKENS + 1, temperature=job.temperature, top_p=job.top_p, seed=seed)
            for seed in range(first, min(first + at_once, last))
        ]
        if at_once == 1:
            yield engine.generate(PROMPT, each[0], reuse=job.way != "afresh")
        else:
            yield from engine.generate_all([PROMPT] * len(each), each)


def exact_law(model: torch.nn.Module, temperature: float, top_p: float) -> torch.Tensor:
    """Probabilities of all outcomes, in the order of itertools.product, by transformers' model."""
    each_outcome = list(outcomes())
    texts = torch.tensor([[*PROMPT, *outcome] for outcome in each_outcome])
    with torch.no_grad():
        logits = model(texts).logits[:, len(PROMPT) - 1 : -1]
    each = distributions(
        logits.reshape(-1, VOCAB), SamplingParams(temperature=temperature, top_p=top_p)
    )
    each = each.view(len(each_outcome), TOKENS, VOCAB).double()
    chosen = torch.tensor(each_outcome).unsqueeze(-1)
    return each.gather(-1, chosen).squeeze(-1).prod(-1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.nn.Module]:
    return target_and_drafter(tmp_path_factory.mktemp("models"))


def measure(
    target: Path,
    drafter: Path,
    model: torch.nn.Module,
    temperature: float,
    top_p: float,
    samples: int,
    map_jobs: Callable[[Callable[[Job], Sample], list[Job]], Iterable[Sample]] = map,
) -> tuple[dict[str, Sample], dict[str, float]]:
    """What `sample` gave for every way, and the p-values of each way and of all together."""
    each = -(-samples // len(WAYS))
    jobs = [
        Job(target, drafter, way, temperature, top_p, i * each, each) for i, way in enumerate(WAYS)
    ]
    results = dict(zip(WAYS, map_jobs(sample, jobs), strict=True))
    exact = exact_law(model, temperature, top_p).unsqueeze(0)
    counts = {
        way: torch.tensor([[drawn[o] for o in outcomes()]])
        for way, (drawn, _, _) in results.items()
    }
    counts["all"] = sum(counts.values())
    assert int(counts["all"].sum()) == each * len(WAYS)
    return results, {way: p_value(row, exact) for way, row in counts.items()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("temperature", "top_p", "samples"),
    [
        (1.0, 1.0, SAMPLES // 10),
        pytest.param(0.6, 0.9, SAMPLES, marks=pytest.mark.slow),
    ],
)
def test_three_tokens_have_the_exact_law(
    models, temperature: float, top_p: float, samples: int
) -> None:
    """All ways together, and each of them."""
    results, p_values = measure(*models, temperature, top_p, samples)
    assert min(p_values.values()) > LEAST_P, p_values
    if samples < SAMPLES:
        return
    # None, some and all of a draft accepted, and both at the level below it.
    for way in ("none", "model", "ranks", "tree", "retrieval tree"):
        _, accepted, inner = results[way]
        assert min(accepted[i] for i in range(3)) > 20, way
        assert way in ("none", "tree") or min(inner[i] for i in range(2)) > 20, way
    # Noise is noise, whatever an earlier way kept on disk.
    assert results["noise"][2] != results["int4"][2]
    whole = {way: results[way][1][2] for way in ("model", "noisy cache")}
    assert whole["noisy cache"] < whole["model"] / 2, "few drafts of noise hold whole"


# Weights split, of bfloat16: read by their high bits to draft, while the low bits stream,
# and with noise for what is read.
BY_SPLIT: dict[str, dict[str, object]] = {
    "high": {"placement": PLACEMENTS["kv-in-part"]},
    "halved": {"placement": Placement((0,), False, 1, 1, 2, 1, split_layers=(0,))},
    "noise": {"placement": PLACEMENTS["kv-in-part"]},
    "kv": {"placement": PLACEMENTS["kv-in-part"], "kv": "split"},
}


def noisy_product(x: torch.Tensor, weight: HighBitsWeight) -> torch.Tensor:
    generator = torch.Generator().manual_seed(weight.high.numel())
    return torch.randn(x.shape[0], weight.shape[0], generator=generator).to(x.dtype)


@pytest.mark.parametrize(
    ("way", "samples"),
    [
        ("halved", SAMPLES // 16),
        *(pytest.param(way, SAMPLES // 4, marks=pytest.mark.slow) for way in BY_SPLIT),
    ],
)
def test_three_tokens_have_the_exact_law_whatever_bits_are_read(
    models, way: str, samples: int
) -> None:
    options = {"device": "cpu", "dtype": "bfloat16", "max_context": 64, "block_tokens": BLOCK}
    drafting = {"budget": 8, "chunk_size": 4, "draft_tokens": 2, "draft": "none"}
    with Engine.from_pretrained(models[0], method="autoregressive", **options) as plain:
        exact = distribution_of_engine(plain)
    counts: Counter = Counter()
    accepted: Counter = Counter()
    patched = patch("triforce_kernels.weights.high_bits.high_bits_matmul", noisy_product)
    drafting |= BY_SPLIT[way] | {"weights": "split", "draft_weights": "split"}
    with (
        patched if way == "noise" else nullcontext(),
        Engine.from_pretrained(models[0], **options, **drafting) as engine,
    ):
        for seed in range(samples):
            result = engine.generate(PROMPT, drawing(seed))
            assert result.stats["retrieval"]["reads_high_bits"]
            counts[tuple(result.token_ids[:TOKENS])] += 1
            for length, count in enumerate(result.stats["acceptance"]["accepted_lengths"]):
                accepted[length] += count
    row = torch.tensor([[counts[o] for o in outcomes()]])
    assert p_value(row, exact.unsqueeze(0)) > LEAST_P
    assert min(accepted[i] for i in range(3)) > 20
