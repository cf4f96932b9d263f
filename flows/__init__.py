"""The Prefect flows. Importing this package sets Prefect's environment before Prefect itself is imported."""

from flows._prefect import server_configured, set_environment, trust_nobody_on_this_machine
from flows._start import is_command, start_command

set_environment()
if is_command():
    start_command(server_configured())
    trust_nobody_on_this_machine()
