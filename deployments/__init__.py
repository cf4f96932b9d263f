"""Start flows on a Prefect server: deployments, workers, the webhook receiver and local services."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Mapping

import flows  # noqa: F401  # it checks the address of Prefect's server, and sets Prefect's environment first
from flows._place import ROOT

POOL = "ckptcore"  # the work pool of all deployments


def with_project(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python finds flows and tasks, whatever the working directory is.

    Prefect gives each run a folder of its own.
    """
    paths = [str(ROOT), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    return {**env, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def metrics_options(parser: ArgumentParser, port: int) -> None:
    """Add ``--metrics-port`` and ``--metrics-host`` to a service's command. port: what the help suggests."""
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="NUMBER",
        help=f"serve Prometheus metrics at /metrics on this port, such as {port}; 0 picks a free one; "
        "without it there are none",
    )
    parser.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address for the metrics, which need no login: choose one that only the monitor reaches",
    )
