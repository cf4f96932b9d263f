"""huggingface: a room of ckptcore."""
