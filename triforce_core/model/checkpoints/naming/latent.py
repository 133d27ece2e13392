"""Names of the tensors of latent attention in checkpoints, and the order of their rows."""

from __future__ import annotations

from dataclasses import dataclass

from triforce_core.model.checkpoints.naming.pieces import Piece, head_order
from triforce_core.model.layers import LatentAttention
from triforce_offload.checkpoint.source import Corner


@dataclass(frozen=True)
class LatentNames:
    """Names of the tensors of a layer with latent attention, without "weight".

    q: the projection of queries, in models without a rank of theirs
    q_down, q_up: the two projections of queries, in models with one
    kept: the projection of what a token keeps: its value, then what is rotated
    k_up, v_up: the matrices of keys and values of each head, one head after the other
    joint: both in one tensor, in which those of keys are transposed; None for two tensors
    """

    q: str = "self_attn.q_proj"
    q_down: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kept: str = "self_attn.kv_a_proj_with_mqa"
    k_norm: str = "self_attn.kv_a_layernorm"
    k_up: str = ""
    v_up: str = ""
    joint: str | None = "self_attn.kv_b_proj"
    o: str = "self_attn.o_proj"


GGUF_LATENT = LatentNames(
    q="attn_q",
    q_down="attn_q_a",
    q_norm="attn_q_a_norm",
    q_up="attn_q_b",
    kept="attn_kv_a_mqa",
    k_norm="attn_kv_a_norm",
    k_up="attn_k_b",
    v_up="attn_v_b",
    joint=None,
    o="attn_output",
)


def latent_pieces(
    mixer: LatentAttention, hidden: int, names: LatentNames, *, interleaved: bool
) -> dict[str, list[Piece]]:
    """Return the pieces of the checkpoint that make up each tensor of latent attention.

    interleaved: see `Naming`
    """
    heads, latent, rotated = mixer.heads, mixer.latent, mixer.rope_dim
    order = head_order(rotated, rotated, interleaved=interleaved)
    of_query = order and (*range(mixer.key_dim), *(mixer.key_dim + row for row in order))
    rows = heads * (mixer.key_dim + rotated)
    first = Piece(f"{names.q}.weight", rows, of_query)
    if mixer.query_rank:
        first = Piece(f"{names.q_down}.weight", mixer.query_rank)
    kept = f"{names.kept}.weight"
    return {
        "qkv": [first, Piece(kept, latent), Piece(kept, rotated, order, Corner(latent, 0))],
        "q_norm": [Piece(f"{names.q_norm}.weight", mixer.query_rank)],
        "q_up": [Piece(f"{names.q_up}.weight", rows, of_query)],
        "k_norm": [Piece(f"{names.k_norm}.weight", latent)],
        **_up_pieces(mixer, names),
        "o": [Piece(f"{names.o}.weight", hidden)],
    }


def _up_pieces(mixer: LatentAttention, names: LatentNames) -> dict[str, list[Piece]]:
    heads, latent, keys = mixer.heads, mixer.latent, mixer.key_dim
    if names.joint is None:
        return {
            "k_up": [Piece(f"{names.k_up}.weight", heads * latent)],
            "v_up": [Piece(f"{names.v_up}.weight", heads * mixer.value_dim)],
        }
    stored, each = f"{names.joint}.weight", keys + mixer.value_dim
    whole, starts = (heads * each, latent), range(0, heads * each, each)
    values = [range(start + keys, start + each) for start in starts]
    return {
        "k_up": [
            Piece(stored, latent, corner=Corner(start, 0), transposed=True, whole=whole)
            for start in starts
        ],
        "v_up": [Piece.apart(stored, values, whole)],
    }
