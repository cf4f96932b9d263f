"""Move tensors: carry out the plan of an output within a memory budget. Only this package writes tensors.

Depends on plans (`ckptcore.planning`) and on how stored bytes are read (`ckptcore.reading`). Where plans are
stored, and what happens to the output files afterwards, is up to `ckptcore.conversion`.

- `execute.execute_files` writes files of a `plan_run.PlanRun`; `execute.recompute_files` computes them
  once more and compares.
- `tiles.Budget` divides memory; `parts.cut` and `join_parts.join_parts` let several machines write one
  file.
- `receipts.Receipt` records a finished file; `source_stamps` detects a changed source.
- `device` has the host buffers, and the transfers to and from an accelerator.

The path of a tensor's bytes: `file_writer.FileWork` -> `tensor_filler.TensorFiller` ->
`reading.chunk_reader` -> `reading.interleave` and `reading.gather` -> `reading.payload` -> a store.
"""
