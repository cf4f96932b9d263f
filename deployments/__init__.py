"""Start flows on a Prefect server: deployments, workers, the webhook receiver and local services."""

POOL = "ckptcore"  # the work pool of all deployments
