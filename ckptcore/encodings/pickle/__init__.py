"""Read pickles by an allow-list, without executing them, and write plain ones.

`unpickler.loads` is the way in: a table of permitted globals says what each becomes, anything else is
`Refused`. `torch_globals` and `numpy_globals` are such tables; a family adds its own. `writer` makes
pickles that torch.load reads with weights_only. `records`, `record_runs`, `columns` and `container_items`
read millions of values that are spelled alike at once; nobody outside of this package needs them, but for
the `Columns` they give.
"""
