"""Read pickles by an allow-list, without executing them, and write plain ones.

`unpickler.loads` reads a pickle: a table of permitted globals maps each to what it becomes, anything else is
`Refused`. `torch_globals` and `library_globals` are such tables; a family adds its own. `writer` makes
pickles that torch.load reads with weights_only. `records`, `record_runs`, `columns` and `container_items`
read millions of similarly encoded values at once; they are internal to this package, except for the `Columns`
that they return.
"""
