"""Read pipelines of diffusers: a folder for each component, and model_index.json, which names them.

Public: `ckptcore.formats.diffusers.format.FORMAT`. A component alone is a Hugging Face folder.
"""
