"""What systems are asked to write: prompts of a given number of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from material import manual

from triforce_core import Engine, SamplingParams
from triforce_core.model.tokenizer import Tokenizer

TASKS = ("continuation", "question", "code", "fact")
# Each is told once and asked for at the end.
FACTS = (
    ("the password of the lighthouse keeper", "amber-seven-kestrel"),
    ("the number of the locker at the station", "four-nine-two-eight-six-one"),
    ("the name of the captain's third ship", "Margarete of Warnemünde"),
    ("the address of the old observatory", "17 Quarry Lane, Upper Tollgate"),
)
_ASKS = "How does the with statement use a context manager? Answer in a few sentences."


def generate_fully(engine: Engine, ids: list[int], new_tokens: int, seed: int) -> dict[str, Any]:
    """Stats of the first seed from `seed` on whose text does not end before its length: one that
    ends would not fill its passes.
    """
    while True:
        params = SamplingParams(new_tokens, temperature=0.6, top_p=0.9, seed=seed)
        stats = engine.generate(ids, params, reuse=False).stats
        if stats["finish_reason"] == "length":
            return stats
        seed += 1000


def prompt(task: str, tokenizer: Tokenizer, tokens: int, fact: int = 0) -> list[int]:
    """Token ids of a prompt. fact: which of FACTS it is about.

    continuation: of the Python manual; code: of CPython's own library; question: about a long part
    of the manual; fact: about one sentence that stands far back in it.
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
    """The longest prompt of at most so many tokens."""
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
