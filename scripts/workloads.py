"""What systems are asked to write: prompts of a given number of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from material import manual

from triforce_core.model.tokenizer import Tokenizer

TASKS = ("continuation", "question", "code", "fact")
FACT = "The password of the lighthouse keeper is 'amber-seven-kestrel'."
_ASKS_FACT = "What is the password of the lighthouse keeper? Answer with the password."
_ASKS = "How does the with statement use a context manager? Answer in a few sentences."


def prompt(task: str, tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Token ids of a prompt.

    continuation: of the Python manual; code: of CPython's own library; question: about a long part
    of the manual; fact: about one sentence that stands far back in it.
    """
    if task in ("continuation", "code"):
        text = manual(8 * tokens) if task == "continuation" else _code()
        return _cut(tokenizer.encode(text), tokens)
    asked = _ASKS if task == "question" else _ASKS_FACT

    def with_document(characters: int) -> list[int]:
        document = manual(characters)
        if task == "fact":
            place = document.find("\n", len(document) // 8)
            document = f"{document[:place]}\n{FACT}{document[place:]}"
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
