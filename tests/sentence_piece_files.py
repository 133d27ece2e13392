"""GGUF files with a SentencePiece tokenizer, as llama.cpp's converter writes them for Gemma 3."""

from __future__ import annotations

from pathlib import Path

import gguf
from byte_level_files import MANUAL, TEMPLATE
from gguf_files import write_gguf
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>")
# Runs of spaces and of line breaks, and a tag.
OWN = ("\n", "\n\n", "\n\n\n", "  ", "   ", "<b>")


def tokenizer_metadata(writer: gguf.GGUFWriter) -> None:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    lines = [line.replace(" ", "\u2581") for line in MANUAL[:40_000].splitlines()]
    library.train_from_iterator(lines, trainer)
    learned = sorted(library.get_vocab().items(), key=lambda item: item[1])
    words = [token for token, _ in learned if token.strip("\u2581") or len(token) == 1]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [3] * len(CONTROL) + [4] * len(OWN) + [6] * 256 + [1] * len(words)
    nothing = -1000.0
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*CONTROL, *OWN, *in_bytes, *words])
    writer.add_token_scores(
        [nothing] * (len(kinds) - len(words)) + [-float(i) for i in range(len(words))]
    )
    writer.add_token_types(kinds)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def write_sentence_piece(tiny, path: Path) -> Path:
    _, twin = tiny("gemma3")
    write_gguf(twin, path, describe=tokenizer_metadata)
    return path
