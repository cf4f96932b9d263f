"""A module that takes long to import: it says which process has imported it."""

import os

PID = os.getpid()
