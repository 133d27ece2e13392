"""Names of the tensors of recurrent layers in checkpoints, and the order of their rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from triforce_core.model.checkpoints.naming.pieces import Change, Piece, minus_exp, pieces_of
from triforce_core.model.layers import Recurrent
from triforce_core.model.parts.recurrent import DeltaNet, Mamba2, ShortConv
from triforce_offload.checkpoint.source import Corner


@dataclass(frozen=True)
class RecurrentNames:
    """Full names of the tensors of a recurrent layer; empty for those that it does not have.

    qkv: the projections, each with what it has: "q", "k" and "v" for queries, keys and values, "z",
        "b" and "a" for gates, rates and decays. In "qkv" all queries come first; in others that
        have several, all rows of a key head are side by side. Or the only projection, of Mamba-2
        that of gates, values, keys, queries and steps
    joint: the same in other files, in which they are joint; empty if there are none
    conv, o: without "weight" or "bias"
    decay_change: turns the stored factors of decays into the model's
    """

    qkv: tuple[tuple[str, str], ...] = ()
    joint: tuple[tuple[str, str], ...] = ()
    conv: str = ""
    o: str = ""
    decay: str = ""
    decay_bias: str = ""
    skip: str = ""
    head_norm: str = ""
    decay_change: Change | None = None

    def as_held(self, held: Collection[str]) -> RecurrentNames:
        """Return the names that files with tensors of these names have."""
        if any(name.endswith(f".{self.joint[0][1]}.weight") for name in held if self.joint):
            return replace(self, qkv=self.joint)
        return self


HF_DELTA_NET = RecurrentNames(
    qkv=tuple((each, f"linear_attn.in_proj_{each}") for each in ("qkv", "z", "b", "a")),
    conv="linear_attn.conv1d",
    o="linear_attn.out_proj",
    decay="linear_attn.A_log",
    decay_bias="linear_attn.dt_bias",
    head_norm="linear_attn.norm.weight",
    decay_change=minus_exp,
)
HF_QWEN3_NEXT = replace(
    HF_DELTA_NET, qkv=tuple((each, f"linear_attn.in_proj_{each}") for each in ("qkvz", "ba"))
)
GGUF_DELTA_NET = RecurrentNames(
    qkv=(("qkv", "attn_qkv"), ("z", "attn_gate"), ("b", "ssm_beta"), ("a", "ssm_alpha")),
    conv="ssm_conv1d",
    o="ssm_out",
    decay="ssm_a",
    decay_bias="ssm_dt.bias",
    head_norm="ssm_norm.weight",
)
GGUF_QWEN3_NEXT = replace(
    GGUF_DELTA_NET,
    qkv=(("qkv", "attn_qkv"), ("z", "attn_gate"), ("ba", "ssm_ba")),
    # As llama.cpp wrote the first files.
    joint=(("qkvz", "ssm_in"), ("ba", "ssm_ba")),
)


def _mamba2(prefix: str) -> RecurrentNames:
    """Return the names of a mixer whose tensors' names begin so."""
    return RecurrentNames(
        qkv=(("", f"{prefix}in_proj"),),
        conv=f"{prefix}conv1d",
        o=f"{prefix}out_proj",
        decay=f"{prefix}A_log",
        decay_bias=f"{prefix}dt_bias",
        skip=f"{prefix}D",
        head_norm=f"{prefix}norm.weight",
        decay_change=minus_exp,
    )


HF_MAMBA2, HF_MAMBA2_MIXER = _mamba2("mamba."), _mamba2("mixer.")
GGUF_MAMBA2 = RecurrentNames(
    qkv=(("", "ssm_in"),),
    conv="ssm_conv1d",
    o="ssm_out",
    decay="ssm_a",
    decay_bias="ssm_dt.bias",
    skip="ssm_d",
    head_norm="ssm_norm.weight",
)
HF_SHORT_CONV = RecurrentNames(qkv=(("", "conv.in_proj"),), conv="conv.conv", o="conv.out_proj")
GGUF_SHORT_CONV = RecurrentNames(
    qkv=(("", "shortconv.in_proj"),), conv="shortconv.conv", o="shortconv.out_proj"
)


def recurrent_pieces(
    mixer: Recurrent, hidden: int, names: RecurrentNames
) -> dict[str, list[Piece]]:
    """Return the pieces of the checkpoint that make up each tensor of a recurrent mixer."""
    if isinstance(mixer, ShortConv):
        sizes = (mixer.channels,) * 3
        parts = {}
        for suffix, ending in (("", "weight"), ("_bias", "bias")):
            named = [f"{names.qkv[0][1]}.{ending}"]
            parts["qkv" + suffix] = pieces_of(named, sizes, (None,) * 3)
            parts["conv" + suffix] = [Piece(f"{names.conv}.{ending}", mixer.channels)]
            parts["o" + suffix] = [Piece(f"{names.o}.{ending}", hidden)]
        return parts
    if isinstance(mixer, Mamba2):
        return _mamba2_pieces(mixer, hidden, names)
    decay = _of_value_heads(mixer, names.decay, 1)
    return {
        "qkv": [piece for of, name in names.qkv for piece in _projected(mixer, of, name)],
        "conv": _channels(mixer, f"{names.conv}.weight"),
        "decay": [replace(decay, change=names.decay_change)],
        "decay_bias": [_of_value_heads(mixer, names.decay_bias, 1)],
        "head_norm": [Piece(names.head_norm, mixer.value_dim)],
        "o": [Piece(f"{names.o}.weight", hidden)],
    }


def _mamba2_pieces(mixer: Mamba2, hidden: int, names: RecurrentNames) -> dict[str, list[Piece]]:
    """Return the pieces of Mamba-2, whose files have values before keys, and keys before queries.
    Of a projection gates come first and steps last.
    """
    heads = mixer.value_heads

    def channels(name: str, first: int) -> list[Piece]:
        starts = (mixer.values + mixer.keys, mixer.keys), (mixer.values, mixer.keys)
        return [
            Piece(name, rows, corner=Corner(first + start, 0))
            for start, rows in (*starts, (0, mixer.values))
        ]

    projection = f"{names.qkv[0][1]}.weight"
    steps = Piece(projection, heads, corner=Corner(mixer.values + mixer.channels, 0))
    return {
        "qkv": [*channels(projection, mixer.values), Piece(projection, mixer.values), steps],
        "conv": channels(f"{names.conv}.weight", 0),
        "conv_bias": channels(f"{names.conv}.bias", 0),
        "decay": [Piece(names.decay, heads, change=names.decay_change)],
        "decay_bias": [Piece(names.decay_bias, heads)],
        "skip": [Piece(names.skip, heads)],
        "head_norm": [Piece(names.head_norm, mixer.values)],
        "o": [Piece(f"{names.o}.weight", hidden)],
    }


def _channels(mixer: DeltaNet, name: str) -> list[Piece]:
    """Return the pieces of a tensor with all queries, then all keys and values."""
    return [
        Piece(name, mixer.keys),
        Piece(name, mixer.keys, corner=Corner(mixer.keys, 0)),
        _of_value_heads(mixer, name, mixer.value_dim, 2 * mixer.keys),
    ]


def _projected(mixer: DeltaNet, of: str, name: str) -> list[Piece]:
    """Return the pieces of a tensor with some of the projections. See RecurrentNames.qkv."""
    name = f"{name}.weight"
    if of == "qkv":
        return _channels(mixer, name)
    if len(of) == 1:
        return [_of_value_heads(mixer, name, mixer.value_dim if of == "z" else 1)]
    group = mixer.value_heads // mixer.key_heads
    # Rows of a key head.
    sizes = {"q": mixer.key_dim, "k": mixer.key_dim, "b": group, "a": group}
    sizes |= dict.fromkeys("vz", group * mixer.value_dim)
    own = [sizes[each] for each in of]
    starts = range(0, mixer.key_heads * sum(own), sum(own))
    return [
        Piece.apart(name, [range(start + first, start + last) for start in starts])
        for first, last in pairwise(accumulate(own, initial=0))
    ]


def _of_value_heads(mixer: DeltaNet, name: str, size: int, first: int = 0) -> Piece:
    """Return the piece of a tensor with `size` rows for each value head, from row `first` on.

    GGUF files have the first value head of every key head, then the second of every one, ...
    (llama.cpp's converter); ours are side by side.
    """
    whole = Piece(name, mixer.value_heads * size, corner=Corner(first, 0))
    group = mixer.value_heads // mixer.key_heads
    if not mixer.tiled_output or group == 1:
        return whole
    heads = (e * mixer.key_heads + key for key in range(mixer.key_heads) for e in range(group))
    return replace(whole, ranges=tuple(range(head * size, (head + 1) * size) for head in heads))
