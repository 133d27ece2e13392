"""MTP heads: one more layer of a model, which predicts the token after the next one.

A head joins a token's embedding with the model's last hidden state at the token before. Embedding
and output matrix are the model's own (DeepSeek-V3, 2024; transformers' `MtpModel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from triforce_core.model.checkpoints.naming.pieces import Piece, stored_shapes, windowed
from triforce_core.model.config import ModelConfig
from triforce_core.model.feed_forward import Shapes
from triforce_core.model.heads.joins import Mtp, StreamsMtp
from triforce_core.model.layers import Attention, LayerSpec
from triforce_core.model.sharing.share import Pieces, Share
from triforce_kernels.weights.block_types import F8_E4M3, NVFP4, BlockType

if TYPE_CHECKING:
    from triforce_kernels.weights.linear import Weight


class HeadNames(NamedTuple):
    """How files name the tensors of a head with one layer.

    layer: with what the names of the layer's own tensors begin
    others: full names of those that layers of the model do not have, by ours
    """

    layer: str
    others: Mapping[str, str]


_JOINS = ("token_norm", "state_norm", "join", "norm")
_QWEN = HeadNames(
    "mtp.layers.0.",
    {
        "token_norm": "mtp.pre_fc_norm_embedding.weight",
        "state_norm": "mtp.pre_fc_norm_hidden.weight",
        "join": "mtp.fc.weight",
        "norm": "mtp.norm.weight",
    },
)
_MIXER = "mtp.hyper_connection_mixer."
_OF_STREAMS = HeadNames(
    "mtp.layers.0.",
    {
        "token_norm": "mtp.pre_fc_norm_embedding.weight",
        "state_norm": "mtp.pre_fc_norm_hidden.weight",
        "join_token": "mtp.fc_embedding.weight",
        "join_state": "mtp.fc_hidden.weight",
        "last_mix_norm": f"{_MIXER}hc_norm.weight",
        "last_mix_down": f"{_MIXER}input_mix_weight_down.weight",
        "last_mix_up": f"{_MIXER}input_mix_weight_up.weight",
    },
)


_GGUF_NORM = "shared_head_norm"
# Families whose published files have a head.
_PUBLISHED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm4_moe", "glm4_moe_lite")
_PUBLISHED += ("deepseek_v3", "qwen4_exp_text")


def like_head(config: ModelConfig) -> int:
    """Return the index of a layer of a model that is like its head: the last with full attention,
    since the first layers of some models have no experts.
    """
    return config.kv_layers[-1]


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Return the config of a model's MTP head: a full-attention layer like the model's own. It sees
    a window (`plan.levels.WINDOW`), in which tokens would choose all keys.
    """
    spec: LayerSpec = without_index(config).layers[like_head(config)]
    joins = StreamsMtp(config.streams) if config.streams else Mtp()
    return replace(config, layers=(replace(spec, joins=joins),))


def without_index(config: ModelConfig) -> ModelConfig:
    """Return a config whose tokens choose no keys."""
    if not config.chooses_keys:
        return config
    layers = (
        replace(spec, mixer=replace(spec.mixer, index=None))
        if isinstance(spec.mixer, Attention)
        else spec
        for spec in config.layers
    )
    return replace(config, layers=tuple(layers))


def publishes_head(config: ModelConfig) -> bool:
    """Whether published files of this family have a head."""
    return config.family in _PUBLISHED


def planned_pieces(config: ModelConfig, pieces: Pieces) -> Pieces:
    """Return the pieces of the head of a model that is quantised alike. Checkpoints in NVFP4 are
    taken to have heads in 16 bits, and those in FP8, but that of Qwen3.8-Flash-Next.

    config: of the whole model. pieces: of its matrices, or of a rank's share of them
    """
    full, dense = like_head(config), (NVFP4,) if config.streams else (NVFP4, F8_E4M3)

    def of_head(name: str) -> list[tuple[int, BlockType | None]]:
        part = name.split(".")[-1]
        found = pieces(f"layers.{full}.{'o' if part.startswith('join') else part}")
        if part == "qkv" and config.chooses_keys:
            found = _without_last(found, config.attention.index.rows)
        return [(rows, None if kind in dense else kind) for rows, kind in found]

    return of_head


def shared_pieces(pieces: Pieces, share: Share) -> Pieces:
    """Return a rank's share of the pieces of a head, which is divided as the model's own layers
    are. pieces: of the matrices of the whole head
    """
    full, divided = like_head(share.whole), _divided(mtp_config(share.whole))
    as_model = share.pieces(lambda name: pieces(f"layers.0.{name.split('.')[-1]}"))

    def of_share(name: str) -> Sequence[tuple[int, BlockType | None]]:
        part = name.split(".")[-1]
        return as_model(f"layers.{full}.{part}") if part in divided else pieces(name)

    return of_share


def _divided(config: ModelConfig) -> set[str]:
    """Return the tensors of a head that ranks divide. config: see `mtp_config`"""
    spec = config.layers[0]
    return {*spec.mixer.shapes(config.hidden), *spec.mlp.shapes(config.hidden)}


def _without_last(
    pieces: Sequence[tuple[int, BlockType | None]], rows: int
) -> list[tuple[int, BlockType | None]]:
    """Return pieces without the last ones, which have `rows` rows together."""
    kept = list(pieces)
    while rows > 0:
        rows -= kept.pop()[0]
    return kept


def head_names(names: frozenset[str], layers: int, shapes: Shapes) -> HeadNames | None:
    """Return how the head is named in files with tensors of these names; None if there is none, or
    one that is not known: with several layers, or Qwen's with an embedding of its own.

    Embedding and output matrix of a head that is named as a further layer are the model's, though
    files may have them twice.

    layers: number of layers of the model
    shapes: of the head's tensors, see `shapes_of`
    """
    block, layer, rest = f"blk.{layers}.", f"model.layers.{layers}.", ("enorm", "hnorm", "eh_proj")
    of_gguf = (f"{block}nextn.{each}.weight" for each in (*rest, _GGUF_NORM))
    llama_cpp = HeadNames(block, dict(zip(_JOINS, of_gguf, strict=True)))
    of_files = (f"{layer}{each}.weight" for each in (*rest, "shared_head.norm"))
    deepseek = HeadNames(layer, dict(zip(_JOINS, of_files, strict=True)))
    further = (
        "mtp.layers.1.input_layernorm.weight",
        "mtp.layers.1.attn_hyper_connection.hc_norm.weight",
        "mtp.embed_tokens.weight",
        f"blk.{layers + 1}.attn_norm.weight",
        f"model.layers.{layers + 1}.input_layernorm.weight",
    )
    if not names.isdisjoint(further):
        return None
    kinds = (_QWEN, _OF_STREAMS, llama_cpp, deepseek)
    known = (each for each in kinds if shapes.keys() >= each.others.keys())
    return next((each for each in known if names.issuperset(each.others.values())), None)


def layer_prefix(of_model: Callable[[str], list[Piece]], layer: int) -> str:
    """Return with what the names of the tensors of a model's layer begin in its files."""
    some = of_model(f"layers.{layer}.o")[0].name
    return some[: some.index(f".{layer}.") + len(f".{layer}.")]


def head_pieces(
    of_model: Callable[[str], list[Piece]], full: int, names: HeadNames, shapes: Shapes
) -> Callable[[str], list[Piece]]:
    """Return the pieces of each tensor of a head.

    of_model: returns the pieces of a tensor of the model, by its name
    full: index of a full-attention layer of the model, as which the head's layer is named
    shapes: of the head's tensors, see `shapes_of`
    """
    prefix = layer_prefix(of_model, full)
    (norm,) = of_model("norm")

    def pieces(name: str) -> list[Piece]:
        part = name.split(".")[-1]
        if other := names.others.get(part):
            piece = norm if part.endswith("norm") else Piece(other, 0)
            return [replace(piece, name=other, rows=shapes[part][0])]
        return [
            replace(piece, name=names.layer + piece.name.removeprefix(prefix))
            for piece in of_model(f"layers.{full}.{part}")
        ]

    return pieces


def shapes_of(config: ModelConfig) -> Shapes:
    """Return the shapes of all tensors of a head. config: see `mtp_config`"""
    return config.layers[0].shapes(config.hidden) | config.last_shapes


class Whole(Protocol):
    """The checkpoint of a model and its head."""

    config: ModelConfig

    def read_pieces(self, name: str, pieces: Sequence[Piece], into: Weight) -> None: ...

    def kinds(self, pieces: Sequence[Piece]) -> list[tuple[int, BlockType | None]]: ...


class MtpHead:
    """The MTP head of a checkpoint, as a checkpoint of its own. See `Readable`."""

    def __init__(
        self,
        whole: Whole,
        config: ModelConfig,
        pieces: Callable[[str], list[Piece]],
        kinds: Pieces | None = None,
    ) -> None:
        """config: see `mtp_config`. pieces: see `head_pieces`
        kinds: rows and block types of these pieces; None for those of whole tensors
        """
        self.config = config
        self._whole = whole
        self._pieces = pieces
        self._kinds = kinds

    def shared(self, share: Share) -> MtpHead:
        """Return a rank's share of the head, which is divided as the model's own layers are."""
        full, divided = like_head(share.whole), _divided(self.config)

        def pieces(name: str) -> list[Piece]:
            part, whole = name.split(".")[-1], self._pieces(name)
            if part not in divided:
                return whole
            return windowed(whole, share.windows(f"layers.{full}.{part}", len(whole)))

        kinds = shared_pieces(self.pieces, share)
        return MtpHead(self._whole, mtp_config(share.config), pieces, kinds)

    def pieces(self, name: str) -> Sequence[tuple[int, BlockType | None]]:
        """Readable.pieces."""
        if self._kinds is not None:
            return self._kinds(name)
        return self._whole.kinds(self._pieces(name))

    def stored_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors that files hold for the head, with their shapes."""
        for part, shape in shapes_of(self.config).items():
            yield from stored_shapes(self._pieces(part), shape)

    def tokens(self) -> None:
        """Return None: its tokens are the model's."""

    def read_layer(self, layer: int, views: Mapping[str, Weight]) -> None:
        """Read every tensor of the layer. Raises CheckpointError."""
        for part, view in views.items():
            self.read(part, view)

    def read(self, name: str, into: Weight) -> None:
        """Read `norm`, or a tensor of the layer. Raises CheckpointError."""
        self._whole.read_pieces(name, self._pieces(name), into)
