"""The webhook receiver: a training system says that a checkpoint is there, and a flow is started.

`app` takes requests, `verify` proves who sent them, `event` reads them by the table in `senders`, `roots`
says which places they may name, `inbox` keeps them, `dispatch` turns them into flow runs, `notify` tells
others how it ended. ``python -m deployments.receiver CONFIG.toml`` runs it.
"""
