"""One thread per rank: many ranks share few cores, and forked ranks must not inherit a thread pool."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
