"""SentencePiece tokenizers from GGUF files, as Gemma has them.

They are built from the file's metadata as transformers would build them, in a tenth of its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from triforce_core.model.tokenizing.gguf_tokenizer import GGUFTokenizer

# How a vocabulary spells a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_ARCHITECTURES = ("gemma2", "gemma3")
# The kind of tokenizer of files that also list the merges.
_WITH_MERGES = "gemma4"
# Characters of a token, at most.
_LONGEST = 1000


class SentencePieceTokenizer(GGUFTokenizer):
    """A tokenizer of a file for which `is_known` is true."""

    def _library(
        self, about: Mapping[str, Any], tokens: Sequence[str], added: Set[str]
    ) -> Tokenizer:
        # Files hold tokens of several spaces as such.
        spelled = (t if t.strip(" ") else t.replace(" ", _SPACE) for t in tokens)
        ids = {token: i for i, token in enumerate(spelled)}
        model = models.BPE(
            ids,
            _listed(about) or _merges(ids),
            fuse_unk=True,
            unk_token=self.names.get("unk_token"),
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return tokenizer

    def _begins_with_bos(self, about: Mapping[str, Any]) -> bool:
        return True


def is_known(metadata: Mapping[str, Any]) -> bool:
    """Whether this module supports a GGUF file's tokenizer: one whose texts begin without a space,
    and whose tokens are in the order in which they are merged.
    """
    if metadata.get("tokenizer.ggml.model") == _WITH_MERGES:
        return "tokenizer.ggml.merges" in metadata
    return (
        metadata.get("tokenizer.ggml.model") == "llama"
        and metadata.get("general.architecture") in _ARCHITECTURES
        and metadata.get("tokenizer.ggml.add_space_prefix") is False
        and "tokenizer.ggml.merges" not in metadata
    )


def _listed(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges that a file lists, as "left right". Raises ValueError."""
    pairs = [tuple(merge.split(" ")) for merge in getattr(about.get("merges"), "values", [])]
    if wrong := next((pair for pair in pairs if len(pair) != 2), None):
        raise ValueError(f"a merge of {len(wrong)} tokens")
    return pairs


def _merges(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, in the order of what they make.

    Scores are not the order: tokens of spaces and of line breaks have no score of their own. Raises
    ValueError for a token so long that its pairs could not be found in reasonable time.
    """
    if (longest := max(map(len, ids), default=0)) > _LONGEST:
        raise ValueError(f"a token of {longest} characters, which is more than {_LONGEST}")
    return [
        (token[:cut], token[cut:])
        for token in ids
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ids and token[cut:] in ids
    ]
