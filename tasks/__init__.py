"""Tasks: one verb each, a thin coat of retries and artifacts around one core call."""
