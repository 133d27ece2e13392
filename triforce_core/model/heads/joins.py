"""How heads join tokens with the hidden states of the model that they draft for.

A head is a layer that continues a model: it predicts the token after the next one from the
embedding of the next token and hidden states of the model at the token before. A DFlash drafter has
a few layers, and predicts several tokens at once. No tensors are created here; the computation is
in `heads`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from triforce_core.model.feed_forward import Shapes
from triforce_core.model.parts.specs import Streams

# Number of tokens of the text of which an assistant has keys and values, the last ones, beside the
# first.
ASSISTANT_CONTEXT = 2048
# Number of rows of the largest forward of a head that is recorded as a graph, unless it computes
# blocks. It computes logits of all its rows.
LONGEST_RECORDED_HEAD = 8


@dataclass(frozen=True)
class Tapped:
    """What a drafter takes of each row of a model's forward.

    layers: the layers whose input it takes; the number of layers stands for the output of the last
    keys: the attention layers whose keys and values it takes, before their rotation
    """

    layers: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.layers or self.keys)


NOTHING = Tapped()


class Join(ABC):
    """A kind of head, or of drafter of several layers.

    name: its name as a level
    in_words: what messages call it
    owns_ends: whether the head has an output matrix of its own; otherwise it uses the model's
    own_vocab: whether it has a vocabulary of its own
    divided: whether ranks divide it; otherwise it is whole on the first rank
    in_own_files: whether it has files of its own
    """

    name: ClassVar[str]
    in_words: ClassVar[str]
    owns_ends: ClassVar[bool]
    own_vocab: ClassVar[bool] = False
    divided: ClassVar[bool]
    in_own_files: ClassVar[bool] = True

    @property
    def block(self) -> int:
        """Number of rows that it computes at once for a draft; 0 if it drafts token by token."""
        return 0

    @property
    def copies_keys(self) -> bool:
        """Whether it attends to keys and values of the model, of which it has copies."""
        return False

    @property
    def recorded_rows(self) -> int:
        """Number of rows of its largest forward that is recorded as a graph: with padding, a block
        has up to twice its rows.
        """
        return 2 * self.block or LONGEST_RECORDED_HEAD

    @property
    def context(self) -> int | None:
        """Number of tokens of the text that it attends to; None for what draft models see."""
        return None

    @abstractmethod
    def taps(self, layers: int) -> Tapped:
        """Return what the head takes of the model's forwards. layers: number of its layers"""

    @abstractmethod
    def tapped_width(self, hidden: int) -> int:
        """Return the number of the model's numbers that the head takes for each token.

        hidden: width of the head
        """

    @abstractmethod
    def of_layer(self, shapes: Shapes, hidden: int) -> Shapes:
        """Return the shapes of the head's layer, given those of a layer of a model.

        hidden: width of the head
        """

    @abstractmethod
    def ends(self, hidden: int, vocab: int, rows: int) -> Shapes:
        """Return the shapes of the head's own tensors outside its layer.

        vocab: number of tokens of its output
        rows: number of rows of its output matrix that a rank has
        """

    def embedding(self, hidden: int) -> Shapes:
        """Return the shape of the head's own embedding; empty if it uses the model's."""
        return {}

    def on_ranks(self, count: int, vocab: int) -> Join:
        """Return the kind of head that ranks have. A head that is whole on the first rank needs an
        embedding of its own there, because ranks divide the model's.

        vocab: number of tokens of the model
        """
        return self


@dataclass(frozen=True)
class Mtp(Join):
    """The head that a model's own files bring (DeepSeek-V3, 2024; transformers' `MtpLayer`): the
    layer's input is a product with the embedding and the state, both normed.
    """

    name = "mtp"
    in_words = "MTP head"
    in_own_files = False
    owns_ends = False
    divided = True

    def taps(self, layers: int) -> Tapped:
        return Tapped((layers,))

    def tapped_width(self, hidden: int) -> int:
        return hidden

    def of_layer(self, shapes: Shapes, hidden: int) -> Shapes:
        norms = {"token_norm": (hidden,), "state_norm": (hidden,)}
        return {**norms, "join": (hidden, 2 * hidden), **shapes}

    def ends(self, hidden: int, vocab: int, rows: int) -> Shapes:
        return {"norm": (hidden,)}


@dataclass(frozen=True)
class StreamsMtp(Mtp):
    """The MTP head of a model with residual streams (Qwen4; SGLang's `qwen4_exp_mtp`): the state is
    all of a token's streams, before their mean. They are normed together and multiplied one by one;
    the product with the embedding is added to each.
    """

    streams: Streams

    def tapped_width(self, hidden: int) -> int:
        return self.streams.count * hidden

    def of_layer(self, shapes: Shapes, hidden: int) -> Shapes:
        norms = {"token_norm": (hidden,), "state_norm": (self.streams.count * hidden,)}
        return {**norms, "join_token": (hidden, hidden), "join_state": (hidden, hidden), **shapes}

    def ends(self, hidden: int, vocab: int, rows: int) -> Shapes:
        return self.streams.of_mean(hidden, "last")


@dataclass(frozen=True)
class Eagle3(Join):
    """A head of EAGLE-3 (Li et al., 2025), in files of its own: attention takes the embedding and
    the state side by side, both normed. The state is a product with the hidden states that enter
    some layers of the model.

    tapped: these layers
    width: width of the model
    embedded: number of tokens of its own embedding; None if it uses the model's
    norms_residual: whether the residual connection begins with the normed state
    norms_output: whether the state for the next pair is the output after the last norm
    tap_norms: number of norms of the hidden states before the product: none, one over all of them,
        or one for each
    """

    tapped: tuple[int, ...]
    width: int
    embedded: int | None = None
    norms_residual: bool = False
    norms_output: bool = False
    tap_norms: int = 0

    name = "eagle3"
    in_words = "EAGLE-3 head"
    owns_ends = own_vocab = True
    divided = False

    def taps(self, layers: int) -> Tapped:
        return Tapped(self.tapped)

    def tapped_width(self, hidden: int) -> int:
        return len(self.tapped) * self.width

    def of_layer(self, shapes: Shapes, hidden: int) -> Shapes:
        norms = {"token_norm": (hidden,), "state_norm": (hidden,)}
        rest = {name: shape for name, shape in shapes.items() if name != "input_norm"}
        return {**norms, **rest, "qkv": (shapes["qkv"][0], 2 * hidden)}

    def ends(self, hidden: int, vocab: int, rows: int) -> Shapes:
        width = self.tapped_width(hidden)
        own = {"norm": (hidden,), "head": (vocab, hidden), "fc": (hidden, width)}
        return own | ({"tap_norm": (width,)} if self.tap_norms else {})

    def embedding(self, hidden: int) -> Shapes:
        return {} if self.embedded is None else {"embedding": (self.embedded, hidden)}

    def on_ranks(self, count: int, vocab: int) -> Eagle3:
        return self if count == 1 or self.embedded else replace(self, embedded=vocab)


@dataclass(frozen=True)
class Convolutions:
    """Convolutions of DFlash 2 over the rows of a block, before and after attention and the MLP.
    Their weights are the sum of learned ones, by channel, and others that a product with the input
    gives, by group of channels.

    taps: number of rows that one covers, a row and those before it
    group: number of channels that share a computed weight
    """

    taps: int
    group: int

    def shapes(self, hidden: int, part: str) -> Shapes:
        """Return the shapes of the tensors around attention or the MLP; `part` is in their names.
        Those of the convolution before it come first, then those of the one after it.
        """
        base = 2 * self.taps, hidden
        return {
            f"{part}_conv": base,
            f"{part}_conv_from": (2 * self.taps * hidden // self.group, hidden),
        }


@dataclass(frozen=True)
class Selector:
    """The selector of DFlash 2: it adds a score for each pair of consecutive tokens.

    candidates: number of the likeliest tokens of a position that it scores
    rank: width of the vectors of tokens
    """

    candidates: int
    rank: int


@dataclass(frozen=True)
class DFlash(Join):
    """A drafter of DFlash (Chen et al., 2026, arXiv 2602.06036), in files of its own: layers that
    predict the tokens of a block at once, from the text's last token and mask tokens. Rows of a
    block attend to one another, and to states of the tokens before, which are products with the
    model's hidden states.

    tapped: layers of the model whose input it takes
    width: width of the model
    rows: number of rows of a block: that of the last token, and one for each token that it predicts
    mask: the mask token
    attends: number of tokens before the block that it attends to
    causal: for each layer, whether a row of a block sees the rows before it alone
    convolutions, selector: of DFlash 2, or None
    """

    tapped: tuple[int, ...]
    width: int
    rows: int
    mask: int
    attends: int
    causal: tuple[bool, ...]
    convolutions: Convolutions | None = None
    selector: Selector | None = None

    name = "dflash"
    in_words = "DFlash drafter"
    owns_ends = False
    divided = True

    @property
    def block(self) -> int:
        return self.rows

    @property
    def context(self) -> int:
        return self.attends

    def taps(self, layers: int) -> Tapped:
        return Tapped(self.tapped)

    def tapped_width(self, hidden: int) -> int:
        return len(self.tapped) * self.width

    def of_layer(self, shapes: Shapes, hidden: int) -> Shapes:
        if self.convolutions is None:
            return shapes
        parts = (self.convolutions.shapes(hidden, part) for part in ("mixer", "mlp"))
        return {**shapes, **{name: shape for part in parts for name, shape in part.items()}}

    def ends(self, hidden: int, vocab: int, rows: int) -> Shapes:
        own = {
            "norm": (hidden,),
            "state_norm": (hidden,),
            "fc": (hidden, self.tapped_width(hidden)),
        }
        if (selector := self.selector) is None:
            return own
        table = vocab, selector.rank
        return {**own, "before": table, "after": table, "gate": (selector.rank, hidden)}


@dataclass(frozen=True)
class Assistant(Join):
    """An assistant of Gemma 4 (Google, 2026; transformers' `Gemma4AssistantForCausalLM`), in files
    of its own: narrow layers that attend to keys and values of the model, and compute none. The
    first takes a product with the token's embedding and the state, both as wide as the model. The
    next state is a product with the output.

    width: width of the model
    keys: the last layer of the model without a window, and the last with one, to which layers with
        and without attend; the second only if a layer has a window
    kept: numbers of a token's keys and values in these layers of the whole model
    """

    width: int
    keys: tuple[int, ...]
    kept: int

    name = "assistant"
    in_words = "assistant"
    owns_ends = True
    divided = True

    @property
    def copies_keys(self) -> bool:
        return True

    @property
    def context(self) -> int:
        return ASSISTANT_CONTEXT

    def taps(self, layers: int) -> Tapped:
        return Tapped((layers,), self.keys)

    def tapped_width(self, hidden: int) -> int:
        return self.width + self.kept

    def of_layer(self, shapes: Shapes, hidden: int) -> Shapes:
        return shapes

    def ends(self, hidden: int, vocab: int, rows: int) -> Shapes:
        return {
            "norm": (hidden,),
            "head": (rows, hidden),
            "join": (hidden, 2 * self.width),
            "state": (self.width, hidden),
        }
