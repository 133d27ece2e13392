"""Special tokens that mark the parts of an answer: decoding shows them and hides the others."""

from __future__ import annotations

# Messages in channels: OpenAI's harmony format, of gpt-oss.
CHANNEL_TAGS = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>")
# The reasoning and the tool calls of Gemma 4, and the quotes in them.
GEMMA_TAGS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
FUNCTION_GEMMA_TAGS = ("<start_function_call>", "<end_function_call>", "<escape>")
MISTRAL_TAGS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def shown(chat_template: str | None) -> tuple[str, ...]:
    """Return the special tokens that are shown in answers, by the model's chat template.

    The first tag of a family names the family.
    """
    template = chat_template or ""
    families = (CHANNEL_TAGS, GEMMA_TAGS, FUNCTION_GEMMA_TAGS, MISTRAL_TAGS)
    return next((tags for tags in families if tags[0] in template), ())
