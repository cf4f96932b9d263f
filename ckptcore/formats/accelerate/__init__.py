"""Read checkpoints of Accelerate and of the Hugging Face Trainer of an FSDP job: several parts in one folder.

`format.FORMAT` is the format; `file_names` has the names of the parts. A part is a DCP folder, a set of rank
files or a torch file; the family of that format reads it.
"""
