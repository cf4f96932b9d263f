"""Read checkpoints of Accelerate and of the Hugging Face Trainer of an FSDP job: several parts in one folder.

`format.FORMAT`; `file_names` knows the names. The parts are DCP folders, ranks' files or torch files, which
their own families read.
"""
