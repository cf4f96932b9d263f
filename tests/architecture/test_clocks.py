"""Times are compared by one clock, the catalog's: hosts disagree by minutes, and a lease must not."""

from __future__ import annotations

import ast

from paths import ROOT

FOLDERS = ("ckptcore", "tasks", "flows", "deployments")
CLOCKS = {
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.time", "time.time_ns"),
    *("host.now", "host.now_ns"),
}
# Who asks the machine's clock, and why no other clock's time is compared with it.
ALLOWED = {
    "ckptcore/catalog/database.py": "the clock of SQLite, which is of one machine",
    "ckptcore/conversion/staging/local_staging.py": "makes a name unique",
    "ckptcore/operations/abandoned.py": "the age of files for people",
    "ckptcore/operations/rebuild_catalog.py": "the times of files, before which all must have been written",
    "ckptcore/store/objects/journal.py": "an entry's time for people",
    "ckptcore/store/objects/lease.py": "leases in a store have no other clock: a documented limit",
    "ckptcore/store/local_listing.py": "the age of a file's status",
    "ckptcore/store/local.py": "the age of a file's status",
    "ckptcore/utils/host.py": "the clock itself, for the rest of this list",
    "ckptcore/utils/processes.py": "the age of marks that this machine left",
    "ckptcore/page/access.py": "the end of a session, which this process signed",
    "deployments/receiver/app.py": "signatures of senders, whose time is compared with this machine's",
    "deployments/receiver/prefect_runs.py": "states of Prefect, whose server is asked for no time",
    "deployments/senders/send.py": "signs a message",
    "flows/arrived.py": "when Prefect is to start a run again",
}


def test_only_the_catalog_is_asked_for_the_time() -> None:
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    methods = {name.rpartition(".")[2] for name in CLOCKS}
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if any(f".{method}" in (text := path.read_text()) for method in methods)  # few do, a parse is slow
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in methods and ast.unparse(node) in CLOCKS
    }
    assert asking == set(ALLOWED)
