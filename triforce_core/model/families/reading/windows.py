"""Sliding windows: which layers of a model have one, and how many tokens it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.layers import LayerSpec
from triforce_core.model.parts.specs import Keeps
from triforce_offload.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def every(layer: int) -> bool:
    """Every layer has a window."""
    return True


def windows(
    fields: Fields, count: int, slides: Callable[[int], bool] = every
) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention.

    A window of W lets a token attend to itself and to the W - 1 tokens before it.

    slides: whether a layer has a window, for a config without layer_types
    Raises CheckpointError or UnsupportedModelError, which names the field.
    """
    kinds = layer_types(fields, count)
    window = fields.get("sliding_window")
    if not fields.flag("use_sliding_window", True):
        window = None
    if kinds is not None:
        sliding = [kind == SLIDING for kind in kinds]
    else:
        sliding = [window is not None and slides(layer) for layer in range(count)]
    if not any(sliding):
        return (None,) * count
    window = Fields({"sliding_window": window}, fields.source).whole("sliding_window")
    return tuple(window if each else None for each in sliding)


def windows_if_shorter(fields: Fields, count: int) -> tuple[int | None, ...]:
    """Return the windows of a family in which every layer has one, None if all positions fit in it.

    Raises CheckpointError or UnsupportedModelError, which names the field.
    """
    positions = fields.whole("max_position_embeddings")
    found = windows(fields, count)
    return tuple(None if each is None or each >= positions else each for each in found)


def layer_types(fields: Fields, count: int) -> list[str] | None:
    """Return the kind of attention of each layer, FULL or SLIDING; None if the config is silent.

    Raises CheckpointError or UnsupportedModelError.
    """
    if fields.get("layer_types") is None:
        return None
    kinds = fields.of_layers("layer_types", count)
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise UnsupportedModelError(
                f"{fields.source}: layer_types names {kind!r}, which is not supported (only {FULL} "
                f"and {SLIDING})"
            )
    return kinds


def with_own_rope(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return layers of which those with a window rotate as `ModelConfig.window_rope` says."""
    return tuple(
        replace(spec, mixer=replace(spec.mixer, window_rope=True))
        if spec.mixer.keeps is Keeps.WINDOW
        else spec
        for spec in layers
    )
