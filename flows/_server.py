"""Run Prefect's temporary server on a socket that is open already.

    python -P _server.py FD OBJECTS

FD is the inherited socket, and OBJECTS how many new objects there are before Python collects garbage. The
file is run by its path: nothing of this package is imported.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn

STARTUP_FAILED = 3  # as uvicorn's own command ends
DRAIN = 20.0  # seconds at most to record what a run has sent
STEP = 0.01  # seconds between looks

_log = logging.getLogger("uvicorn.error")


class RecordingServer(uvicorn.Server):
    """A server that records all events that it has received before it ends.

    Prefect's own drops those that its services have not taken yet: a run that ends at once would lack tasks.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until the clients' streams have ended and their events are taken, and shut down."""
        limit = time.monotonic() + DRAIN
        try:
            while (self.server_state.tasks or any(_waiting())) and time.monotonic() < limit:
                await asyncio.sleep(STEP)
        except (AttributeError, ImportError) as error:  # a release of Prefect with other queues
            _log.error("cannot wait for the last events: %s", error)
        await super().shutdown(sockets)


def _waiting() -> Iterator[int]:
    """Yield the number of messages that wait in each queue of Prefect's broker in memory."""
    from prefect.server.utilities.messaging.memory import Topic

    for topic in Topic._topics.values():
        for subscription in topic._subscriptions:
            yield subscription._queue.qsize() + subscription._retry.qsize()


def main() -> int:
    """Serve until the process is ended; return the exit status."""
    # The imports of the server make hardly any garbage: collecting is a sixth of the time until it answers.
    gc.set_threshold(int(sys.argv[2]), 10, 10)
    # As Prefect's `SubprocessASGIServer` runs it, but a client's address is that of its connection.
    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        log_level="error",
        lifespan="on",
        proxy_headers=False,
    )
    server = RecordingServer(config)
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
    return 0 if server.started else STARTUP_FAILED


if __name__ == "__main__":
    sys.exit(main())
