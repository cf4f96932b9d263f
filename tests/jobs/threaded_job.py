"""A module that starts a thread: who imports it must not be forked. It says which process has imported it."""

import os
import threading

PID = os.getpid()
threading.Thread(target=threading.Event().wait, daemon=True).start()
