"""Entry point of `python -m triforce_core`, for use without the installed command."""

import sys

from triforce_core.cli.entry import main

sys.exit(main())
