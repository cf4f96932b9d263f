"""Check that a checkpoint is complete and correct, at four levels; each level includes those below it.

The package works on manifests and stored bytes, and knows no format by name. A check returns all findings;
it does not stop at the first.

- `check.check` returns a `check.Report`; `check.require_complete` raises when a requested part has errors.
- `scan` reads all bytes, for the levels ``bytes`` and ``values``.
- `verdicts` maps findings to error classes and status texts; `export_proof` is the result of `verify-export`.
"""
