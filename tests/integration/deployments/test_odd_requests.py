"""Odd text in requests: whatever a header, a target, a query or a form holds, the answer is none of 5xx."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

import live
import pytest
import webhooks
from catalog_page import TOKEN, access
from starlette.testclient import TestClient

from ckptcore.catalog import open_catalog
from ckptcore.page.app import make_page
from deployments.receiver.app import make_app
from deployments.receiver.inbox import EventQueues
from deployments.receiver.settings import Sender

# Each has a library's parser in front of it that raises for some of these.
ODD = [
    "",
    " ",
    "[",
    "http://[",
    "http://[::1",
    "http://]:80",
    "//[",
    "http://[v1.a]/",
    "http://a:b@[",
    "http://testserver:port",
    "http://a:99999999999",
    "http://\xff",
    "\xff",
    "%",
    "%zz%ff%00",
    "9" * 5000,
    "-1",
    "1e999",
    "\xb2",
    "=",
    "==;=;",
    '"',
    '"\\777"',
    "a\tb",
    "null",
    "{",
    "[" * 3000,
    "a" * 20000,
    "YQ==.YQ==",
    "YQ.0",
    "Bearer",
    "Bearer \xff",
    "Basic Og==",
    "for=[;by=[",
    "ckptcore_page=YQ.0; ckptcore_page=\xff",
    "1.1 [",
    "Sun, 99 Foo 99999 99:99:99 GMT",
    "multipart/form-data; boundary=[",
    "application/json; charset=\xff",
    "gzip;q=x, *;q=9e999",
]
HEADERS = [
    *("Host", "Origin", "Referer", "Cookie", "Authorization", "Forwarded", "Via", "Accept", "Date"),
    *("X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "X-Forwarded-User", "X-Real-IP"),
    *("Content-Type", "Accept-Encoding", "Sec-Fetch-Site", "If-Modified-Since", "If-None-Match", "Range"),
    *("Idempotency-Key", "webhook-id", "webhook-timestamp", "webhook-signature", "ce-id", "ce-specversion"),
    *("X-GitHub-Event", "X-Hub-Signature-256", "X-Wandb-Signature", "WebHook-Request-Origin"),
]
PROXY = "10.0.0.5"


@pytest.fixture(scope="module")
def client(
    senders: dict[str, Sender], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, Path]]:
    """The receiver with its page, asked by a named proxy, whose headers count the most."""
    path = tmp_path_factory.mktemp("odd") / "catalog.sqlite"
    with open_catalog(str(path)) as catalog:
        rights = access(proxies=frozenset({PROXY}))
        page = ("/catalog", make_page(catalog, rights, "/catalog"))
        app = make_app(senders, EventQueues(str(path)), clock=lambda: webhooks.NOW, page=page)
        with TestClient(app, client=(PROXY, 5000), follow_redirects=False) as running:
            yield running, path


def slice_of(name: str) -> list[str]:
    """Return a tenth of the odd texts, another one for each header; and the one that raised first."""
    return [*ODD[HEADERS.index(name) % 10 :: 10], "http://["]


@pytest.mark.alike(8)
@pytest.mark.parametrize("name", HEADERS)
def test_odd_headers(name: str, client: tuple[TestClient, Path]) -> None:
    try_header(name, slice_of(name), client[0])


@pytest.mark.soak
@pytest.mark.parametrize("name", HEADERS)
def test_every_odd_header(name: str, client: tuple[TestClient, Path]) -> None:
    try_header(name, ODD, client[0])


def try_header(name: str, values: list[str], client: TestClient) -> None:
    hook = webhooks.HOOKS["bearer"]
    for value in values:
        odd = {name.lower(): value.encode("latin-1")}
        for path in ("/catalog/", "/catalog/api/v1/runs"):
            assert client.get(path, headers=odd).status_code < 500, (path, value[:40])
        sent = {k.lower(): v.encode() for k, v in hook.headers.items()} | odd
        assert client.post(hook.path, content=b"{}", headers=sent).status_code < 500, value[:40]
        assert client.options("/hooks/cloudevents", headers=odd).status_code < 500, value[:40]
        form = {"content-type": b"application/x-www-form-urlencoded"} | odd
        for path in ("/catalog/login", "/catalog/holds/0123456789ab/release"):
            answer = client.post(path, content=b"token=a&csrf=b", headers=form)
            assert answer.status_code < 500, (path, value[:40])


def test_an_odd_origin_is_another_site(client: tuple[TestClient, Path]) -> None:
    asked, _ = client
    for origin in ("http://[", "http://]", "http://[::1", "//[", "http://testserver:80]", "null", ""):
        answer = asked.post("/catalog/login", data={"token": TOKEN}, headers={"origin": origin})
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False), origin


QUERIES = [quote(value.encode("latin-1"))[:4000] for value in ODD] + ["%00", "%ED%A0%80", "%F0%9F%98%80"]
FIELDS = (
    "name",
    "after",
    "before",
    "search",
    "q",
    "left",
    "right",
    "metric",
    "scope",
    "keep_last",
    "done",
    "run",
)
PAGES = ("", "checkpoints", "conversions", "search", "compare", "best", "retire", "inbox", "audit")
APIS = ("runs", "steps", "search", "best", "retire", "compare", "conversions", "inbox")
BODIES = [*(value.encode("latin-1") for value in ODD), b'{"name": "\\ud800"}', b'{"reason": "\\u0000"}']
BODIES += [b'{"reason": "a", "until": "9999-99-99"}', b'{"uri": 1e999}', b'{"step": %s}' % (b"9" * 5000)]


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def test_odd_queries(database: str, senders: dict[str, Sender], request: pytest.FixtureRequest) -> None:
    with ExitStack() as opened:
        url = opened.enter_context(opened_on(database, request))
        catalog = opened.enter_context(open_catalog(url))
        asked = TestClient(make_page(catalog, access()), client=("127.0.0.1", 5000), follow_redirects=False)
        for number, text in enumerate(QUERIES):
            query = "&".join(f"{name}={text}" for name in FIELDS)
            paths = [*PAGES, *(f"api/v1/{name}" for name in APIS), f"runs/{text}"]
            for path in paths if text.startswith("%") else paths[number % 3 :: 3]:
                answer = asked.get(f"/{path}?{query}")
                assert answer.status_code < 500, (path, text[:40], answer.text)


@contextmanager
def opened_on(database: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty catalog."""
    if database == "sqlite":
        yield f"sqlite:///{request.getfixturevalue('tmp_path') / 'catalog.sqlite'}"
        return
    template = request.getfixturevalue("upgraded")
    with request.getfixturevalue("postgres").database(template) as url:
        yield url


def test_odd_forms_and_bodies(client: tuple[TestClient, Path]) -> None:
    asked, _ = client
    login = {"authorization": f"Bearer {TOKEN}"}
    form = login | {"content-type": "application/x-www-form-urlencoded"}
    for number, body in enumerate(BODIES):
        for path in ("login", "logout", "checkpoints/0123456789ab/alias", "checkpoints/0123456789ab/hold"):
            for sent in (body, b"token=" + body, b"csrf=" + quote(body).encode())[number % 3 :: 3]:
                answer = asked.post(f"/catalog/{path}", content=sent, headers=form)
                assert answer.status_code < 500, (path, body[:40])
        for path in ("aliases", "holds"):
            answer = asked.post(
                f"/catalog/api/v1/checkpoints/0123456789ab/{path}",
                content=body,
                headers=login | {"content-type": "application/json"},
            )
            assert answer.status_code < 500, (path, body[:40])
        for kind in ("bearer", "cloudevents-structured"):
            hook = webhooks.HOOKS[kind].but(raw=body)
            assert asked.post(hook.path, content=body, headers=hook.headers).status_code < 500, body[:40]


TARGETS = [
    *(
        "[",
        "//[",
        "http://[",
        "http://[/",
        "@[",
        "*",
        "?",
        "/?[",
        "/%",
        "/%zz",
        "/%ff%00",
        "//",
        "/catalog//[",
    ),
    *("http://testserver]/catalog/", "/catalog/../", "/catalog/runs/[", "[/catalog/", "/catalog", "a:b@["),
]


@pytest.mark.soak
def test_odd_targets(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.sqlite"
    open_catalog(str(catalog)).close()
    with live.page(catalog, TOKEN) as (_, address):
        host, port = address.removeprefix("http://").split(":")
        for number, target in enumerate(TARGETS):
            for method in ("GET", ("POST", "HEAD", "OPTIONS", "CONNECT")[number % 4]):
                with socket.create_connection((host, int(port)), timeout=60) as client:
                    client.sendall(
                        f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                    )
                    answer = client.recv(200)
                assert answer.split(b" ")[1][:1] in (b"2", b"3", b"4"), (method, target, answer)
    assert "Traceback" not in (tmp_path / "page.log").read_text()
