"""Deployments: how flows get started somewhere else than in a terminal."""

POOL = "ckptcore"  # the work pool of all deployments
