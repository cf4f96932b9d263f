"""Prefect tasks: each adds retries and artifacts to one call of ckptcore."""
