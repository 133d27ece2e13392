"""Random models with recurrent layers, latent attention or experts, beside transformers on a CPU.

All in memory.

Of each model and length of the prompt: seconds of the prefill, and of a token of plain decoding, in
float32; medians of TURNS turns, in which both run one after the other.

    python scripts/bench hybrid

Writes benchmarks/results/hybrid.json. Exits with 1 if a text of 100 tokens differs from that of an
exact model in float64 where that is certain.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from frame import Benchmark, Figures, Option
from triforce_core import Engine, SamplingParams

TURNS = 5
_SAME = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "Lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"] * 2},
    "GraniteMoeHybrid": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 4,
        "shared_intermediate_size": 768,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
    },
    # Latent attention, without experts; the sizes of a head are those of GLM-4.7-Flash.
    "Glm4MoeLite": {
        "num_key_value_heads": 4,
        "q_lora_rank": 192,
        "mlp_layer_types": ["dense"] * 8,
    },
    "Qwen3Moe": {
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    },
}
# Logits nearer to the greatest than this, in float32, may be chosen by either.
NEAR = 1e-4


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {"dtype": "float32", "threads": torch.get_num_threads(), "new_tokens": args.new_tokens}
    for name, more in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            model = made(name, more, directory)
            for tokens in args.prompts:
                yield {name: {str(tokens): compared(model, directory, tokens, args.new_tokens)}}


def made(name: str, more: dict[str, Any], directory: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = kind(kind.config_class(**_SAME | more)).eval()
    model.save_pretrained(directory)
    return model


def compared(model: torch.nn.Module, directory: str, tokens: int, count: int) -> Figures:
    generator = torch.Generator().manual_seed(tokens)
    prompt = torch.randint(_SAME["vocab_size"], (1, tokens), generator=generator)
    theirs: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    params = SamplingParams(count, temperature=0)
    settings = {"device": "cpu", "dtype": "float32", "method": "autoregressive"}
    with Engine.from_pretrained(directory, max_context=tokens + count, **settings) as engine:
        for _ in range(TURNS + 1):
            with torch.inference_mode():
                began = time.perf_counter()
                model(prompt)
                read = time.perf_counter()
                model.generate(prompt, **options)
                ended = time.perf_counter()
            theirs.append((read - began, (ended - read - (read - began)) / (count - 1)))
            result = engine.generate(prompt[0].tolist(), params, reuse=False)
            seconds = result.stats["seconds"]
            ours.append((seconds["prefill"], seconds["decode"] / (count - 1)))
    # The first turn warms up.
    rows = {}
    for place, what in enumerate(("prefill_seconds", "seconds_per_token")):
        medians = [statistics.median(turn[place] for turn in each[1:]) for each in (ours, theirs)]
        rows[what] = dict(zip(("ours", "transformers"), medians, strict=True))
        rows[what]["ratio"] = medians[0] / medians[1]
    return rows | {"holds": exact(model, prompt[0].tolist(), result.token_ids)}


@torch.no_grad()
def exact(model: torch.nn.Module, prompt: list[int], text: list[int]) -> bool:
    """Whether each token is the likeliest of a model in float64, or as good as."""
    whole = torch.tensor([[*prompt, *text]])
    exact = copy.deepcopy(model).double()
    if exact._can_set_experts_implementation():
        # The others take no float64.
        exact.set_experts_implementation("eager")
    logits = exact(whole).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, whole[0, len(prompt) :, None])[:, 0]
    return bool((logits.amax(1) - chosen <= NEAR).all())


main = Benchmark(
    __doc__,
    "hybrid",
    measure,
    (
        Option("--prompts", [100, 4000], "lengths of prompts"),
        Option("--new-tokens", 100, "tokens that are generated"),
    ),
)
