"""The systems of a comparison, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """

    group: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    own_packages: bool = False
    lossless: bool = True


def systems(prompt_tokens: int, new_tokens: int, assistant: str) -> dict[str, System]:
    """All there are, for texts of that length. assistant: path of a small model, or empty."""
    return {
        "transformers": System(MEMORY, "transformers_generate"),
        "transformers, prompt lookup": System(
            MEMORY, "transformers_generate", {"prompt_lookup_num_tokens": 10}
        ),
        "transformers, assistant": System(
            MEMORY, "transformers_generate", {"assistant": assistant}
        ),
        "accelerate": System(MEMORY, "accelerate_offload", {"how": "memory"}),
        "deepspeed": System(MEMORY, "deepspeed_zero", {"offload": False}, own_packages=True),
        "llama.cpp": System(MEMORY, "llama_cpp", lossless=False),
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
            OFFLOADED, "llama_cpp", {"kv_on_host": True}, lossless=False
        ),
        "ours, autoregressive, streamed": System(OFFLOADED, "ours", {"method": "autoregressive"}),
        "ours, speculative, streamed": System(OFFLOADED, "ours", {"method": "speculative"}),
        "ours, triforce, streamed": System(OFFLOADED, "ours", {"method": "triforce"}),
        **_ablation(prompt_tokens + new_tokens),
    }


def _ablation(text_tokens: int) -> dict[str, System]:
    """Each row has one policy more of the published code; a quarter of KV is resident."""
    per_layer = text_tokens // ABLATION_BLOCK
    options: dict[str, Any] = {
        "budget": max(128, text_tokens // 8 // 128 * 128),
        "block_tokens": ABLATION_BLOCK,
        "resident_blocks": per_layer * 8,
        "kv_slots": 3,
        "link_bandwidth": ABLATION_LINK,
        "draft_weights": "exact",
    }
    rows = {"ours, KV streamed": dict(options)}
    for name, changes in (
        ("+ mean keys", {"retrieval": "mean"}),
        ("+ chosen once", {"policies": [CHOSEN_ONCE]}),
        ("+ fixed lengths", {"draft_tokens": 12, "inner_draft_tokens": 1}),
        ("+ resident by layers", {"policies": [CHOSEN_ONCE, BY_LAYERS]}),
        ("+ whole layers, two slots", _whole_layers(text_tokens)),
    ):
        options |= changes
        rows[name] = dict(options)
    return {name: System(ABLATION, "ours", row) for name, row in rows.items()}


def _whole_layers(text_tokens: int) -> dict[str, Any]:
    """One block that holds most of a layer. Its rest lies in the tail, on the device."""
    block = 1 << (text_tokens.bit_length() - 1)
    return {"block_tokens": block, "resident_blocks": 8, "kv_slots": 2}


def chosen(names: list[str], known: dict[str, System]) -> list[str]:
    """The systems that are meant: by name, by the beginning of one, by group, or "all".

    Raises KeyError for a name that means none.
    """
    found = []
    for name in names:
        meant = [
            each
            for each, system in known.items()
            if name in (each, system.group, "all") or each.startswith(name)
        ]
        if not meant:
            raise KeyError(name)
        found += [each for each in meant if each not in found]
    return [name for name in known if name in found]
