"""The whole system on this machine, without containers: ``make up``, ``make down``.

PostgreSQL, Prefect's server, a worker and the webhook receiver are real processes in sessions of their own.
`state` is the folder that they live in, `process` starts and ends one, `services` is the table of them,
`postgres` knows how Debian keeps PostgreSQL, `lifecycle` puts them in order, `drain` stops the work without
losing any.
"""
