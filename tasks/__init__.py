"""Tasks: one verb each, a thin coat of retries, tags and artifacts around one core call."""
