"""Deployments: how flows get started somewhere else than in a terminal."""
