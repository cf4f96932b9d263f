"""What every Python of the tests runs first (Lib/site.py). A tenth of the time in which torch or Prefect is
imported goes into collections of garbage, and there is none."""

import gc

gc.set_threshold(100_000, 20, 100)
