"""The demo: SmolLM2-135M answers a question about 4,250 tokens of text, its KV cache streamed.

The text is the Python manual. The model begins its answer by plain decoding, one pass for each
token, and then gives the whole answer with drafts, where a pass verifies many tokens. Both runs
have the same memory and the same link.

python scripts/demo.py [--weights]
python scripts/demo.py any option of `triforce generate`: one answer with these options
python scripts/demo.py --chat|--serve [any option of `triforce chat` or `serve`]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.material import manual, model_file

if TYPE_CHECKING:
    from triforce_core import Completion, Engine

QUESTION = "How do I define a class in Python? Show an example."
# About 4,250 tokens.
MANUAL_CHARACTERS = 17_000
NEW_TOKENS = 78
# Plain decoding writes the beginning of the answer, so that the demo takes less than a minute.
PLAIN_TOKENS = 32
CONTEXT_TOKENS = 4_400
# Slow enough that a pass takes as long as several steps of drafting, as with a large model on a
# desktop. Weights are more bytes.
LINK, LINK_FOR_WEIGHTS = "0.3GB/s", "4GB/s"
NEXT = """
Try next:
  bash scripts/demo.sh --chat                             talk to this model
  .venv/bin/triforce list .venv                           this model, and others on this machine
  .venv/bin/triforce plan llama3.1-8b --gpu rtx4090 --context 131072"""


def main() -> int:
    from triforce_core.cli.main import main as triforce

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--weights", action="store_true", help="stream the weights as well")
    parser.add_argument("--chat", action="store_true", help="talk to the model")
    parser.add_argument("--serve", action="store_true", help="serve it on this machine")
    args, options = parser.parse_known_args()
    if args.chat or args.serve:
        return triforce(["chat" if args.chat else "serve", str(model_file()), *options])
    device = device_options(stream_weights=args.weights)
    if not options:
        return compare(device)
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt())
        file.flush()
        flags = [word for name, value in device.items() for word in (flag(name), str(value))]
        asked = ["generate", str(model_file()), "--prompt-file", file.name, "--chat", *flags]
        return triforce([*asked, "--temperature", "0", *options])


def compare(device: dict[str, Any]) -> int:
    """Answer by plain decoding and with drafts. Return 0 if the tokens are the same, else 1."""
    say(f"{MANUAL_CHARACTERS:,} characters of the Python manual, then: {QUESTION}\n")
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "context"
        with engine_of(device, method="autoregressive") as engine:
            title = f"\nPlain decoding, one pass for each token, {PLAIN_TOKENS} tokens:\n"
            plain = answer(engine, title, PLAIN_TOKENS, sys.stderr)
            engine.save_context(kept)
        with engine_of(device) as engine:
            # What was computed for the prompt is the same for both.
            engine.load_context(kept)
            title = "\nThe whole answer, with drafts that the same model verifies:\n"
            ours = answer(engine, title, NEW_TOKENS, sys.stdout)
    same = plain.token_ids == ours.token_ids[:PLAIN_TOKENS]
    rate, plain_rate = (1 / each.stats["seconds_per_token"] for each in (ours, plain))
    times, tokens = rate / plain_rate, ours.stats["tokens_per_pass"]
    say(f"\nplain decoding  {plain_rate:6.1f} tokens/s   1 token a pass")
    faster = f"{tokens:.1f} tokens a pass, {times:.1f} times as fast"
    say(f"triforce        {rate:6.1f} tokens/s   {faster}")
    say(f"identical text: {'yes' if same else 'NO'}, {PLAIN_TOKENS} tokens compared\n{NEXT}")
    say(f"\nEvery command takes this model by its file:\n  {from_here(model_file())}")
    return 0 if same else 1


@contextmanager
def engine_of(device: dict[str, Any], **method: Any) -> Iterator[Engine]:
    """Open an engine on the demo's device. Progress goes to standard error."""
    from triforce_core import Engine
    from triforce_core.cli.terminal.progress import ProgressBars

    bars = ProgressBars(show=True)
    with (
        bars,
        Engine.from_pretrained(
            model_file(), **device, **method, max_context=CONTEXT_TOKENS, progress=bars.update
        ) as engine,
    ):
        bars.stop()
        yield engine


def answer(engine: Engine, title: str, new_tokens: int, output: Any) -> Completion:
    """Write the model's answer as it is generated. In a terminal, colours show which level
    proposed each piece.
    """
    from triforce_core import SamplingParams
    from triforce_core.cli.terminal.progress import ProgressBars
    from triforce_core.cli.terminal.report import colored, takes_colors

    colors = takes_colors(output)
    tokens = engine.chat_tokens(prompt())
    stream = engine.stream(tokens, SamplingParams(new_tokens, temperature=0))
    bars = ProgressBars(show=True, opening=False)
    bars.prompt(len(tokens) - len(engine.context_tokens))
    before, engine.progress = engine.progress, bars.update
    try:
        with bars:
            for i, piece in enumerate(stream.pieces()):
                if i == 0:
                    bars.stop()
                    say(title)
                print(colored(piece) if colors else piece.text, end="", file=output, flush=True)
    finally:
        engine.progress = before
    print(file=output, flush=True)
    return stream.result


def prompt() -> str:
    return f"Here is a part of the Python manual:\n\n{manual(MANUAL_CHARACTERS)}\n\n{QUESTION}"


def device_options(*, stream_weights: bool) -> dict[str, Any]:
    """Return settings of a device too small for the KV cache, or also for the weights."""
    import torch

    from triforce_kernels.host.library import library

    if torch.cuda.is_available():
        return {"device_memory": "320MiB" if stream_weights else "450MiB"}
    link = LINK_FOR_WEIGHTS if stream_weights else LINK
    say(
        "This machine has no CUDA GPU: the device is a part of host memory with a budget, and the\n"
        f"link to it is EMULATED, a copy thread paced to {link}.\n"
    )
    # With compiled kernels the weights stay in 4 bits, and without them they are float32, as they
    # are to stream.
    memory = "400MiB" if stream_weights else "245MiB" if library() else "700MiB"
    device = {"device": "cpu", "link_bandwidth": link, "device_memory": memory}
    if stream_weights:
        device["weights"] = "dense"
    # A larger cache would leave no room for all of the weights.
    return device | {"budget": 512}


def flag(name: str) -> str:
    """Return the option of the command line for a setting."""
    return "--" + name.replace("_", "-")


def from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
