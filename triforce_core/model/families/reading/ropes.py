"""Rope parameters of a checkpoint's header, checked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from triforce_core.model.config import ROPE_TYPES, RopeConfig
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.families.reading.windows import FULL, SLIDING
from triforce_offload.errors import CheckpointError, UnsupportedModelError


def check_rope(rope: RopeConfig, source: str, head_dim: int) -> RopeConfig:
    """Return `rope` after checking its type and parameters.

    Raises UnsupportedModelError or CheckpointError.
    """
    if rope.type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{source}: rope type {rope.type!r} is not supported (only {', '.join(ROPE_TYPES)})"
        )
    required = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
        "longrope": ("original_max_position_embeddings",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }.get(rope.type, ())
    fields = Fields(rope.parameters, f"{source}: rope of type {rope.type}")
    for name in required:
        fields.real(name)
    optional = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    for name in optional:
        if rope.parameters.get(name) is not None:
            fields.real(name)
    if rope.parameters.get("llama_4_scaling_beta"):
        fields.real("llama_4_scaling_beta")
        fields.real("original_max_position_embeddings")
    share = fields.real("partial_rotary_factor", 1.0)
    rotated = rope.rotated(head_dim)
    if share > 1 or rotated % 2 or rotated < 2:
        raise CheckpointError(
            f"{source}: partial_rotary_factor {share:g} leaves {rotated} of {head_dim} numbers of "
            "a head to rotate, which is not an even number from 2 on"
        )
    for name in ("short_factor", "long_factor") if rope.type == "longrope" else ():
        _check_factors(rope.parameters.get(name), rotated // 2, f"{fields.source}: {name}")
    return rope


def _check_factors(factors: Any, count: int, name: str) -> None:
    if (
        not isinstance(factors, list)
        or len(factors) != count
        or not all(isinstance(each, (int, float)) and each > 0 for each in factors)
    ):
        raise CheckpointError(f"{name} must be a list of {count} positive numbers")


def hf_ropes(
    raw: Mapping[str, Any], positions: int, head_dims: tuple[int, int], *, unscaled_windows: bool
) -> tuple[RopeConfig, RopeConfig | None]:
    """Parse the rotary embedding, and that of the layers with a window if they have another.

    Both are in rope_parameters (transformers 5), or rope_local_base_freq is that of the windows
    (earlier versions).

    head_dims: size of the heads of layers without a window, and with one
    unscaled_windows: whether rope_scaling is not meant for the windows
    Raises UnsupportedModelError or CheckpointError.
    """
    full, windowed = head_dims
    nested = raw.get("rope_parameters")
    local = {"rope_theta": raw.get("rope_local_base_freq")}
    if isinstance(nested, Mapping) and (FULL in nested or SLIDING in nested):
        raw = {**raw, "rope_parameters": nested.get(FULL)}
        local["rope_parameters"] = nested.get(SLIDING)
    elif unscaled_windows:
        local["rope_theta"] = raw.get("rope_theta")
    elif local["rope_theta"] is None:
        return _hf_rope(raw, positions, full), None
    return _hf_rope(raw, positions, full), _hf_rope(local, positions, windowed)


def _hf_rope(raw: Mapping[str, Any], positions: int, head_dim: int) -> RopeConfig:
    """Parse rope_parameters (transformers 5), or rope_scaling and rope_theta (earlier versions).

    Raises UnsupportedModelError or CheckpointError.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: rope scaling must be an object, got {scaling!r}")
    parameters = {
        name: value
        for name, value in scaling.items()
        if name not in ("rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved")
    }
    share = raw.get("partial_rotary_factor")
    if not share and raw.get("rotary_dim"):
        share = Fields(raw, "config.json").whole("rotary_dim") / head_dim
    share = share or 1.0
    if share != 1:
        parameters.setdefault("partial_rotary_factor", share)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = {"mrope": "default", "su": "longrope"}.get(str(kind), kind)
    if kind in ("yarn", "llama3", "longrope"):
        parameters.setdefault(
            "original_max_position_embeddings",
            raw.get("original_max_position_embeddings") or positions,
        )
    theta = Fields({"rope_theta": scaling.get("rope_theta", raw.get("rope_theta"))}, "config.json")
    rope = RopeConfig(str(kind), theta.real("rope_theta", 10000.0), MappingProxyType(parameters))
    return check_rope(rope, "config.json", head_dim)
