"""`python -m triforce_core`, where the command is not installed."""

import sys

from triforce_core.cli.entry import main

sys.exit(main())
