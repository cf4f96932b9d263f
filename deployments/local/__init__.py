"""Run the complete system on one machine without containers: ``make up``, ``make down``.

PostgreSQL, Prefect's server, a worker and the webhook receiver run as processes in sessions of their own.
`state` is their folder, `process` starts and ends one process, `services` is the table of them, `postgres`
sets up Debian's PostgreSQL, `lifecycle` starts and stops everything in order, `drain` stops runs without
losing any.

This is not a supervisor: it starts four processes in order, finds them again, and ends them without losing a
run; a second `make up` restarts what died. A supervisor from the package index would replace only `process`,
160 of these 1,050 lines. It does not handle the state and its secrets, Debian's PostgreSQL, ordered readiness
or the drain, and its configuration would contain the secrets. For automatic restarts use systemd, Compose or
Kubernetes, whose files are in `deployments` too (decision 74 in DESIGN.md).
"""
