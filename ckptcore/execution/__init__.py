"""Move tensors: carry out the plan of an output, inside a budget of memory. Only this room writes tensors.

Knows plans (`ckptcore.planning`) and how stored bytes are read (`ckptcore.reading`); not where a plan lies,
nor what becomes of its files: that is `ckptcore.conversion`'s.

- `execute.execute_files` writes files of a `plan_run.PlanRun`; `execute.recompute_files` computes them
  again and compares.
- `tiles.Budget` shares out memory; `parts.cut` and `join_parts.join_parts` let several machines write one
  file.
- `receipts.Receipt` says that a file is finished; `source_stamps` says whether a source is still the same.
- `device` holds buffers, and the way through an accelerator.

The way of a tensor's bytes: `file_writer.FileWork` -> `tensor_filler.TensorFiller` ->
`reading.chunk_reader` -> `reading.interleave` and `reading.gather` -> `reading.payload` -> a store.
"""
