"""The systems of a comparison, by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rivals.published_policies import BY_LAYERS, CHOSEN_ONCE

MEMORY, OFFLOADED, ABLATION = "memory", "offloaded", "ablation"
GROUPS = {
    MEMORY: "everything in the device's memory",
    OFFLOADED: "in the same memory, which does not hold everything",
    ABLATION: "KV over a slow link: our engine, with what the published code does otherwise",
}
# Of the ablation's emulated link: a pass takes several times what computing it takes.
ABLATION_LINK = 100e6
ABLATION_BLOCK = 128


@dataclass(frozen=True)
class System:
    """module, options: of its adapter. own_packages: whether it lives in .venv-rivals
    lossless: whether its greedy text must be the model's in float32
    refusal: why it cannot be asked, whatever the machine
    """

    group: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    own_packages: bool = False
    lossless: bool = True
    refusal: str | None = None


def systems(
    prompt_tokens: int, new_tokens: int, assistant: str, *, is_gguf: bool
) -> dict[str, System]:
    """All there are, for texts of that length. assistant: path of a small model, or empty."""
    no_file = None if is_gguf else "it reads GGUF files, and the model is none"
    return {
        "transformers, plain": System(MEMORY, "transformers_generate"),
        "transformers, prompt lookup": System(
            MEMORY, "transformers_generate", {"prompt_lookup_num_tokens": 10}
        ),
        "transformers, assistant": System(
            MEMORY,
            "transformers_generate",
            {"assistant": assistant},
            refusal=None if assistant else "it needs a small model of this vocabulary: --assistant",
        ),
        "accelerate, plain": System(MEMORY, "accelerate_offload", {"how": "memory"}),
        "deepspeed, plain": System(MEMORY, "deepspeed_zero", {"offload": False}, own_packages=True),
        "llama.cpp, plain": System(
            MEMORY, "llama_cpp", own_packages=True, lossless=False, refusal=no_file
        ),
        "ours, autoregressive": System(
            MEMORY, "ours", {"method": "autoregressive", "in_memory": True}
        ),
        "ours, speculative": System(MEMORY, "ours", {"method": "speculative", "in_memory": True}),
        "transformers, offloaded cache": System(
            OFFLOADED, "transformers_generate", {"cache_implementation": "offloaded"}
        ),
        "accelerate, cpu_offload": System(OFFLOADED, "accelerate_offload", {"how": "cpu_offload"}),
        "accelerate, disk_offload": System(
            OFFLOADED, "accelerate_offload", {"how": "disk_offload"}
        ),
        "accelerate, device_map auto": System(OFFLOADED, "accelerate_offload", {"how": "auto"}),
        "deepspeed, ZeRO-3 offloaded": System(
            OFFLOADED, "deepspeed_zero", {"offload": True, "cache": "offloaded"}, own_packages=True
        ),
        "llama.cpp, KV on the host": System(
            OFFLOADED,
            "llama_cpp",
            {"kv_on_host": True},
            own_packages=True,
            lossless=False,
            refusal=no_file,
        ),
        "ours, autoregressive, streamed": System(OFFLOADED, "ours", {"method": "autoregressive"}),
        "ours, speculative, streamed": System(OFFLOADED, "ours", {"method": "speculative"}),
        "ours, triforce, streamed": System(OFFLOADED, "ours", {"method": "triforce"}),
        **_ablation(prompt_tokens, new_tokens),
    }


def _ablation(prompt_tokens: int, new_tokens: int) -> dict[str, System]:
    """Each row has one policy more of the published code; about a quarter of KV is resident."""
    layers_resident = 8
    text_tokens = prompt_tokens + new_tokens
    options: dict[str, Any] = {
        "budget": max(ABLATION_BLOCK, text_tokens // 8 // ABLATION_BLOCK * ABLATION_BLOCK),
        "block_tokens": ABLATION_BLOCK,
        "resident_blocks": text_tokens // ABLATION_BLOCK * layers_resident,
        "kv_slots": 3,
        "link_bandwidth": ABLATION_LINK,
        "draft_weights": "exact",
    }
    whole = 1 << (prompt_tokens.bit_length() - 1)
    rows = {"ours, KV streamed": System(ABLATION, "ours", dict(options))}
    for name, changes in (
        ("+ mean keys", {"retrieval": "mean"}),
        ("+ chosen once", {"policies": [CHOSEN_ONCE]}),
        ("+ fixed lengths", {"draft_tokens": 12, "inner_draft_tokens": 1}),
        ("+ resident by layers", {"policies": [CHOSEN_ONCE, BY_LAYERS]}),
        (
            "+ whole layers, two slots",
            {"block_tokens": whole, "resident_blocks": layers_resident, "kv_slots": 2},
        ),
    ):
        options |= changes
        rows[name] = System(ABLATION, "ours", dict(options))
    if whole < 0.9 * prompt_tokens:
        rows[name] = replace(
            rows[name],
            refusal=f"a block of a power of two holds {whole} of {prompt_tokens} tokens, and no "
            "whole layer; a prompt of little more would fit it",
        )
    return rows


def chosen(names: list[str], known: dict[str, System]) -> list[str]:
    """The systems that are meant: by name, by the beginning of one, by group, or "all".

    Raises KeyError for a name that means none.
    """
    found = []
    for name in names:
        meant = (
            [name]
            if name in known
            else [
                each
                for each, system in known.items()
                if name in (system.group, "all") or each.startswith(name)
            ]
        )
        if not meant:
            raise KeyError(name)
        found += [each for each in meant if each not in found]
    return [name for name in known if name in found]
