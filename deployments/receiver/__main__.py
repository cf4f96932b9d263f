"""Run the receiver: ``python -m deployments.receiver CONFIG.toml [--host ADDRESS] [--port NUMBER]``."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ckptcore.errors import CkptError
from ckptcore.utils import terminal
from deployments import metrics_options
from flows._prefect import end_with


def main() -> None:
    """Serve until a signal. A second signal ends the process at once."""
    parser = terminal.parser(prog="python -m deployments.receiver", description="Receive webhooks.")
    parser.add_argument("config", type=Path, help="TOML file; example: deployments/receiver/example.toml")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; put a TLS proxy in front of others"
    )
    parser.add_argument("--port", type=int, default=8080, help="0 picks a free port and prints it")
    parser.add_argument(
        "--check", action="store_true", help="only check the file, the secrets and the catalog"
    )
    metrics_options(parser, 9464)
    options = parser.parse_args()
    terminal.log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per call to Prefect
    # A repeat of the client blocks the starts of all events; the receiver schedules repeats for each.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "0")
    try:
        from deployments.receiver.serve import check, serve

        metrics = None if options.metrics_port is None else (options.metrics_host, options.metrics_port)
        check(options.config) if options.check else serve(options.config, options.host, options.port, metrics)
    except CkptError as error:
        end_with(error)


if __name__ == "__main__":
    terminal.guard()
    main()
