"""Tags of messages in channels (OpenAI's harmony format, of gpt-oss). They are special tokens that
tell parts of an answer apart, so they are shown where others are skipped.
"""

from __future__ import annotations

TAGS = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>")


def shown(chat_template: str | None) -> tuple[str, ...]:
    """Return the special tokens that are shown in answers, by the model's chat template."""
    return TAGS if TAGS[0] in (chat_template or "") else ()
