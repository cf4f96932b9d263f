"""Run the complete system on one machine without containers: ``make up``, ``make down``.

PostgreSQL, Prefect's server, a worker and the webhook receiver are programs of `supervisor`, which starts
them again when they end. Own code is what it lacks: the state with its secrets, and the order: each service
is ready before the next one starts, and runs end before their worker does.
"""
