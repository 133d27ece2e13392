"""The model and the prompts of the benchmarks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from bench.material import manual, model_file
from triforce_core import Engine, SamplingParams
from triforce_core.model.tokenizing.tokenizer import Tokenizer, load_tokenizer

# The model of every record; the dtype follows this text.
MODEL = "SmolLM2-135M-Instruct.Q4_1 as"
TASKS = ("continuation", "question", "code", "fact")
# Each fact occurs once in a document, and a question at the end asks for it.
FACTS = (
    ("the password of the lighthouse keeper", "amber-seven-kestrel"),
    ("the number of the locker at the station", "four-nine-two-eight-six-one"),
    ("the name of the captain's third ship", "Margarete of Warnemünde"),
    ("the address of the old observatory", "17 Quarry Lane, Upper Tollgate"),
)
_ASKS = "How does the with statement use a context manager? Answer in a few sentences."
# The sampling of texts, also written to records.
SAMPLING = {"temperature": 0.6, "top_p": 0.9}


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(model_file())


def engine(max_context: int, **options: Any) -> Engine:
    """Return SmolLM2-135M on the CPU. options: engine options, such as an emulated link

    Weights are dense unless options say otherwise: records describe the model as "as float32".
    """
    options = {"device": "cpu", "weights": "dense", "max_context": max_context} | options
    return Engine.from_pretrained(model_file(), tokenizer=tokenizer(), **options)


def stretches(count: int, tokens: int) -> list[list[int]]:
    """Return `count` parts of the manual that do not overlap, of `tokens` token ids each."""
    characters = 5 * tokens
    texts = [tokenizer().encode(manual(characters, i * characters)) for i in range(count)]
    if min(map(len, texts)) < tokens:
        sys.exit(f"the manual does not hold {count} stretches of {tokens} tokens")
    return [token_ids[:tokens] for token_ids in texts]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0)


def generate_fully(engine: Engine, ids: list[int], new_tokens: int, seed: int) -> dict[str, Any]:
    """Return the statistics of a text with all its tokens, for the first seed from `seed` that
    gives one.

    A text that ends early does not fill its last passes.
    """
    while True:
        params = SamplingParams(new_tokens, **SAMPLING, seed=seed)
        stats = engine.generate(ids, params, reuse=False).stats
        if stats["finish_reason"] == "length":
            return stats
        seed += 1000


def prompt(task: str, tokenizer: Tokenizer, tokens: int, fact: int = 0) -> list[int]:
    """Return the token ids of a prompt for a task. fact: the index of its fact in FACTS

    continuation: a part of the Python manual
    code: a part of CPython's library
    question: a question about a long part of the manual
    fact: a question about one sentence far back in the manual
    """
    if task in ("continuation", "code"):
        text = manual(8 * tokens) if task == "continuation" else _code()
        return _cut(tokenizer.encode(text), tokens)
    what, answer = FACTS[fact]
    asked = _ASKS if task == "question" else f"What is {what}? Answer with it alone."

    def with_document(characters: int) -> list[int]:
        document = manual(characters)
        if task == "fact":
            place = document.find("\n", len(document) // 8)
            told = f"{what[0].upper()}{what[1:]} is {answer}."
            document = f"{document[:place]}\n{told}{document[place:]}"
        return tokenizer.chat(f"{document}\n\n{asked}")

    return _longest(with_document, tokens)


def _code() -> str:
    import argparse
    import ast
    import difflib

    return "\n\n".join(inspect.getsource(module) for module in (difflib, argparse, ast))


def _longest(make: Callable[[int], list[int]], tokens: int) -> list[int]:
    """Return the longest prompt of at most `tokens` tokens."""
    least, most = 0, 8 * tokens
    while most - least > 16:
        middle = (least + most) // 2
        if len(make(middle)) <= tokens:
            least = middle
        else:
            most = middle
    return make(least)


def _cut(ids: list[int], tokens: int) -> list[int]:
    if len(ids) < tokens:
        raise ValueError(f"the material has {len(ids)} tokens, {tokens} were asked for")
    return ids[:tokens]
