"""The whole system on this machine, without containers: ``make up``, ``make down``.

PostgreSQL, Prefect's server, a worker and the webhook receiver are real processes in sessions of their own.
`state` is the folder that they live in, `process` starts and ends one, `services` is the table of them,
`postgres` knows how Debian keeps PostgreSQL, `lifecycle` puts them in order, `drain` stops the work without
losing any.

This is no supervisor: it starts four processes in order, finds them again, ends them without losing a run,
and `make up` again mends what died. A supervisor from the package index would replace `process` alone, 160 of
these 1,050 lines: the state and its secrets, Debian's PostgreSQL, readiness in order and the drain are not
its work, and its configuration would hold the secrets. What must restart by itself runs under systemd,
Compose or Kubernetes, whose files are in `deployments` too (decision 74 in DESIGN.md).
"""
