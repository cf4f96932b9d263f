"""Test that a web server which cannot be reached, or refuses, is not taken for one without the file."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptcore.errors import SourceUnreadable, StorageTrouble
from ckptcore.store import open_store

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiohttp leaves its session


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/runs/step-1"
        server.shutdown()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore.store.remote.Retrying", _once)


def _once(**_: object) -> object:
    return lambda call: call()


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/runs/step-1"
    store = open_store(url)
    for ask in (store.list, lambda: store.size("model.safetensors")):
        with pytest.raises(StorageTrouble, match="Cannot connect to host"):
            ask()


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_what_the_server_answered(status: int) -> None:
    with answering(status) as url:
        store = open_store(url)
        if status in (404, 410):
            with pytest.raises(SourceUnreadable, match="does not exist or is empty"):
                store.list()
            assert store.size("model.safetensors") is None
            return
        error = SourceUnreadable if status < 500 else StorageTrouble
        for ask in (store.list, lambda: store.size("model.safetensors")):
            with pytest.raises(error, match=str(status)):
                ask()
