"""The demo: SmolLM2-135M answers a question about the Python manual, its KV cache streamed.

python scripts/demo.py [--weights] [-- any option of `triforce generate`]
"""

from __future__ import annotations

import argparse
import sys
import tempfile

from material import manual, model_file

QUESTION = "According to the manual above, what does the `with` statement do?"
MANUAL_CHARACTERS = 26_500
"""About 6,000 tokens, with the question and the chat template around them."""


def main() -> int:
    from triforce_core.cli import main as triforce

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", action="store_true", help="stream the weights as well")
    args, options = parser.parse_known_args()
    prompt = f"{manual(MANUAL_CHARACTERS)}\n\n{QUESTION}"
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        print(
            f"\nThe Python manual ({len(prompt)} characters), then: {QUESTION}\n", file=sys.stderr
        )
        return triforce(
            [
                *("generate", str(model_file()), "--prompt-file", file.name, "--chat"),
                *_budget(args.weights),
                *("--max-new-tokens", "160", "--temperature", "0", *options),
            ]
        )


def _budget(weights: bool) -> list[str]:
    """A device too small for the KV cache, or for the weights too."""
    import torch

    if torch.cuda.is_available():
        return ["--device-memory", "400MiB" if weights else "560MiB"]
    print(
        "This machine has no CUDA GPU: the device is a part of host memory with a budget, and the\n"
        "link to it is EMULATED, a copy thread paced to 2 GB/s.",
        file=sys.stderr,
    )
    return [
        *("--device", "cpu", "--link-bandwidth", "2GB/s"),
        *("--device-memory", "400MiB" if weights else "700MiB"),
    ]


if __name__ == "__main__":
    sys.exit(main())
