"""Seconds per token of transformers with its cache in host memory, for `triforce bench` to beat.

The same shapes with random weights and a random KV cache, decoded one token at a time over
`DynamicCache(offloading=True)`, which is what `cache_implementation="offloaded"` makes. Needs CUDA.

    python scripts/bench_offloaded_cache.py --shape llama2-7b --context 131064 [--memory 24GB]

Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from offload.machine.hardware import provenance
from offload.units import parse_bytes
from triforce_core.model.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", default="llama2-7b", help="a known model, or a config.json")
    # Its copies are rounded up to powers of two: one token over 131,072 takes twice the memory.
    parser.add_argument("--context", type=int, default=131064)
    parser.add_argument("--tokens", type=int, default=3, help="decoded after one that warms up")
    parser.add_argument("--memory", default="24GB", help="cap of the GPU's memory")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(3, "no CUDA GPU: transformers' offloaded cache needs one\n")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(args.memory) / total))
    try:
        seconds = measure(args)
        figures = {"median_seconds_per_token": statistics.median(seconds), "seconds": seconds}
    except RuntimeError as error:
        # Memory ran out, on the device or when pinning.
        figures = {"error": str(error).splitlines()[0]}
    print(
        json.dumps(
            {
                **provenance(shlex.join(["python", *sys.argv])),
                "shape": args.shape,
                "context": args.context,
                "memory": args.memory,
                **figures,
            },
            indent=2,
        )
    )


@torch.inference_mode()
def measure(args: argparse.Namespace) -> list[float]:
    """Seconds of each token."""
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
    seconds = []
    for _ in range(args.tokens + 1):
        began = time.perf_counter()
        logits = model(token, past_key_values=cache, use_cache=True).logits
        token = logits[:, -1:].argmax(-1)
        token.item()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


if __name__ == "__main__":
    main()
