"""The webhook receiver: a training system announces a checkpoint, and a flow is started.

`app` takes requests, `verify` checks who sent them, `event` parses them by the table in `senders`, `settings`
checks the URIs that they name, `inbox` stores them, `dispatch` turns them into flow runs, `serve` reports the
results. ``python -m deployments.receiver CONFIG.toml`` runs it.
"""
