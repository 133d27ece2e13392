"""Tiny random models of every family, their tokenizer, and placements."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from tiny_families import FAMILIES
from tiny_parts import SIZES, VOCAB

from triforce_offload.plan.placement import Placement

BLOCK = 16
T = TypeVar("T")

# Every mix of resident and streamed; more resident blocks than there are means all.
PLACEMENTS = {
    "resident": Placement((), True, 10**6, 0, 0, 0),
    "kv": Placement((), True, 0, 0, 3, 2),
    "kv-one-slot": Placement((), True, 0, 0, 1, 1),
    "kv-in-part": Placement((), True, 7, 0, 2, 1),
    "kv-reclaimed": Placement((), True, 2, 0, 2, 1, 7),
    "weights": Placement((0, 1, 2), True, 10**6, 2, 0, 0),
    "weights-one-slot": Placement((0, 2), False, 10**6, 1, 0, 0),
    "both": Placement((0, 1, 2), False, 0, 2, 3, 2),
    "both-one-slot": Placement((1, 2), False, 4, 1, 1, 1),
    "processor": Placement(
        *((0, 1, 2), False, 2, 2, 3, 2, 4), processor_layers=(0, 2), processor_kv=0.6
    ),
    "int4": Placement((0, 1, 2), False, 0, 2, 3, 2, copied_layers=(0, 1, 2)),
    "int4-in-part": Placement((1,), True, 4, 1, 2, 1, 7, copied_layers=(0, 1)),
}

# High bits of layers on the device, their low bits elsewhere: for split weights alone.
SPLIT = Placement((0, 2), False, 1, 1, 2, 1, split_layers=(0, 2))


def turns(items: Iterable[T], index: int, count: int) -> list[T]:
    """`count` of the items, others for the next index: of a grid, each row and column is met, and
    each as often as the others, where all cells would take too long.
    """
    every = list(items)
    return [every[(index * count + i) % len(every)] for i in range(count)]


def placed(placement: str | Placement, options: dict[str, object]) -> dict[str, object]:
    """Options of an engine with a placement, by its name or itself. Where weights stream and
    nothing stands in for them no budget may be asked for.
    """
    where = placement if isinstance(placement, Placement) else PLACEMENTS[placement]
    drafts = where.can_draft and options.get("weights") != "stored"
    dropped = ("budget",) if where.streamed_layers and not drafts else ()
    return {k: v for k, v in options.items() if k not in dropped} | {"placement": where}


# Names of what transformers begins with zeros, or with too little to tell tokens apart.
_OF_QWEN4 = (".ple.", "hyper_connection", ".indexer.")


def make_model(family: str, directory: Path, **overrides: object) -> torch.nn.Module:
    """A tiny random model of a family, float32, saved to `directory` and returned."""
    import transformers

    kind, options = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    made = getattr(transformers, f"{kind}ForCausalLM")
    # Configs write into what they get.
    sizes = copy.deepcopy({**SIZES, **options, **overrides})
    model = made(made.config_class(**sizes)).eval()
    if model._can_set_experts_implementation():
        # The others take no float64, in which some tests compute.
        model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        # Their norms multiply by 1 + the weights, except those of recurrent layers.
        from_zero = (
            kind in ("Gemma3", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "Qwen4Exp")
            and "linear_attn" not in name
        )
        if "norm" in name or name.endswith("bias"):
            mean = float("norm" in name and not from_zero)
            torch.nn.init.normal_(parameter, mean, 0.2)
        if name.endswith("A_log"):
            # States that remember a hundred tokens.
            torch.nn.init.normal_(parameter, -4.0, 1.0)
        if any(part in name for part in _OF_QWEN4) and "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        if name.endswith(".D"):
            torch.nn.init.normal_(parameter, 1.0, 0.5)
    for name, tensor in model.state_dict().items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            # As large as the differences between the scores of experts.
            torch.nn.init.normal_(tensor, 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, 1.0, 0.2)
    for name, parameter in model.named_parameters():
        if name.endswith(("router.scale", "per_expert_scale")):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        if name.endswith(("sinks", "proj_bias")):
            torch.nn.init.normal_(parameter, 0.0, 1.0)
    model.save_pretrained(directory)
    if kind == "GptOss":
        from mxfp4_files import to_mxfp4

        to_mxfp4(directory, model)
    return model


def add_head(directory: Path, model: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Add a random MTP head to a model's files, as its family names it. Return its tensors as Qwen
    names them.
    """
    from safetensors.torch import load_file, save_file

    held, generator = (
        load_file(directory / "model.safetensors"),
        torch.Generator().manual_seed(seed),
    )
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    streams = getattr(model.config, "hc_count", 0)
    full = "indexed_attention" if streams else "full_attention"
    layer = kinds.index(full) if len(kinds) > 1 else model.config.num_hidden_layers - 1
    width, whole = model.config.hidden_size, f"model.layers.{layer}."
    shapes = {
        name.replace(whole, "mtp.layers.0."): tensor.shape
        for name, tensor in held.items()
        if name.startswith(whole)
    }
    norms = {"pre_fc_norm_embedding": width, "pre_fc_norm_hidden": (streams or 1) * width}
    if streams:
        last = "hyper_connection_mixer."
        shapes |= {
            name.replace("model.", "mtp."): tensor.shape
            for name, tensor in held.items()
            if name.startswith(f"model.{last}")
        }
        shapes |= {f"mtp.fc_{each}.weight": (width, width) for each in ("embedding", "hidden")}
    else:
        shapes |= {"mtp.fc.weight": (width, 2 * width)}
        norms["norm"] = width
    shapes |= {f"mtp.{name}.weight": (size,) for name, size in norms.items()}
    head = {n: torch.randn(shape, generator=generator) * 0.2 for n, shape in shapes.items()}
    stored = head
    if model.config.model_type in ("glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        stored = as_further_layer(head, model.config.num_hidden_layers)
        # It has the model's own, once more.
        own = f"model.layers.{model.config.num_hidden_layers}."
        stored[f"{own}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
        stored[f"{own}shared_head.head.weight"] = held["lm_head.weight"].clone()
        about = json.loads((directory / "config.json").read_text())
        # transformers does not write it for some.
        about["num_nextn_predict_layers"] = 1
        (directory / "config.json").write_text(json.dumps(about))
    save_file(held | stored, directory / "model.safetensors", metadata={"format": "pt"})
    return head


def as_further_layer(head: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The tensors of a head as DeepSeek and GLM name them: of one more layer."""
    own = f"model.layers.{layers}."
    names = {
        "mtp.layers.0.": own,
        "mtp.fc.": f"{own}eh_proj.",
        "mtp.pre_fc_norm_embedding.": f"{own}enorm.",
        "mtp.pre_fc_norm_hidden.": f"{own}hnorm.",
        "mtp.norm.": f"{own}shared_head.norm.",
    }
    renamed = {}
    for name, tensor in head.items():
        old = next(prefix for prefix in names if name.startswith(prefix))
        renamed[names[old] + name.removeprefix(old)] = tensor
    return renamed


def full_layers(config: object) -> object:
    """What a config of transformers says of layers without a window. Layers of Gemma 4 differ."""
    if not config.model_type.startswith("gemma4"):
        return config
    return config.per_layer_config["full_attention"]


def random_ids(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<a>' if m['role'] == 'assistant' else '<u>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def add_tokenizer(directory: Path, *, chat: bool = True) -> None:
    """A tokenizer of VOCAB tokens beside a tiny model: printable ASCII, and two of a chat."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(32 + i): i for i in range(VOCAB - 3)}
    vocab |= {"<u>": VOCAB - 3, "<a>": VOCAB - 2, "<unk>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<[ua]>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE if chat else None
    fast.save_pretrained(directory)


def write_tokens_of_bytes(
    directory: Path, special: Sequence[str] = (), template: str | None = None, **config: object
) -> None:
    """A tiny model whose tokens are bytes, one that ends a text, and some special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.chat_template = template
    fast.save_pretrained(directory)
    config |= {"vocab_size": len(fast), "eos_token_id": fast.eos_token_id}
    make_model("llama", directory, **config)
