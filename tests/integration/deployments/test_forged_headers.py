"""Forged headers: who sends a request is decided by its connection, on every server of this project."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import live
import pytest
import webhooks

from ckptcore.catalog import CheckpointFacts, open_catalog
from ckptcore.page import changes
from ckptcore.page.settings import MOST

PROXY = "10.0.0.5"
TOKEN = "the-token-of-ada-in-tests"
PAGE = f"""
[page]
hosts = ["127.0.0.1"]
tokens = {{ ada = "ADA" }}
proxies = ["{PROXY}"]
"""
USER = ("X-Forwarded-User", "bob")
Headers = list[tuple[str, str]]
# What makes a server that believes it take a client on this machine for the proxy, or for a user of it.
FORGED: dict[str, Headers] = {
    "x-forwarded-for": [("X-Forwarded-For", PROXY), USER],
    "in capitals": [("X-FORWARDED-FOR", PROXY), ("X-FORWARDED-USER", "bob")],
    "twice": [("X-Forwarded-For", "192.0.2.1"), ("X-Forwarded-For", PROXY), USER],
    "a list that ends with it": [("X-Forwarded-For", f"192.0.2.1, {PROXY}"), USER],
    "a list that begins with it": [("X-Forwarded-For", f"{PROXY}, 127.0.0.1"), USER],
    "with a port": [("X-Forwarded-For", f"{PROXY}:443"), USER],
    "mapped into IPv6": [("X-Forwarded-For", f"::ffff:{PROXY}"), USER],
    "in brackets": [("X-Forwarded-For", f"[::ffff:{PROXY}]:443"), USER],
    "with an underscore": [("X_Forwarded_For", PROXY), ("X_Forwarded_User", "bob")],
    "x-forwarded-proto": [("X-Forwarded-For", PROXY), ("X-Forwarded-Proto", "https"), USER],
    "x-forwarded-host": [("X-Forwarded-Host", "127.0.0.1"), ("X-Forwarded-For", PROXY), USER],
    "the user alone": [USER],
    "the user twice": [USER, ("X-Forwarded-User", "ada")],
    "forwarded": [("Forwarded", f"for={PROXY};proto=https;by={PROXY}"), USER],
    "forwarded in quotes": [("Forwarded", f'for="[::ffff:{PROXY}]:443"'), USER],
    "x-real-ip": [("X-Real-IP", PROXY), USER],
    "x-client-ip": [("X-Client-IP", PROXY), ("X-Cluster-Client-IP", PROXY), USER],
    "true-client-ip": [("True-Client-IP", PROXY), ("CF-Connecting-IP", PROXY), USER],
    "remote-user": [("Remote-User", "ada"), ("X-Remote-User", "ada"), ("X-Auth-Request-User", "ada")],
    "via": [("Via", f"1.1 {PROXY}"), ("X-Forwarded-For", PROXY), ("X-Forwarded-Port", "443"), USER],
}


@pytest.fixture(scope="module", params=["the receiver", "the page alone"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page with one checkpoint in its catalog, and an alias on it."""
    folder = tmp_path_factory.mktemp("forged")
    catalog = folder / "catalog.sqlite"
    with open_catalog(str(catalog)) as opened:
        for step in (1, 2):
            opened.record_validation(CheckpointFacts(f"/r/{step}", "dcp", f"{step}" * 64, 8, [], []))
        changes.set_alias(opened, "ada", "/r/1", "best", None, True)
    if request.param == "the page alone":
        with live.page(catalog, TOKEN) as (_, address):
            yield address
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADA", TOKEN)
        with live.receiver(folder, config=webhooks.CONFIG + PAGE) as running:
            yield f"{running.url}/catalog"


def csrf_in(page: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page)
    return found[1] if found else ""


@pytest.mark.alike(6)
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_header_makes_nobody_a_user(name: str, served: str) -> None:
    with httpx.Client(base_url=served, headers=FORGED[name]) as client:
        page = client.get("/")
        assert "Log out" not in page.text
        assert page.status_code in (200, 401)  # on this machine, the page alone may be read
        [row] = httpx.get(f"{served}/api/v1/aliases", headers=_login()).json()["rows"]
        other = _other(served, row["checkpoint"])
        form = {"name": "best", "csrf": csrf_in(page.text)}
        assert client.post(f"/checkpoints/{other}/alias", data=form).status_code == 401
        changed = client.post(f"/api/v1/checkpoints/{other}/aliases", json={"name": "best"})
        assert changed.status_code == 401
    assert httpx.get(f"{served}/api/v1/aliases", headers=_login()).json()["rows"] == [row]


@pytest.mark.alike(1)
def test_a_forged_header_gives_nobody_more_tries(served: str) -> None:
    statuses = []
    for number, (name, forged) in enumerate(FORGED.items()):
        fresh = [(key, value.replace(PROXY, f"10.7.{number}.1")) for key, value in forged]
        data = {"token": f"a-wrong-token-number-{number:04}"}
        answer = httpx.post(f"{served}/login", data=data, headers=fresh)
        statuses.append((answer.status_code, name))
    assert [status for status, _ in statuses] == [401] * MOST + [429] * (len(FORGED) - MOST), statuses


def _login() -> dict[str, str]:
    return {"authorization": f"Bearer {TOKEN}"}


def _other(served: str, ref: str) -> str:
    rows = httpx.get(f"{served}/api/v1/checkpoints", headers=_login()).json()["rows"]
    return str(next(row["checkpoint"]["id"] for row in rows if row["checkpoint"]["id"] != ref))
