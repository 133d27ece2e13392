"""Make a draft model of a model's first layers, its final norm and its head.

Use it where no small model with the same vocabulary exists.

    python scripts/bench make_shallow_draft MODEL DIRECTORY [--layers N] [--text FILE]

MODEL is a directory with safetensors, a .gguf file or a hub id. DIRECTORY must not exist; the
script writes an ordinary checkpoint with its tokenizer there, for `--draft`. Nothing is trained, so
the drafts are much worse than those of a small model. The script measures on a text how often they
would be accepted at several depths, and takes the depth with the highest gain. If no depth gains
anything, it writes nothing, unless you set a depth with `--layers`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import save_file

from bench.shallow_depths import Depth, best, candidates, measure
from frame import print_table
from triforce_core.decoding.draft_length import LEAST_GAIN
from triforce_core.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.hf import ARCHITECTURES
from triforce_core.model.found.names import resolve
from triforce_core.model.tensors import dense_layouts
from triforce_core.model.tokenizing.tokenizer import load_tokenizer
from triforce_offload.errors import DoesNotFitError, TriforceError, UsageError
from triforce_offload.memory.available import available_host_bytes

# The number of tokens of the text on which depths are tried.
TEXT_TOKENS = 512
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


# Families whose config `hf_config` can write.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("directory", metavar="DIRECTORY", type=Path)
    parser.add_argument("--layers", type=int, help="number of layers, without a trial")
    parser.add_argument("--text", type=Path, help="file to try depths on (Python's manual)")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    args = parser.parse_args()
    try:
        layers = args.layers
        if layers is None:
            layers = chosen_depth(args.model, args.directory, args.text)
        if layers is None:
            print(
                "make_shallow_draft: no depth makes decoding more than "
                f"{LEAST_GAIN - 1:.0%} faster, so nothing was written (--layers N insists)"
            )
            return 1
        make_shallow_draft(args.model, args.directory, layers, DTYPES[args.dtype])
    except TriforceError as error:
        print(f"make_shallow_draft: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{args.directory}: the first {layers} layers of {args.model}")
    return 0


def chosen_depth(model: str | Path, directory: Path, text: Path | None) -> int | None:
    """Try depths on a text and print them. Return the depth with the highest gain, or None.

    Raises UsageError, CheckpointError or DoesNotFitError.
    """
    path = check(model, directory, 1)
    if not path.is_dir() and find_spec("accelerate") is None:
        raise UsageError("trying depths of a .gguf file takes accelerate: pip install accelerate")
    tokens = read_text(path, text)
    with closing(open_checkpoint(path)) as checkpoint:
        depths = candidates(len(checkpoint.config.layers))
        needed = dense_layouts(checkpoint.config, torch.float32).nbytes
    if not depths:
        raise UsageError(f"{path} has one layer: there is none to leave out")
    if needed > (available := available_host_bytes()):
        raise DoesNotFitError(
            "host memory to try depths", needed, available, "--layers N makes one without a trial"
        )
    tried = measure(path, tokens, depths)
    show(tried)
    chosen = best(tried)
    return chosen and chosen.layers


def check(model: str | Path, directory: Path, layers: int) -> Path:
    """Return the model's path. Raises UsageError or CheckpointError if the draft cannot be made."""
    if directory.exists():
        raise UsageError(f"{directory} exists already")
    path = resolve(model)
    with closing(open_checkpoint(path)) as checkpoint:
        most = len(checkpoint.config.layers)
        if not 1 <= layers <= most:
            raise UsageError(f"{layers} layers of a model that has {most}")
        if checkpoint.rope_factors() is not None:
            raise UsageError(f"{path} stores its rope frequencies; use its safetensors instead")
        if (family := checkpoint.config.family) not in FAMILIES:
            raise UsageError(
                f"a draft of a {family} model cannot be made, only of {', '.join(FAMILIES)}"
            )
    return path


def read_text(path: Path, text: Path | None) -> list[int]:
    """Return the tokens of the text on which depths are tried.

    Raises UsageError or CheckpointError.
    """
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise UsageError(
            f"{path} has no tokenizer, so depths cannot be tried on a text; --layers N needs none"
        )
    try:
        words = text.read_text(encoding="utf-8") if text else "\n".join(topics.values())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {text}: {error}") from error
    tokens = tokenizer.encode(words[: 16 * TEXT_TOKENS])[:TEXT_TOKENS]
    if not words or not tokens:
        raise UsageError(f"{text} is empty")
    return tokens


def show(tried: list[Depth]) -> None:
    """Print the acceptance of each depth and its gain."""
    rows = {
        str(depth.layers): {
            "accepted at T=1": f"{depth.acceptance:.1%}",
            "at T=0": f"{depth.agreement:.1%}",
            "a token costs": f"{depth.cost:.2f} forwards",
            "draft": f"{depth.draft_tokens} tokens",
            "faster by": f"{depth.gain - 1:.0%}",
        }
        for depth in tried
    }
    print_table("layers", rows, list(rows[str(tried[0].layers)]))


def make_shallow_draft(
    model: str | Path, directory: Path, layers: int, dtype: torch.dtype = torch.float16
) -> None:
    """Write the checkpoint completely, or not at all. Raises UsageError or CheckpointError."""
    path = check(model, directory, layers)
    with closing(open_checkpoint(path)) as checkpoint:
        config = checkpoint.config
        directory.mkdir(parents=True)
        try:
            save_file(
                read_tensors(checkpoint, layers, dtype),
                directory / "model.safetensors",
                {"format": "pt"},
            )
            written = json.dumps(hf_config(config, layers, dtype), indent=2)
            (directory / "config.json").write_text(written + "\n")
            if tokenizer := load_tokenizer(path):
                tokenizer.save(directory)
        except BaseException:
            shutil.rmtree(directory)
            raise


def read_tensors(
    checkpoint: Checkpoint, layers: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors under transformers' names."""
    config = checkpoint.config
    tensors = {
        "model.embed_tokens.weight": read(checkpoint, "embedding", (config.vocab, config.hidden)),
        "model.norm.weight": read(checkpoint, "norm", (config.hidden,)),
    }
    if not config.tied:
        tensors["lm_head.weight"] = read(checkpoint, "head", (config.vocab, config.hidden))
    mixer, width = config.attention, config.layers[0].mlp.width
    sizes = (mixer.queries, mixer.keys, mixer.keys)
    parts = {
        "input_norm": {"input_layernorm.weight": config.hidden},
        "qkv": {f"self_attn.{n}_proj.weight": r for n, r in zip("qkv", sizes, strict=True)},
        "qkv_bias": {f"self_attn.{n}_proj.bias": r for n, r in zip("qkv", sizes, strict=True)},
        "q_norm": {"self_attn.q_norm.weight": mixer.head_dim},
        "k_norm": {"self_attn.k_norm.weight": mixer.head_dim},
        "o": {"self_attn.o_proj.weight": config.hidden},
        "o_bias": {"self_attn.o_proj.bias": config.hidden},
        "post_norm": {"post_attention_layernorm.weight": config.hidden},
        "gate_up": {"mlp.gate_proj.weight": width, "mlp.up_proj.weight": width},
        "down": {"mlp.down_proj.weight": config.hidden},
    }
    for layer in range(layers):
        for part, shape in config.layers[layer].shapes(config.hidden).items():
            whole = read(checkpoint, f"layers.{layer}.{part}", shape)
            rows = parts[part]
            for name, piece in zip(rows, whole.split(list(rows.values())), strict=True):
                tensors[f"model.layers.{layer}.{name}"] = piece.clone()
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape)
    checkpoint.read(name, tensor)
    return tensor


def hf_config(config: ModelConfig, layers: int, dtype: torch.dtype) -> dict:
    """Return a config.json that `config.from_hf` reads as the same model with fewer layers."""
    family = next(name for name, each in ARCHITECTURES.items() if each.name == config.family)
    return {
        "architectures": [family],
        "model_type": config.family,
        "num_hidden_layers": layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.attention.head_dim,
        "intermediate_size": config.layers[0].mlp.width,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.trained_positions,
        "rope_parameters": {
            "rope_type": config.rope.type,
            "rope_theta": config.rope.theta,
            **config.rope.parameters,
        },
        "attention_bias": config.attention.qkv_bias and config.family != "qwen2",
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": str(dtype).removeprefix("torch."),
    }
