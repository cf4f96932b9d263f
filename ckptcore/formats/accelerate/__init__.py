"""Read and write checkpoints of Accelerate and of the Hugging Face Trainer of an FSDP job.

`format.FORMAT` is the format. A part of a folder is a DCP folder, a set of rank files or a torch file; the
family of that format reads it.
"""
