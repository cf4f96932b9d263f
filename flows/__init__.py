"""The Prefect flows. Importing this package sets Prefect's environment before Prefect itself is imported."""

from flows._prefect import set_environment

set_environment()
