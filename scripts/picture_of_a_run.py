"""Draw a run as a terminal shows it: the demo's model and text, over an EMULATED link.

    python scripts/picture_of_a_run.py [--output docs/run.svg] [any option of `triforce generate`]

Colours show which level drafted the text. Progress lines, which a terminal erases, are left out;
everything else is the command's output.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

import demo
from bench.material import model_file

# All weights, in the 4 bits of their file, and about a third of the KV cache fit in this memory.
DEVICE = (
    *("--device", "cpu", "--device-memory", "330MiB", "--link-bandwidth", "0.5GB/s"),
    *("--budget", "1024"),
)
COLUMNS = 104
_PROGRESS = re.compile(r"^(loading|prefill)[^:\n]*: \d+ of \d+ layers.*\n", re.MULTILINE)
# Remote fonts, which a picture embedded in a page cannot load.
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("docs/run.svg"))
    args, options = parser.parse_known_args()
    model = model_file()
    command = [
        *("triforce", "generate", model.name, "--prompt-file", "manual.txt", "--chat"),
        *DEVICE,
        *("--color-levels", "--max-new-tokens", "78", "--temperature", "0", *options),
    ]
    with tempfile.TemporaryDirectory() as folder:
        # Put both files in one folder, so that the command shows no path of this machine.
        (Path(folder) / model.name).symlink_to(model)
        (Path(folder) / "manual.txt").write_text(demo.prompt(), "utf-8")
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "triforce_core.cli", *command[1:]],
            cwd=folder,
            env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    print(ran.stdout)
    if ran.returncode == 0:
        args.output.write_text(picture(shlex.join(command), ran.stdout), "utf-8")
    return ran.returncode


def picture(command: str, output: str) -> str:
    """Return an SVG of a command and its output."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}\n", style="bold"))
    console.print(Text.from_ansi(_PROGRESS.sub("", output)))
    return _FONTS.sub("", console.export_svg(title="triforce generate", unique_id="run"))


if __name__ == "__main__":
    sys.exit(main())
