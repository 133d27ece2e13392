"""Train an MTP head for SmolLM2-135M in a few minutes, and draft with it over an EMULATED link.

The head is one layer, as transformers' `MtpLayer` computes it. It begins as the model's last layer
and learns the model's own distributions over the beginning of Python's manual, for the next token
and for the one after that. Prompts come from the last fifth of the manual.

KV streams over a link so slow that a pass takes RATIO times as long as a step of the retrieval
level. Each way to draft continues the same prompts: seconds a token are medians of the prompts.

    python scripts/bench mtp_head [--minutes 10] [--directory DIR]

Writes benchmarks/results/mtp_head.json, and the model with its head to DIR if it is given.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from bench.make_shallow_draft import make_shallow_draft
from bench.material import manual, model_file
from bench.paced import stopwatch
from frame import Benchmark, Figures, Option
from triforce_core import Engine, SamplingParams
from triforce_core.model.tokenizing.tokenizer import load_tokenizer
from triforce_offload.plan.placement import Placement

KV = Placement((), True, 0, 0, 3, 2)
LAYERS = 30
SAMPLING = {"temperature": 0.6, "top_p": 0.9}
WINDOW, BATCH = 256, 2
# A pass takes this many times as long as a step of the retrieval level.
RATIO = 40
NEW_TOKENS = {"autoregressive": 6, "speculative": 48, "triforce": 200}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"method": "autoregressive"},
    "n-grams": {"method": "speculative", "draft": "ngram"},
    "MTP head": {"method": "speculative", "draft": "mtp"},
    "retrieval level alone": {"draft": "none", "budget": 1024},
    "retrieval level, n-grams": {"draft": "ngram", "budget": 1024},
    "retrieval level, MTP head": {"draft": "mtp", "budget": 1024},
}
# How the head's tensors are named in files, by transformers' names.
NAMES = {
    "eh_proj.": "mtp.fc.",
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "post_norm.": "mtp.norm.",
    "mtp_block.": "mtp.layers.0.",
}


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(args.directory or Path(folder) / "model")
        if not directory.exists():
            make_shallow_draft(model_file(), directory, LAYERS, torch.bfloat16)
            yield from train(directory, args.training_tokens, args.minutes * 60)
        yield from compare(directory, args, WAYS)


def train(directory: Path, tokens: int, seconds: float) -> Iterator[Figures]:
    """Train a head and add it to a model's files."""
    model = opened(directory)
    ids = torch.tensor(load_tokenizer(directory).encode(manual(10**7)))
    if tokens > len(ids) * 4 // 5:
        sys.exit(f"mtp_head: four fifths of the manual are fewer than {tokens} tokens")
    ids = ids[:tokens]
    states, used = states_of(model, ids), ids.unique()
    head = new_head(model)
    rows, place = model.lm_head.weight[used], torch.searchsorted(used, ids)
    figures = learn(
        head,
        len(ids) - WINDOW - 3,
        lambda windows: loss_of(model, head, ids, states, windows, rows, place),
        seconds,
    )
    tensors = {}
    for name, tensor in head.state_dict().items():
        old = next(prefix for prefix in NAMES if name.startswith(prefix))
        tensors[NAMES[old] + name.removeprefix(old)] = tensor.to(torch.bfloat16).contiguous()
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    yield {"training": {"tokens": tokens, **figures}}


def opened(directory: Path) -> torch.nn.Module:
    """Return the model of a directory in float32, which learns nothing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False
    )
    return model.eval().requires_grad_(False)


def learn(
    head: torch.nn.Module,
    starts: int,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    seconds: float,
) -> Figures:
    """Train a head. Return what it took, and the mean loss of the last steps.

    starts: number of places in the text at which a window may begin
    loss_of: returns the loss for windows, [batch, tokens] indices in the text
    """
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-4, weight_decay=0.0)
    generator, began, steps, recent = torch.Generator().manual_seed(0), time.monotonic(), 0, []
    while time.monotonic() - began < seconds:
        first = torch.randint(starts, (BATCH,), generator=generator)
        share = (time.monotonic() - began) / seconds
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * min(1.0, (steps + 1) / 50) * (1 - 0.9 * share)
        loss = loss_of(first[:, None] + torch.arange(WINDOW))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        steps += 1
        recent = [*recent[-49:], loss.item()]
    return {
        "seconds": time.monotonic() - began,
        "steps": steps,
        "tokens_seen": steps * WINDOW * BATCH,
        "loss": statistics.mean(recent),
    }


@torch.no_grad()
def states_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the model's last hidden states, [tokens, hidden], over pieces of 1,024 tokens."""
    pieces = (model.model(piece[None]).last_hidden_state[0] for piece in ids.split(1024))
    return torch.cat(list(pieces))


def new_head(model: torch.nn.Module) -> torch.nn.Module:
    """Return a head whose layer is the model's last, and which passes the state on."""
    from transformers.modeling_layers import MtpLayer

    layer, width = model.model.layers[-1], model.config.hidden_size
    torch.manual_seed(0)
    head = MtpLayer(model.config, type(layer), type(layer.input_layernorm), 0)
    head.mtp_block.load_state_dict(layer.state_dict())
    head.post_norm.load_state_dict(model.model.norm.state_dict())
    with torch.no_grad():
        head.eh_proj.weight.mul_(0.1)
        head.eh_proj.weight[:, width:] += torch.eye(width)
    return head


def loss_of(
    model: torch.nn.Module,
    head: torch.nn.Module,
    ids: torch.Tensor,
    states: torch.Tensor,
    windows: torch.Tensor,
    rows: torch.Tensor,
    place: torch.Tensor,
) -> torch.Tensor:
    """Return the cross entropy to the model's distributions, of the next token and of the one after
    it, for which the head uses its own output.

    windows: [batch, tokens] indices of the states that are given
    rows, place: rows of the output matrix of the tokens that occur, and of each token its row
    """
    previous, losses = states[windows], []
    mask = torch.full((WINDOW, WINDOW), float("-inf")).triu(1)[None, None]
    for step in (1, 2):
        embedded = model.model.embed_tokens(ids[windows + step])
        places = (torch.arange(WINDOW) + step)[None].expand(len(windows), -1)
        rotation = model.model.rotary_emb(embedded, places)
        previous = head(embedded, previous, rotation, mask, places, None)
        with torch.no_grad():
            target = (states[windows + step] @ rows.T).softmax(-1)
        losses.append(F.cross_entropy((previous @ rows.T).flatten(0, 1), target.flatten(0, 1)))
    return losses[0] + 0.5 * losses[1]


def compare(
    directory: Path, args: argparse.Namespace, every_way: dict[str, dict[str, Any]]
) -> Iterator[Figures]:
    """Continue the same prompts by each of some ways, given by the options of an engine."""
    ids = load_tokenizer(directory).encode(manual(10**7))
    held = ids[len(ids) * 4 // 5 :]
    starts = [index * (len(held) - args.tokens) // args.prompts for index in range(args.prompts)]
    prompts = [held[start : start + args.tokens] for start in starts]
    room = args.tokens + max(NEW_TOKENS.values())
    bandwidth, step = paced(directory, prompts[0], room)
    yield {
        "model": "SmolLM2-135M-Instruct, bfloat16",
        "link": "emulated",
        "link_bytes_per_second": bandwidth,
        "retrieval_step_seconds": step,
        "prompt_tokens": args.tokens,
        "prompts": args.prompts,
        "new_tokens": NEW_TOKENS,
        **SAMPLING,
    }
    plain = None
    for name, options in every_way.items():
        count = NEW_TOKENS[options.get("method", "triforce")]
        runs = []
        with engine(directory, room, link_bandwidth=bandwidth, **options) as ours:
            for seed, prompt in enumerate(prompts):
                # The way to learned lengths is not measured.
                ours.generate(prompt, SamplingParams(count // 3, **SAMPLING, seed=100 + seed))
                runs.append(ours.generate(prompt, SamplingParams(count, **SAMPLING, seed=seed)))
        stats = [run.stats for run in runs]
        seconds = statistics.median(each["seconds_per_token"] for each in stats)
        plain = plain or seconds
        acceptance = [each["acceptance"] for each in stats]
        yield {
            "ways": {
                name: {
                    "seconds_per_token": seconds,
                    "speed_up": plain / seconds,
                    "tokens_per_pass": statistics.median(each["tokens_per_pass"] for each in stats),
                    "accepted_by_target": mean(each["target"] for each in acceptance),
                    "accepted_by_retrieval_level": mean(each["retrieval"] for each in acceptance),
                    "lengths": lengths(stats),
                }
            }
        }


def mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def lengths(stats: list[dict[str, Any]]) -> Figures:
    """Return how many rounds accepted how many tokens of a draft, at both levels."""
    found = {}
    for name in ("accepted_lengths", "inner_accepted_lengths"):
        columns = itertools.zip_longest(*(each["acceptance"][name] for each in stats), fillvalue=0)
        found[name] = [sum(column) for column in columns]
    return found


def paced(directory: Path, prompt: list[int], room: int) -> tuple[float, float]:
    """Return the bandwidth with which a pass takes RATIO steps, and the seconds of a step."""
    with engine(directory, room, draft="none", budget=1024, draft_tokens=16) as ours:
        params = SamplingParams(50, **SAMPLING, seed=0)
        ours.generate(prompt, params)
        with stopwatch(ours) as watch:
            stats = ours.generate(prompt, params).stats
    step = statistics.median(watch.single_token_seconds)
    link = stats["link"]
    moved = link["floor_seconds_per_pass"] * link["bandwidth_gb_per_s"] * 1e9
    return moved / (RATIO * step), step


def engine(directory: Path, room: int, **options: Any) -> Engine:
    fixed = {"device": "cpu", "dtype": "bfloat16", "max_context": room, "weights": "dense"}
    return Engine.from_pretrained(directory, placement=KV, **fixed, **options)


OPTIONS = (
    Option("--minutes", 10.0, "minutes of training"),
    Option("--directory", "", "where the model with its head is kept, or is already"),
    Option("--training-tokens", 40_000, "tokens of the text for training"),
    Option("--prompts", 3, "number of prompts"),
    Option("--tokens", 2000, "tokens of a prompt"),
)
main = Benchmark(__doc__, "mtp_head", measure, OPTIONS)
