"""Every HTTP server of the project takes a client's address from the connection, not from a header."""

from __future__ import annotations

import ast
import asyncio
from typing import Any

import pytest
from local_system import environment, state
from paths import ROOT

from flows._prefect import SERVER

FOLDERS = ("ckptcore", "tasks", "flows", "deployments")
CONFIGURED_IN = {"ckptcore/page/http_server.py"}


def configurations() -> list[tuple[str, ast.Call]]:
    """Return (file, call) of every `uvicorn.Config` and `uvicorn.run`."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for path in files
        if "uvicorn" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("uvicorn.Config", "uvicorn.run")
    ]


def test_no_server_believes_the_headers_of_proxies() -> None:
    calls = configurations()
    assert {file for file, _ in calls} == CONFIGURED_IN
    assert len(calls) == len(CONFIGURED_IN)
    for file, call in calls:
        options = {each.arg: ast.unparse(each.value) for each in call.keywords}
        assert options.get("proxy_headers") == "False", file


def test_neither_do_the_servers_of_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    prefect = environment(state(), "prefect", monkeypatch)
    clients: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        clients.append((scope["client"], scope["scheme"]))

    headers = [(b"x-forwarded-for", b"10.0.0.5"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "client": ("127.0.0.1", 1), "scheme": "http", "headers": headers}
    for allowed in ("127.0.0.1", prefect["FORWARDED_ALLOW_IPS"], SERVER["FORWARDED_ALLOW_IPS"]):
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", allowed)
        config = uvicorn.Config(application, interface="asgi3", log_config=None)
        config.load()
        asyncio.run(config.loaded_app(dict(scope), None, None))  # type: ignore[arg-type]  # it calls neither
    assert clients == [(("10.0.0.5", 0), "https"), *[(("127.0.0.1", 1), "http")] * 2]
