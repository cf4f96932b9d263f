"""Read and write OLMo's checkpoints, of OLMo and of OLMo-core.

`core.FORMAT` (1.0 and later), `v01.FORMAT` (0.1), `local.FORMAT` (flat parameters a rank) and
`unsharded.FORMAT`. All of them use `common`.
"""
