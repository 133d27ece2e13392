"""What a context loses to a prompt that shares only its beginning."""

from __future__ import annotations

# Fewer tokens than this are prefilled again: copying a context is not worth it.
WORTH_COPYING = 256
# Share of a context whose prefill takes longer than to copy the context to host memory and back.
_WORTH_SHARE = 1 / 8
# Tokens at the end of a prompt that begin the answer. A template may write them differently once
# the answer is known.
_ANSWER_BEGINS = 16


def goes_on(prompt: int, shared: int) -> bool:
    """Whether the next prompt continues a conversation, or repeats its prompt.

    prompt: number of tokens of the conversation's last prompt
    shared: number of its first tokens that the next prompt shares
    """
    return shared >= prompt - _ANSWER_BEGINS


def is_worth_a_copy(known: int, tokens: int) -> bool:
    """Whether to prefill `tokens` tokens takes longer than to copy a context of `known` tokens."""
    return tokens >= max(WORTH_COPYING, known * _WORTH_SHARE)


def loses_much(known: int, prompt: int, shared: int) -> bool:
    """Whether a conversation would lose so much of its context to the next prompt that a copy of
    the context is worth its time and memory.

    known: number of tokens of its context; prompt, shared: as in `goes_on`
    """
    return not goes_on(prompt, shared) and is_worth_a_copy(known, known - shared)
