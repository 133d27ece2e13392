"""GGUF files with a byte-level tokenizer, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import gguf
from gguf_files import write_gguf
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from triforce_core.model.tokenizing.byte_level import _split

CONTROL = ("<|begin|>", "<|end|>", "<|said_by|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}me: {% endif %}"
)
MANUAL = "\n".join(topics.values())


def tokenizer_metadata(writer: gguf.GGUFWriter, pre: str, *, adds: bool) -> None:
    """Of merges that were learned with the splitting `pre`, as llama.cpp's converter writes it."""
    library = Library(models.BPE())
    library.pre_tokenizer = _split(pre)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, special_tokens=[CONTROL[0]]
    )
    library.train_from_iterator(MANUAL[:40_000].splitlines(), trainer)
    learned = library.get_vocab()
    tokens = [*sorted(learned, key=learned.get), *CONTROL[1:], "<think>"]
    kinds = [3 if token in CONTROL else 4 if token == "<think>" else 1 for token in tokens]
    merges = [" ".join(pair) for pair in _merges(library)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(CONTROL[0]))
    writer.add_eos_token_id(tokens.index(CONTROL[1]))
    writer.add_add_bos_token(adds)
    writer.add_chat_template(TEMPLATE)


def _merges(library: Library) -> list[list[str]]:
    return json.loads(library.to_str())["model"]["merges"]


def write_byte_level(tiny, path: Path, pre: str, *, adds: bool = False) -> Path:
    _, twin = tiny("llama")
    write_gguf(twin, path, describe=lambda writer: tokenizer_metadata(writer, pre, adds=adds))
    return path
