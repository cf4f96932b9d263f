"""Open checkpoints as models of transformers, without an export between, and fingerprint such models."""
