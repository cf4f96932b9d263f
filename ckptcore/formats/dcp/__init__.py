"""dcp: a room of ckptcore."""
