"""Judge a checkpoint: complete, and correct? Four levels, each with everything below it.

Knows manifests, and how stored bytes are read; no format by name. A check returns findings, and never stops
at the first.

- `check.check` makes a `check.Report`; `check.require_whole` raises for what somebody asks for.
- `scan` reads all bytes, for the levels ``bytes`` and ``values``.
- `verdicts` says what findings amount to; `export_proof` is the outcome of `verify-export`.
"""
