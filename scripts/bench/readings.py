"""Acceptance of drafts from a model whose weights and KV are rounded to fewer bits.

SmolLM2-135M as a bfloat16 checkpoint, computed in float32 by transformers, so that only the fewer
bits cause rounding. It continues parts of the Python manual at temperature 0.6, top-p 0.9. Then
each rounded model processes the same tokens, and its acceptance is the mean of sum(min(p, q)). The
project's kernels split the numbers and decode the high bits, and round to groups as draft copies
are: with errors that count by what a column multiplies when the model reads 256 random tokens. The
same is done for models whose layers are rounded to FP8, with a scale for each 128 by 128 numbers,
and to GGUF's blocks. No figure depends on the machine's speed.

    python scripts/bench readings [--tokens 2000 6000] [--stretches 3] [--new-tokens 192]
        [--formats bfloat16 FP8 Q6_K Q5_K]

Writes benchmarks/results/bench_readings.json.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.material import model_file
from bench.quantising import HIGH_BITS, by_high_bits, exact
from bench.workloads import MODEL, SAMPLING, stretches
from frame import Benchmark, Figures, Option
from triforce_core.loading.fill_copies import RANDOM_TOKENS
from triforce_kernels.kv.rounding import rounded, scale_of
from triforce_kernels.sampling.sampling import distribution
from triforce_kernels.weights.inputs import InputSizes
from triforce_kernels.weights.integers import dequantise, quantise
from triforce_kernels.weights.split_codes import base_of, high_codes, middle_bits

TEMPERATURE, TOP_P = SAMPLING.values()
# The draft length for which tokens per pass are computed.
DRAFT = 24
BFLOAT16 = "bfloat16"
# Columns that share a scale. SmolLM2's own file uses groups of 32, which would show no error.
GROUP = 64

Reading = Callable[[torch.Tensor], torch.Tensor]
# Takes a matrix, and the sizes of what its columns multiply.
LayerReading = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
KV = list[tuple[torch.Tensor, torch.Tensor]]


def high_bits(numbers: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Round to the high bits of bfloat16, with bases along `dim`."""
    bits = numbers.bfloat16().view(torch.int16)
    base = base_of(bits, dim)
    high, _ = high_codes(bits, base)
    return middle_bits(high, base.to(torch.uint8)).view(torch.bfloat16).float()


def high_bits_of_layer(matrix: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """`high_bits`; inputs: not used"""
    return high_bits(matrix)


def groups(
    matrix: torch.Tensor, inputs: torch.Tensor, *, bits: int, alike: bool = False
) -> torch.Tensor:
    """Round to few bits in groups that share a scale. alike: whether all columns count alike"""
    return dequantise(quantise(matrix, GROUP, None if alike else inputs, bits)).float()


def whole_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Round to 8 bits with a scale for each channel, as the retrieval cache on a GPU does."""
    scale = scale_of(numbers.abs().amax(2, keepdim=True))
    return rounded(numbers, scale).float() * scale


# The bits per number, and the roundings of layer matrices, the output matrix, and keys and values.
READINGS: dict[str, tuple[float, LayerReading | None, Reading | None, Reading | None]] = {
    "layers by high bits": (8, high_bits_of_layer, None, None),
    "output matrix by high bits": (8, None, high_bits, None),
    "both": (8, high_bits_of_layer, high_bits, None),
    **{
        f"layers in groups of {GROUP} of {bits} bits{how}": (
            bits + 0.5,
            partial(groups, bits=bits, alike=bool(how)),
            None,
            None,
        )
        for bits in (4, 3)
        for how in ("", ", all columns alike")
    },
    "KV by high bits": (8, None, None, lambda kv: high_bits(kv, 2)),
    "KV in whole numbers": (8, None, None, whole_numbers),
    "layers by high bits, KV in whole numbers": (8, high_bits_of_layer, None, whole_numbers),
    "layers and KV by high bits": (8, high_bits_of_layer, None, lambda kv: high_bits(kv, 2)),
}
GROUPS = [f"layers in groups of {GROUP} of {bits} bits" for bits in (4, 3)]
# The readings of each model: that of the file, and others whose layers are rounded to a format.
OF: dict[str, dict[str, tuple[float, LayerReading | None, Reading | None, Reading | None]]] = {
    BFLOAT16: READINGS,
    **{
        kind: {
            f"{kind} layers by high bits": (bits, partial(by_high_bits, kind=kind), None, None),
            **{f"{kind} {name}": READINGS[name] for name in GROUPS},
        }
        for kind, bits in HIGH_BITS.items()
    },
}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    file = model_file()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, trust_remote_code=False, gguf_file=file.name, dtype=torch.float32
    )
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    sizes = input_sizes(model)
    yield {
        "model": f"{MODEL} bfloat16, computed in float32",
        **SAMPLING,
        "draft_tokens": DRAFT,
        "new_tokens": args.new_tokens,
        "stretches": args.stretches,
    }
    for kind in args.formats:
        rounding = None if kind == BFLOAT16 else partial(exact, kind=kind)
        yield from measure_of(reader(model, sizes, rounding, None), kind, args)


def measure_of(model: torch.nn.Module, kind: str, args: argparse.Namespace) -> Iterator[Figures]:
    """Measure the readings of a model in a format."""
    sizes, readings = input_sizes(model), OF[kind]
    yield {"readings": {name: {"bits": bits} for name, (bits, *_) in readings.items()}}
    readers = {name: reader(model, sizes, *how[1:3]) for name, how in readings.items()}
    for tokens in args.tokens:
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in readings}
        for seed, prompt in enumerate(stretches(args.stretches, tokens)):
            text, kv = continued(model, torch.tensor([prompt]), args.new_tokens, seed)
            expected = distributions(model, text, kv)
            for name, (*_, of_kv) in readings.items():
                read = kv if of_kv is None else [(of_kv(k), of_kv(v)) for k, v in kv]
                held = torch.minimum(expected, distributions(readers[name], text, read)).sum(-1)
                rows[name].append((float(held.mean()), a_pass(held)))
            print(f"{kind}, {tokens} tokens, stretch {seed}: {rows}", file=sys.stderr, flush=True)
        for name, runs in rows.items():
            acceptance, passes = zip(*runs, strict=True)
            entry = {
                "acceptance": sum(acceptance) / len(runs),
                "tokens_per_pass": sum(passes) / len(runs),
                "of_each_stretch": acceptance,
            }
            yield {"readings": {name: {str(tokens): entry}}}


@torch.no_grad()
def input_sizes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the sizes of what the columns of each layer's matrix multiply, by its name."""
    sizes, hooks = InputSizes(), []
    linears = {
        name: module
        for name, module in model.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    for module in linears.values():
        hooks.append(
            module.register_forward_pre_hook(lambda made, args: sizes.add(args[0], made.weight))
        )
    coins = torch.Generator().manual_seed(0)
    model(torch.randint(model.config.vocab_size, (1, RANDOM_TOKENS), generator=coins))
    for hook in hooks:
        hook.remove()
    return {name: sizes.of(module.weight) for name, module in linears.items()}


def reader(
    model: torch.nn.Module,
    sizes: dict[str, torch.Tensor],
    of_layers: LayerReading | None,
    of_head: Reading | None,
) -> torch.nn.Module:
    """Return the model with some of its matrices rounded."""
    if of_layers is of_head is None:
        return model
    made = copy.deepcopy(model)
    for name, module in made.model.named_modules():
        if of_layers and name and isinstance(module, torch.nn.Linear):
            module.weight.data = of_layers(module.weight.data, sizes[name])
    if of_head:
        # Leave the embedding exact, which shares its matrix with the head.
        made.lm_head.weight = torch.nn.Parameter(of_head(model.lm_head.weight.data))
    return made


@torch.no_grad()
def continued(
    model: torch.nn.Module, prompt: torch.Tensor, new_tokens: int, seed: int
) -> tuple[torch.Tensor, KV]:
    """Continue a prompt. Return tokens [1, 1 + new] and KV.

    The tokens start with the last one of the prompt; the KV is that of all tokens before it.
    """
    coins, out = torch.Generator().manual_seed(seed), model(prompt, use_cache=True)
    cache, logits, tokens = out.past_key_values, out.logits[0, -1:], []
    for _ in range(new_tokens):
        tokens.append(
            int(torch.multinomial(distribution(logits, TEMPERATURE, 0, TOP_P), 1, generator=coins))
        )
        out = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
        logits = out.logits[0, -1:]
    before = prompt.shape[1] - 1
    kv = [
        (layer.keys[:, :, :before].clone(), layer.values[:, :, :before].clone())
        for layer in cache.layers
    ]
    return torch.cat((prompt[:, -1:], torch.tensor([tokens])), 1), kv


@torch.no_grad()
def distributions(model: torch.nn.Module, text: torch.Tensor, kv: KV) -> torch.Tensor:
    """Return the distributions of all tokens of the text but the first, [new, vocab]."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys.clone(), values.clone(), layer)
    out = model(text[:, :-1], past_key_values=cache, use_cache=True)
    return distribution(out.logits[0], TEMPERATURE, 0, TOP_P)


def a_pass(held: torch.Tensor) -> float:
    """Return the tokens per pass, averaged over places in the text."""
    starts = range(0, len(held) - DRAFT, 4)
    each = [1 + float(held[start : start + DRAFT].cumprod(0).sum()) for start in starts]
    return sum(each) / len(each)


main = Benchmark(
    __doc__,
    "bench_readings",
    measure,
    (
        Option("--tokens", (2000, 6000), "tokens of a prompt"),
        Option("--stretches", 3, "number of prompts of each length"),
        Option("--new-tokens", 192, "tokens that are generated after it"),
        Option("--formats", tuple(OF), "formats of the layers"),
    ),
)
