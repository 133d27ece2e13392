"""Seconds per token of transformers with its KV cache in host memory, beside `triforce bench`.

It uses the same shapes with random weights and a random KV cache, and decodes one token at a time
over `DynamicCache(offloading=True)`, the cache of `cache_implementation="offloaded"`. Needs CUDA.

    python scripts/bench offloaded_cache --shape llama2-7b --context 131064 [--memory 24GB] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from frame import Benchmark, Figures, Option, timed
from triforce_core.model.known.shapes import SHAPES
from triforce_offload.units import parse_bytes


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    if not torch.cuda.is_available():
        print("no CUDA GPU: transformers' offloaded cache needs one", file=sys.stderr)
        sys.exit(3)
    yield {"shape": args.shape, "context": args.context, "memory": args.memory}
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(args.memory) / total))
    try:
        seconds = seconds_of_tokens(args)
        yield {"median_seconds_per_token": statistics.median(seconds), "seconds": seconds}
    except RuntimeError as error:
        # Out of memory, on the device or while pinning.
        yield {"error": str(error).splitlines()[0]}


@torch.inference_mode()
def seconds_of_tokens(args: argparse.Namespace) -> list[float]:
    fields = SHAPES.get(args.shape) or json.loads(Path(args.shape).read_text("utf-8"))
    config = AutoConfig.for_model(**{**fields, "max_position_embeddings": args.context + 8})
    config.dtype = torch.float16
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config, offloading=True)
    head_dim = config.hidden_size // config.num_attention_heads
    size = (1, config.num_key_value_heads, args.context, head_dim)
    keys, values = (torch.randn(size, device="cuda") for _ in range(2))
    for layer in range(config.num_hidden_layers):
        cache.update(keys, values, layer)
    del keys, values
    token = torch.tensor([[1]], device="cuda")

    def step() -> None:
        nonlocal token
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        token.item()

    return [timed(step) for _ in range(args.tokens + 1)][1:]


main = Benchmark(
    __doc__,
    None,
    measure,
    (
        Option("--shape", "llama2-7b", "a known model, or a config.json"),
        # Copies are rounded up to powers of two: one token more than 131,072 takes twice the
        # memory.
        Option("--context", 131064, "tokens of KV"),
        Option("--tokens", 3, "tokens that are decoded after one that warms up"),
        Option("--memory", "24GB", "limit of the GPU's memory"),
    ),
)
