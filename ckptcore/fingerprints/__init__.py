"""fingerprints: a room of ckptcore."""
