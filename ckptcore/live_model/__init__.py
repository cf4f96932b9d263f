"""Open checkpoints as models of transformers and vLLM, without an export, and fingerprint such models."""
