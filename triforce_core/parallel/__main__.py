"""A rank that another one started."""

import sys

from triforce_core.parallel.follower import main

if __name__ == "__main__":
    sys.exit(main())
