"""The Prefect flows. Importing this package sets Prefect's environment before Prefect itself is imported."""

from flows._place import complete_environment

with complete_environment():
    from flows._address import require_address_of_command
    from flows._prefect import read_no_authorities, server_configured, set_environment
    from flows._start import is_command, start_command

require_address_of_command()
set_environment()
if is_command():
    start_command(server_configured())
    read_no_authorities()
