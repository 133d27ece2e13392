"""A tokenizer that is made of a GGUF file's metadata is the one that transformers makes of it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys

import gguf
import pytest
from byte_level_files import CONTROL, MANUAL, tokenizer_metadata, write_byte_level
from gguf_files import write_gguf
from sentence_piece_files import write_sentence_piece

from triforce_core.model.checkpoints.gguf_config import _FAMILIES
from triforce_core.model.tokenizing.byte_level import _SPLITS, _WHOLE_FIRST, _split
from triforce_core.model.tokenizing.sentence_piece import SentencePieceTokenizer
from triforce_core.model.tokenizing.tokenizer import (
    Tokenizer,
    TransformersTokenizer,
    load_tokenizer,
)
from triforce_offload.errors import CheckpointError, UsageError

TEXT = (
    MANUAL[40_000:70_000]
    + "  it's WE'LL 'Re 12345 1 22,333.4444 e\u0301 \U0001f600 日本語 \r\n\n\t   x<|end|>y"
    + " <think> \u00a0<|said_by|> <|begin|>"
)


# Splits that transformers does not take from GGUF files.
UNKNOWN_TO_OTHERS = ("refact", "glm4", "chatglm-bpe", "seed-coder", "gpt-4o", "qwen35", "laguna")
UNKNOWN_TO_OTHERS += ("minimax-m2", "command-r", "olmo", "exaone4", "deepseek-v3", "afmoe")
# What llama.cpp's converter writes for families whose files list merges.
WRITTEN = {
    **{"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "seed_oss": "seed-coder"},
    **{"smollm3": "smaug-bpe", "olmo2": "dbrx", "exaone4": "exaone4", "granite": "refact"},
    **{"glm4": "glm4", "phi3": "gpt-4o", "cohere2": "command-r", "qwen35": "qwen35"},
    **{"qwen2moe": "qwen2", "qwen3moe": "qwen2", "qwen35moe": "qwen35", "qwen3next": "qwen2"},
    "qwen4exp": "qwen35",
    **{"olmoe": "olmo", "granitemoe": "refact", "glm4moe": "glm4", "gpt-oss": "gpt-4o"},
    **{"minimax-m2": "minimax-m2", "laguna": "laguna", "afmoe": "afmoe", "granitehybrid": "dbrx"},
    **{"deepseek2": "deepseek-v3", "arcee": "llama-bpe"},
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "pixtral"),
    **dict.fromkeys(("mistral3", "mistral4"), "tekken"),
    **dict.fromkeys(("lfm2", "lfm2moe"), "lfm2"),
}
# Those of the others: pieces of SentencePiece, or a tokenizer that transformers reads.
OTHERWISE = {"gemma2", "gemma3", "gemma4", "ernie4_5", "ernie4_5-moe"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("pre", [name for name in _SPLITS if name not in UNKNOWN_TO_OTHERS])
def test_a_byte_level_tokenizer_is_that_of_transformers(
    tiny, tmp_path, pre: str, adds: bool
) -> None:
    from transformers import AutoTokenizer

    path = write_byte_level(tiny, tmp_path / "m.gguf", pre, adds=adds)
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    expected = theirs(TEXT)["input_ids"]
    assert ours.encode(TEXT) == expected
    assert (expected[0] == theirs.bos_token_id) == adds
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert all(ours.decode([t]) == theirs.decode([t], skip_special_tokens=True) for t in expected)
    messages = [{"role": "user", "content": "Hi ☕"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat("Hi ☕") == expected
    known = ours.vocabulary
    assert known.items() <= theirs.get_vocab().items()
    assert len(known) == len(set(known.values()))
    assert max(known.values()) == len(known) - 1


def test_a_sentence_piece_tokenizer_is_that_of_transformers(tiny, tmp_path) -> None:
    from transformers import AutoTokenizer

    path = write_sentence_piece(tiny, tmp_path / "m.gguf")
    ours = load_tokenizer(path)
    assert isinstance(ours._backend, SentencePieceTokenizer)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = TEXT + "<start_of_turn>user\n\n\n\n     <b>\u2581x <eos>\x07"
    expected = theirs(text)["input_ids"]
    assert ours.encode(text) == expected
    assert expected[0] == theirs.bos_token_id == ours.vocabulary["<bos>"]
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert all(ours.decode([t]) == theirs.decode([t], skip_special_tokens=True) for t in expected)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.vocabulary == theirs.get_vocab()
    messages = [{"role": "user", "content": "Hi ☕"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat("Hi ☕") == expected
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(text) == ours.encode(text)


@pytest.mark.parametrize("pre", _WHOLE_FIRST)
def test_what_llama3_wants_besides(tiny, tmp_path, pre: str) -> None:
    """Llama.cpp and the published tokenizer have these; transformers' reader of GGUF has not."""

    def describe(writer: gguf.GGUFWriter) -> None:
        tokenizer_metadata(writer, pre, adds=False)
        held = writer.kv_data[0]
        # A word that no merges lead to, a control token that is not spelled in bytes.
        held["tokenizer.ggml.tokens"].value += ["Ġqzxqzx", "<▁User▁>"]
        held["tokenizer.ggml.token_type"].value += [1, 3]
        del held["tokenizer.ggml.add_bos_token"]

    _, twin = tiny("llama")
    write_gguf(twin, tmp_path / "m.gguf", describe=describe)
    ours = load_tokenizer(tmp_path / "m.gguf")
    word, user = (ours.vocabulary[token] for token in ("Ġqzxqzx", "<▁User▁>"))
    token_ids = ours.encode(" qzxqzx<▁User▁>")
    assert token_ids[1:] == [word, user]
    assert ours.vocabulary[CONTROL[0]] == token_ids[0]
    assert ours.decode(token_ids) == " qzxqzx"


@pytest.mark.parametrize("token_id", [2**32 - 1, 10**6])
def test_a_special_token_that_is_not_there_is_none(tiny, tmp_path, token_id: int) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        tokenizer_metadata(writer, "llama-bpe", adds=True)
        writer.add_pad_token_id(token_id)
        writer.kv_data[0]["tokenizer.ggml.bos_token_id"].value = token_id

    _, twin = tiny("llama")
    write_gguf(twin, tmp_path / "m.gguf", describe=describe)
    ours = load_tokenizer(tmp_path / "m.gguf")
    assert ours.decode(ours.encode("Hello")) == "Hello"
    assert len(ours.encode("")) == 0


def test_what_is_saved_is_the_same_tokenizer(tiny, tmp_path) -> None:
    ours = load_tokenizer(write_byte_level(tiny, tmp_path / "m.gguf", "llama-bpe", adds=True))
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode(TEXT) == ours.encode(TEXT)
    assert again.chat("Hi") == ours.chat("Hi")
    assert again.vocabulary == ours.vocabulary


def test_transformers_and_torch_are_not_loaded_for_it(tiny, tmp_path) -> None:
    path = write_byte_level(tiny, tmp_path / "m.gguf", "qwen2")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from triforce_core.model.tokenizing.tokenizer import load_tokenizer\n"
        f"assert load_tokenizer(Path({str(path)!r})).encode('Hello')"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_a_template_that_does_not_take_messages_is_a_usage_error(tiny, tmp_path) -> None:
    ours = load_tokenizer(write_byte_level(tiny, tmp_path / "m.gguf", "smollm"))
    with pytest.raises(UsageError, match="does not take these messages"):
        ours.chat([{"who": "me"}, 3])


@pytest.mark.parametrize(("key", "value"), [("tokens", ["one"]), ("merges", ["alone"])])
def test_metadata_that_is_no_tokenizer_is_a_checkpoint_error(
    tiny, tmp_path, key: str, value: object
) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        tokenizer_metadata(writer, "smollm", adds=True)
        writer.kv_data[0][f"tokenizer.ggml.{key}"].value = value

    _, twin = tiny("llama")
    write_gguf(twin, tmp_path / "m.gguf", describe=describe)
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "m.gguf")


def test_a_text_is_encoded_as_a_batch_which_lets_other_threads_run(tiny, tmp_path) -> None:
    """One text alone is encoded under the interpreter's lock, and nothing else runs meanwhile."""
    tokenizer = load_tokenizer(write_byte_level(tiny, tmp_path / "m.gguf", "llama-bpe"))
    backend = tokenizer._backend
    whole, expected = backend.tokenizer, tokenizer.encode("of the 17 people")

    class Batches:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> list:
            return whole.encode_batch_fast(texts, **options)

    backend.tokenizer = Batches()
    assert tokenizer.encode("of the 17 people") == expected
    assert len(expected) > 3


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_a_models_own_code_is_never_run_nor_asked_about(
    speaking, tmp_path, monkeypatch, file: str
) -> None:
    """A piped prompt may say yes."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(speaking, folder)
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast, LlamaConfig\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
        "class OwnConfig(LlamaConfig): model_type = 'own'\n"
    )
    about = json.loads((folder / file).read_text())
    if file == "config.json":
        # A tokenizer whose class only the model's config tells.
        about |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
        (folder / "tokenizer_config.json").unlink()
    else:
        about |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / file).write_text(json.dumps(about))
    typed = io.StringIO("y\n")
    monkeypatch.setattr(sys, "stdin", typed)
    if file == "config.json":
        # The tokenizer itself needs no code.
        assert load_tokenizer(folder).encode("Hello") == load_tokenizer(speaking).encode("Hello")
    else:
        with pytest.raises(CheckpointError, match="code that comes with the model"):
            load_tokenizer(folder)
    assert typed.read() == "y\n"
    assert not ran.exists()


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("refact", ["in", " ", "1", "9", "8", "4", "!?", "\n", "we"]),
        ("pixtral", ["in", " ", "198", "4", "!?\n", "we"]),
        ("glm4", ["in", " ", "198", "4", "!?\n", "we"]),
        ("chatglm-bpe", ["in", " ", "198", "4", "!?\n", "we"]),
        ("seed-coder", ["in", " ", "1", "9", "8", "4", "!?", "\n", "we"]),
        ("command-r", ["in", " ", "1", "9", "8", "4", "!?", "\n", "we"]),
        ("qwen35", ["in", " ", "1", "9", "8", "4", "!?\n", "we"]),
        ("laguna", ["in", " ", "1", "9", "8", "4", "!?", "\n", "we"]),
        ("minimax-m2", ["in", " ", "198", "4", "!?\n", "we"]),
        ("deepseek-v3", ["in", " ", "198", "4", "!?\n", "we"]),
        ("afmoe", ["in", " ", "1", "984", "!?\n", "we"]),
    ],
)
def test_texts_are_split_as_llama_cpp_does(pre: str, pieces: list[str]) -> None:
    found = [piece for piece, _ in _split(pre).pre_tokenize_str("in 1984!?\nwe")]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in found] == pieces


def test_the_tokenizers_of_all_families_in_gguf_files_are_known() -> None:
    assert {*WRITTEN, *OTHERWISE} == set(_FAMILIES)
    assert set(WRITTEN.values()) <= set(_SPLITS)


@pytest.mark.parametrize("pre", UNKNOWN_TO_OTHERS)
def test_a_tokenizer_that_transformers_does_not_read_gives_the_text_back(
    tiny, tmp_path, pre: str
) -> None:
    tokenizer = load_tokenizer(write_byte_level(tiny, tmp_path / "m.gguf", pre))
    tokens = tokenizer.encode(MANUAL[:2000])
    assert tokenizer.decode(tokens) == MANUAL[:2000]
    assert len(tokens) < 2000


def test_qwen3_5_splits_texts_as_it_was_published() -> None:
    published = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert _SPLITS["qwen35"] == published


def test_gpt_oss_splits_texts_as_it_was_published() -> None:
    """The pattern of o200k."""
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    published = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + contraction
        + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + contraction
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert _SPLITS["gpt-4o"] == published
    pieces = [piece for piece, _ in _split("gpt-4o").pre_tokenize_str("We'll see iPhone 2024")]
    assert pieces == ["We'll", "Ġsee", "Ġi", "Phone", "Ġ", "202", "4"]


def test_tags_of_messages_in_channels_are_shown(tmp_path) -> None:
    """Those of gpt-oss are special tokens; without them parts of an answer run together."""
    from tokenizers import Tokenizer as Made
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tags = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    made = Made(WordLevel({word: i for i, word in enumerate(["hm", "so", *tags])}, unk_token="hm"))
    made.pre_tokenizer = Whitespace()
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=tags)
    tokens = theirs.convert_tokens_to_ids(["<|channel|>", "so", "<|message|>", "hm", "<|return|>"])
    for template, shown in (("<|channel|>", True), ("plain", False)):
        theirs.chat_template = template
        text = Tokenizer(TransformersTokenizer(theirs)).decode(tokens)
        assert ("<|channel|>" in text and "<|message|>" in text) == shown
        assert "<|return|>" not in text


@pytest.mark.parametrize("template", ["<|channel|>", "plain"])
def test_tags_of_messages_in_a_gguf_file_are_shown(tiny, tmp_path, template: str) -> None:
    tags = ["<|channel|>", "<|message|>", "<|return|>"]

    def describe(writer: gguf.GGUFWriter) -> None:
        tokenizer_metadata(writer, "gpt-4o", adds=False)
        held = writer.kv_data[0]
        held["tokenizer.ggml.tokens"].value += tags
        held["tokenizer.ggml.token_type"].value += [3] * len(tags)
        held["tokenizer.chat_template"].value = template

    _, twin = tiny("llama")
    write_gguf(twin, tmp_path / "m.gguf", describe=describe)
    ours = load_tokenizer(tmp_path / "m.gguf")
    text = ours.decode([ours.vocabulary[tag] for tag in tags])
    assert text == ("<|channel|><|message|>" if template != "plain" else "")
