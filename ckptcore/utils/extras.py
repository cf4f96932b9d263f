"""The extras of this package: what a step says that needs one which is not installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckptcore.errors import MissingDependency

_PAGE = ("fastapi", "h11", "jinja2", "starlette", "uvicorn")
# extra -> the packages that code imports with it; pyproject.toml has the distributions
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "flows": (*_PAGE, "httpx", "prefect", "prometheus_client"),
    "page": _PAGE,
    "hf": ("transformers",),
    "gs": ("gcsfs",),
    "az": ("adlfs",),
    "hub": ("huggingface_hub",),
    "mount": ("mfusepy",),
    "sign": ("model_signing", "OpenSSL"),
    "postgres": ("psycopg",),
    "otel": ("opentelemetry",),
    "dask": ("prefect_dask", "distributed"),
    "ray": ("prefect_ray", "ray"),
}
# Schemes of URLs whose file systems are extras.
OF_SCHEME: Mapping[str, str] = {"gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "hf": "hub"}


def install(extra: str) -> str:
    """Return the command that installs an extra.

    >>> install("page")
    "pip install 'ckptcore[page]'"
    """
    return f"pip install 'ckptcore[{extra}]'"


@contextmanager
def needed(extra: str, action: str) -> Iterator[None]:
    """Import packages of an extra.

    Args:
        extra: A key of `PACKAGES`.
        action: What cannot be done without it, such as "serve the catalog page".

    Raises:
        MissingDependency: One of the extra's packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES[extra]:
            raise
        raise MissingDependency(
            f"cannot {action}: {package} is not installed", hint=install(extra)
        ) from error
