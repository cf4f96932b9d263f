"""Small helpers without domain knowledge, for every room.

Know errors alone.

- `workers` runs jobs in threads, and has `workers.Progress`, the one type of progress callbacks.
- `units` reads and writes sizes and lengths of time; `text` shortens values for messages; `globs` matches
  names.
- `memory` tells how much of it is free; `crc32` joins checksums of ranges; `step_names` reads a training step
  from a name; `terminal` writes to people.
"""
