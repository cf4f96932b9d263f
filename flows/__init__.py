"""The Prefect flows. Importing this package sets Prefect's environment before Prefect itself is imported."""

from flows._place import complete_environment, is_command

with complete_environment():
    from ckptcore.utils.command_process import start_quickly
    from flows._prefect import require_address_of_command, set_environment

require_address_of_command()
set_environment()
if is_command():
    start_quickly()
