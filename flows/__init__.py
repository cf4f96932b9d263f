"""Flows: the table of contents of a job. The environment is settled before Prefect is imported."""

from flows._prefect import settle_environment

settle_environment()
