"""A catalog on SQLite, facts for it, and a browser of its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from catalog_page import Facts, browser
from fastapi.testclient import TestClient

from ckptcore.catalog import CheckpointFacts, open_catalog
from ckptcore.catalog.catalog import Catalog


@pytest.fixture
def facts() -> Facts:
    def make(
        uri: str, *, content: str | None = None, shape: tuple[int, ...] = (4, 8), **more: Any
    ) -> CheckpointFacts:
        tensors = [(f"layers.{i}.weight", "bfloat16", shape, 64) for i in range(3)] + [
            ("norm", "float32", (4,), 16)
        ]
        given: dict[str, Any] = {
            "uri": uri,
            "format": "dcp" if content is None else "safetensors",
            "manifest_digest": uri.encode().hex().ljust(64, "0")[:64],
            "nbytes": 208,
            "tensors": tensors,
            "files": [
                ("model.safetensors", 260, None if content is None else content.encode().hex().ljust(64, "0"))
            ],
        }
        return CheckpointFacts(**(given | more))

    return make


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(str(tmp_path / "catalog.sqlite")) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgresql"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalog]:
    """An empty catalog on each database, for a page with a query of its own."""
    if request.param == "sqlite":
        with open_catalog(str(tmp_path / "catalog.sqlite")) as opened:
            yield opened
        return
    template = request.getfixturevalue("upgraded")
    with request.getfixturevalue("postgres").database(template) as url, open_catalog(url) as opened:
        yield opened


@pytest.fixture
def client(catalog: Catalog) -> TestClient:
    return browser(catalog)
