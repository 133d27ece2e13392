"""A rank that rank 0 started."""

import sys

from triforce_core.parallel.world import heed_the_leader

if __name__ == "__main__":
    # Do this before torch is imported, which takes seconds.
    heed_the_leader()
    from triforce_core.parallel.follower import main

    sys.exit(main())
