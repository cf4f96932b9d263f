"""Open the catalog page as a browser does, without a socket."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

from fastapi.testclient import TestClient

from ckptcore.catalog import CheckpointFacts
from ckptcore.catalog.catalog import Catalog
from ckptcore.page.app import make_page
from ckptcore.page.settings import PageAccess, session_key

TOKEN = "the-token-of-ada-in-tests"
Facts = Callable[..., CheckpointFacts]


def access(**more: Any) -> PageAccess:
    given: dict[str, Any] = {
        "hosts": frozenset({"testserver", "localhost"}),
        "tokens": {TOKEN: "ada"},
        "open_reading": True,
        "key": session_key(TOKEN),
    }
    return PageAccess(**(given | more))


def browser(catalog: Catalog, rights: PageAccess | None = None, address: str = "127.0.0.1") -> TestClient:
    app = make_page(catalog, rights or access())
    return TestClient(app, client=(address, 5000), follow_redirects=False, raise_server_exceptions=True)


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", page.replace("<wbr>", "")))
