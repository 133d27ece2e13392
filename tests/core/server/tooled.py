"""Tiny models whose chat templates take tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import write_tokens_of_bytes

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
}
# Shows all that a chat template sees.
SHOWN = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{{ ' ' + m.name if m.name }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments.items() | list }})"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
TEMPLATES = {
    "hermes": SHOWN + "{# <tool_call> #}",
    "qwen3.5": SHOWN + "{# <tool_call> <function=name> </think> #}",
    "llama": SHOWN + '{# "parameters" #}',
    "gpt-oss": SHOWN + "{# <|channel|> #}",
}
HARMONY = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|constrain|>")


def write_tooled(directory: Path, family: str) -> Path:
    """Write a model whose tokens are bytes, with the chat template of a family."""
    special = HARMONY if family == "gpt-oss" else ()
    write_tokens_of_bytes(directory, special, TEMPLATES[family], max_position_embeddings=4096)
    return directory
