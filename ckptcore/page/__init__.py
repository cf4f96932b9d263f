"""The catalog page: look at runs, checkpoints, lineage and exports in a browser, and read the same as JSON.

It reads through `ckptcore.catalog`, as the command line does. `ckptcore catalog page` opens it on this
machine, in a process of its own; the receiver of `deployments` serves it if its file has a table ``[page]``.

- pages: `app` assembles them, `views`, `actions`, `api`, `api_actions` answer, `access` guards
- HTTP: `http_server` runs every server of this project by one strict protocol; `http_errors` refuse
"""
