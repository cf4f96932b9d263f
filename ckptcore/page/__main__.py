"""Run the page: ``python -m ckptcore.page [--catalog URL] [--host ADDRESS] [--port NUMBER]``."""

from __future__ import annotations

import os
import sys

from ckptcore.errors import CkptError
from ckptcore.utils import terminal
from ckptcore.utils.extras import needed

TOKEN = "CKPTCORE_PAGE_TOKEN"


def main() -> None:
    """Serve until a signal."""
    parser = terminal.parser(prog="python -m ckptcore.page", description="Look at the catalog.")
    parser.add_argument("--catalog", help="URL of the catalog, or path of a SQLite file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8790, help="0 picks a free port and prints it")
    parser.add_argument("--allow-host", action="append", default=[], help="name under which it is reached")
    options = parser.parse_args()
    terminal.log_to_stderr()
    try:
        with needed("page", "serve the catalog page"):
            from ckptcore.page.app import serve

        token = os.environ.get(TOKEN)
        serve(options.catalog, options.host, options.port, token, tuple(options.allow_host))
    except CkptError as error:
        terminal.block(f"{error.code}: {error.message}\nnext: {error.hint}", err=True, indent="")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    terminal.guard()
    main()
