"""Bring finished folders to others.

- push: `push_each`, `push`: send proven outputs to the Hugging Face hub
- signing: `sign`, `verify_signature`: signatures of folders, in OpenSSF's format
"""
