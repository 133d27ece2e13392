"""Names of the tensors of recurrent layers in checkpoints, and the order of their rows."""

from __future__ import annotations

from dataclasses import dataclass

from triforce_core.model.checkpoints.pieces import Change, Piece, minus_exp, pieces_of
from triforce_core.model.layers import DeltaNet, Recurrent, ShortConv


@dataclass(frozen=True)
class RecurrentNames:
    """Full names of the tensors of a recurrent layer; empty for those that it does not have.

    qkv: the projection of queries, keys and values, and those of gates, rates and decays; or the
        only projection
    conv, o: without "weight" or "bias"
    decay_change: turns the stored factors of decays into the model's
    """

    qkv: tuple[str, ...] = ()
    conv: str = ""
    o: str = ""
    decay: str = ""
    decay_bias: str = ""
    head_norm: str = ""
    decay_change: Change | None = None


HF_DELTA_NET = RecurrentNames(
    qkv=tuple(f"linear_attn.in_proj_{each}" for each in ("qkv", "z", "b", "a")),
    conv="linear_attn.conv1d",
    o="linear_attn.out_proj",
    decay="linear_attn.A_log",
    decay_bias="linear_attn.dt_bias",
    head_norm="linear_attn.norm.weight",
    decay_change=minus_exp,
)
GGUF_DELTA_NET = RecurrentNames(
    qkv=("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"),
    conv="ssm_conv1d",
    o="ssm_out",
    decay="ssm_a",
    decay_bias="ssm_dt.bias",
    head_norm="ssm_norm.weight",
)
HF_SHORT_CONV = RecurrentNames(("conv.in_proj",), "conv.conv", "conv.out_proj")
GGUF_SHORT_CONV = RecurrentNames(("shortconv.in_proj",), "shortconv.conv", "shortconv.out_proj")


def recurrent_pieces(
    mixer: Recurrent, hidden: int, names: RecurrentNames
) -> dict[str, list[Piece]]:
    """Return the pieces of the checkpoint that make up each tensor of a recurrent mixer."""
    if isinstance(mixer, ShortConv):
        sizes = (mixer.channels,) * 3
        parts = {}
        for suffix, ending in (("", "weight"), ("_bias", "bias")):
            named = [f"{names.qkv[0]}.{ending}"]
            parts["qkv" + suffix] = pieces_of(named, sizes, (None,) * 3)
            parts["conv" + suffix] = [Piece(f"{names.conv}.{ending}", mixer.channels)]
            parts["o" + suffix] = [Piece(f"{names.o}.{ending}", hidden)]
        return parts
    values, heads = _value_order(mixer, mixer.value_dim), _value_order(mixer, 1)
    channels = (mixer.keys, mixer.keys, mixer.values), (None, None, values)
    joint, *apart = (f"{name}.weight" for name in names.qkv)
    rest = zip(
        apart,
        (mixer.values, mixer.value_heads, mixer.value_heads),
        (values, heads, heads),
        strict=True,
    )
    return {
        "qkv": [*pieces_of([joint], *channels), *(Piece(*each) for each in rest)],
        "conv": pieces_of([f"{names.conv}.weight"], *channels),
        "decay": [Piece(names.decay, mixer.value_heads, heads, change=names.decay_change)],
        "decay_bias": [Piece(names.decay_bias, mixer.value_heads, heads)],
        "head_norm": [Piece(names.head_norm, mixer.value_dim)],
        "o": [Piece(f"{names.o}.weight", hidden)],
    }


def _value_order(mixer: DeltaNet, size: int) -> tuple[int, ...] | None:
    """Return which stored row each row of the value heads is, with `size` rows for a head. None if
    they are the same.

    GGUF files have the first value head of every key head, then the second of every one, ...
    (llama.cpp's converter); ours are side by side.
    """
    group = mixer.value_heads // mixer.key_heads
    if not mixer.tiled_output or group == 1:
        return None
    return tuple(
        (each * mixer.key_heads + key) * size + row
        for key in range(mixer.key_heads)
        for each in range(group)
        for row in range(size)
    )
