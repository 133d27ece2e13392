"""The demo: SmolLM2-135M answers a question about 6,000 tokens of text, its KV cache streamed.

The text is the Python manual. Each pass verifies many tokens that the retrieval level has drafted.
In a terminal, colours show which tokens were accepted. `--chat` talks to the model, and `--serve`
serves it.

python scripts/demo.py [--weights] [any option of `triforce generate`]
python scripts/demo.py --chat|--serve [any option of `triforce chat` or `serve`]
"""

from __future__ import annotations

import argparse
import sys
import tempfile

from bench.material import manual, model_file

QUESTION = "What is the text above about? Summarize it in three sentences."
# About 6,000 tokens, including the question and the chat template around the text.
MANUAL_CHARACTERS = 24_500


def main() -> int:
    from triforce_core.cli.main import main as triforce

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--weights", action="store_true", help="stream the weights as well")
    parser.add_argument("--chat", action="store_true", help="talk to the model")
    parser.add_argument("--serve", action="store_true", help="serve it on this machine")
    args, options = parser.parse_known_args()
    if args.chat or args.serve:
        return triforce(["chat" if args.chat else "serve", str(model_file()), *options])
    text = prompt()
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        say(f"{MANUAL_CHARACTERS} characters of the Python manual, then: {QUESTION}\n")
        return triforce(
            [
                *("generate", str(model_file()), "--prompt-file", file.name, "--chat"),
                *device_options(stream_weights=args.weights),
                *(["--color-levels"] if sys.stdout.isatty() else []),
                # Every run gives the same text: draft lengths depend on measured times, but with
                # `coupled` the text does not depend on draft lengths.
                *("--max-new-tokens", "160", "--seed", "2", "--accept", "coupled", *options),
            ]
        )


def prompt() -> str:
    return f"Here is a part of the Python manual:\n\n{manual(MANUAL_CHARACTERS)}\n\n{QUESTION}"


def device_options(*, stream_weights: bool) -> list[str]:
    """Return options for a device too small for the KV cache, or also for the weights."""
    import torch

    from triforce_kernels.host.library import library

    if torch.cuda.is_available():
        return ["--device-memory", "320MiB" if stream_weights else "450MiB"]
    say(
        "This machine has no CUDA GPU: the device is a part of host memory with a budget, and the\n"
        "link to it is EMULATED, a copy thread paced to 2 GB/s.\n"
    )
    # With compiled kernels the weights stay in 4 bits, and without them they are float32, as they
    # are to stream.
    memory = "400MiB" if stream_weights else "300MiB" if library() else "700MiB"
    return [
        *("--device", "cpu", "--link-bandwidth", "2GB/s", "--device-memory", memory),
        *(["--weights", "dense"] if stream_weights else []),
        # A larger cache would leave no room for all of the weights.
        *("--budget", "512" if stream_weights else "1024"),
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
