"""Small helpers without domain knowledge, for every package of ckptcore.

They depend on `errors` alone.

- `workers` runs jobs in threads, and has `workers.Progress`, the one type of progress callbacks.
- `units` parses and formats sizes and durations; `text` shortens values for messages; `globs` matches names.
- `memory` measures free memory; `crc32` combines checksums of ranges; `step_names` parses a training step
  from a name; `terminal` writes to people.
"""
