"""The catalog page: what it shows, who may see and change it, and what other sites cannot make it do."""

from __future__ import annotations

import html
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from catalog_page import TOKEN, Facts, access, browser, text_of
from fastapi import Request
from fastapi.testclient import TestClient

from ckptcore.catalog import ConversionFacts, audit
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.queues import NewEvent, inbox
from ckptcore.catalog.training import ANNOUNCED, read_facts
from ckptcore.errors import Finding, UsageError
from ckptcore.page.access import address_of
from ckptcore.page.settings import PageTable, access_of, plain_address

EVIL = "<script>alert(1)</script>\x1b[31m\u202egnp"


@pytest.fixture
def filled(catalog: Catalog, facts: Facts) -> dict[str, str]:
    """A run with two steps, one of them damaged, and their exports; return ids by name."""
    ids = {}
    for step, loss in ((10, 2.5), (20, 1.5)):
        known, _ = read_facts(
            {"metrics": {"loss": loss}, "git_commit": "3f9a", "user": "ada", "config": {"lr": 1}}
        )
        source = facts(
            f"/r/llama/step-{step}",
            run="llama",
            step=step,
            training=((ANNOUNCED, known),),
            verified="coverage",
        )
        extra = [("README.md", 1, None), *([("config.json", 1, None)] if step == 20 else [])]
        derived = facts(
            f"/out/llama/{step}", content=f"e{step}", extra=extra, verified="coverage", fingerprint="ab" * 32
        )
        conversion = catalog.begin(
            {"verb": "export", "dtype": "bf16"},
            source_uri=source.uri,
            destination_uri=derived.uri,
            verb="export",
            tool_version="0.1.0",
        )
        ids[f"export {step}"] = catalog.succeed(
            conversion, ConversionFacts("p" * 64, 1, 2, 3, {"plan": 0.5}), source=source, derived=derived
        )
        ids[f"conversion {step}"] = conversion
        ids[f"source {step}"] = catalog.show(source.uri).checkpoint.id
    hole = Finding("hole", "coverage", "rows 2 to 4 are missing", "norm", None, "save it again", "error")
    ids["damaged"] = catalog.record_validation(facts("/r/llama/step-30", run="llama", step=30), [hole])
    catalog.record_verdict(ids["conversion 20"], [("values", "ok", "all equal")])
    return ids


def log_in(client: TestClient) -> str:
    """Begin a session; return the token of its forms."""
    assert client.post("/login", data={"token": TOKEN}).status_code == 303
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', client.get("/").text)
    assert found is not None
    return found[1]


def test_every_page_shows_what_is_recorded(client: TestClient, filled: dict[str, str]) -> None:
    runs = text_of(client.get("/").text)
    assert "llama" in runs
    assert "10 to 30" in runs
    run = client.get("/runs/llama").text
    assert "1 error" in run
    assert run.count("no engine opens it") == 1
    assert ">2.5<" in run
    page = text_of(client.get(f"/checkpoints/{filled['export 20']}").text)
    for text in (
        "coverage",
        "export verdict",
        "values ok",
        "3f9a",
        "loss",
        "layers.0.weight",
        "4 \xd7 8",
        "bfloat16",
    ):
        assert text in page, text
    assert "No engine opens this export" in text_of(client.get(f"/checkpoints/{filled['export 10']}").text)
    damaged = text_of(client.get(f"/checkpoints/{filled['damaged']}").text)
    assert "rows 2 to 4 are missing" in damaged
    conversion = text_of(client.get(f"/conversions/{filled['conversion 20']}").text)
    assert '"dtype": "bf16"' in conversion
    compared = text_of(
        client.get("/compare", params={"left": "/r/llama/step-10", "right": "/out/llama/20"}).text
    )
    assert "4 not comparable without fingerprints" in compared
    best = text_of(client.get("/best?metric=loss").text)
    assert best.index("/r/llama/step-20") < best.index("/r/llama/step-10")
    for path in (
        "/checkpoints",
        "/conversions",
        "/inbox",
        "/audit",
        "/retire",
        "/login",
        "/best",
        "/aliases",
        "/roots",
        "/outbox",
        "/compare",
    ):
        assert client.get(path).status_code == 200, path


def test_search_finds_ids_places_digests_and_fingerprints(client: TestClient, filled: dict[str, str]) -> None:
    digest = b"e20".hex().ljust(64, "0")
    for what in (
        filled["export 20"],
        filled["export 20"][:13],
        "/out/llama/20",
        digest,
        digest[:12],
        "ab" * 32,
    ):
        assert f"/checkpoints/{filled['export 20']}" in client.get("/search", params={"q": what}).text, what
    assert 'href="/runs/llama"' in client.get("/search?q=lla").text
    assert "Nothing is known" in client.get("/search?q=nothing").text


def test_search_opens_no_file_of_the_machine(
    client: TestClient, tmp_path: Path, catalog: Catalog, facts: Facts
) -> None:
    from ckptcore.catalog.lineage import digests_of_file

    place = tmp_path / "secret.bin"
    place.write_bytes(b"x" * 100)
    [digest] = digests_of_file(str(place), [""])
    catalog.record_validation(facts("/known", content="k", files=[("f", 100, digest)]))
    assert "/known" in text_of(client.get("/search", params={"q": digest}).text)
    assert "Nothing is known" in client.get("/search", params={"q": str(place)}).text


def test_names_with_markup_and_control_characters(client: TestClient, catalog: Catalog, facts: Facts) -> None:
    known, _ = read_facts(
        {"metrics": {EVIL: 1.0}, "user": EVIL, "job_url": "javascript:alert(1)", "extra": {EVIL: EVIL}}
    )
    hostile = facts(
        f"/r/{EVIL}/step-1",
        run=EVIL,
        step=1,
        format=EVIL,
        tensors=[(EVIL, EVIL, (2,), 8)],
        files=[(EVIL, 1, None)],
        training=((ANNOUNCED, known),),
    )
    ref = catalog.record_validation(hostile, [Finding(EVIL, "coverage", EVIL, EVIL, EVIL, EVIL, "error")])
    catalog.tag(ref, "evil", EVIL)
    run = client.get("/").text
    address = re.search(r'href="(/runs/[^"]+)"', run)
    assert address is not None
    pages = [run, client.get(html.unescape(address[1])).text, client.get(f"/checkpoints/{ref}").text]
    pages += [
        client.get("/search", params={"q": EVIL}).text,
        client.get("/best", params={"metric": EVIL}).text,
    ]
    pages += [
        client.get(f"/runs/{quote(EVIL)}x").text,
        client.get("/compare", params={"left": EVIL, "right": EVIL}).text,
    ]
    for page in pages:
        assert "<script>alert" not in page
        assert 'href="javascript:' not in page
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", page)
    assert "\\x1b[31m\\u202egnp" in html.unescape(pages[2].replace("<wbr>", ""))


def test_headers_restrict_what_a_page_may_do(client: TestClient, filled: dict[str, str]) -> None:
    for path in ("/", f"/checkpoints/{filled['export 20']}", "/static/page.css", "/nothing", "/api/v1/runs"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';"), path
        assert headers["x-content-type-options"] == "nosniff"
    page = client.get(f"/checkpoints/{filled['export 20']}").text
    # The policy forbids what a page contains itself: handlers, styles, scripts of other hosts.
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script>|https?://", page)


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.2", "", "testserver@evil"]
)
def test_a_forged_host_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "Training runs" not in answer.text


def test_the_port_of_a_host_does_not_matter(client: TestClient) -> None:
    assert client.get("/", headers={"host": "LOCALHOST:8790"}).status_code == 200


def test_changes_need_a_login_and_are_recorded(
    client: TestClient, catalog: Catalog, filled: dict[str, str]
) -> None:
    ref = filled["export 20"]
    assert client.post(f"/checkpoints/{ref}/alias", data={"name": "best"}).status_code == 401
    assert client.post("/login", data={"token": "wrong-token-of-24-characters"}).status_code == 401
    csrf = log_in(client)
    named = {"name": "best", "csrf": csrf}
    refused = client.post(f"/checkpoints/{filled['export 10']}/alias", data=named)
    assert (refused.status_code, "--force" in refused.text) == (409, True)
    assert client.post(f"/checkpoints/{ref}/alias", data=named).status_code == 303
    hold = {"reason": "paper", "until": "2999-01-31", "csrf": csrf}
    assert client.post(f"/checkpoints/{ref}/hold", data=hold).status_code == 303
    page = client.get(f"/checkpoints/{ref}?done=hold").text
    assert "The hold was placed." in page
    assert "best" in text_of(page)
    release = re.search(r'action="(/holds/[^"]+)"', page)
    assert release is not None
    assert client.post(release[1], data={"csrf": csrf}).status_code == 303
    assert client.post(release[1], data={"csrf": csrf}).status_code == 404
    with catalog.queueing() as conn:
        row, _ = inbox.accept(conn, *_event())
        [taken] = inbox.take(conn, _event()[0], limit=1, lease=_lease(), only=["hooks"])
        inbox.failed(conn, _event()[0], taken, "no such folder")
    assert client.post(f"/inbox/{row.id}/retry", data={"csrf": csrf}).status_code == 303
    with catalog.reading() as conn:
        changes = [(r.actor, r.via, r.action) for r in audit.listed(conn)]
    assert changes == [
        ("ada", "page", "inbox.retry"),
        ("ada", "page", "hold.release"),
        ("ada", "page", "hold.place"),
        ("ada", "page", "alias.set"),
    ]
    assert "alias.set" in client.get("/audit").text
    assert client.post("/logout", data={"csrf": csrf}).status_code == 303


def _event() -> tuple[Any, NewEvent]:
    from datetime import UTC, datetime

    return datetime(2026, 1, 1, tzinfo=UTC), NewEvent("hooks", "e1", uri="/r/llama/step-20", body="{}")


def _lease() -> Any:
    from datetime import timedelta

    return timedelta(minutes=1)


def test_another_site_cannot_change_anything(
    client: TestClient, catalog: Catalog, filled: dict[str, str]
) -> None:
    csrf = log_in(client)
    target = f"/checkpoints/{filled['export 20']}/alias"
    good = {"name": "best", "csrf": csrf}
    refused: list[tuple[dict[str, str], dict[str, str], int]] = [
        ({"name": "best"}, {}, 403),
        ({"name": "best", "csrf": "0" * 64}, {}, 403),
        (good, {"origin": "https://evil.example"}, 403),
        (good, {"origin": "null"}, 403),
        (good, {"sec-fetch-site": "cross-site"}, 403),
        (good, {"sec-fetch-site": "same-site"}, 403),
    ]
    for data, headers, status in refused:
        assert client.post(target, data=data, headers=headers).status_code == status, headers
    assert client.post(target, json=good).status_code == 415
    assert client.post(target, content=b"name=a&name=b", headers=_form()).status_code == 400
    assert client.post(target, content=b"a" * 100_000, headers=_form()).status_code == 413
    assert client.get(f"{target}?name=best&csrf={csrf}").status_code in (404, 405)
    login = client.post("/login", data={"token": TOKEN}, headers={"origin": "https://evil.example"})
    assert login.status_code == 403
    with catalog.reading() as conn:
        assert audit.listed(conn) == ()


def _form() -> dict[str, str]:
    return {"content-type": "application/x-www-form-urlencoded"}


def test_a_session_cannot_be_forged_or_outlive_its_token(catalog: Catalog, filled: dict[str, str]) -> None:
    client = browser(catalog, access(open_reading=False))
    log_in(client)
    assert client.get("/").status_code == 200
    session = client.cookies["ckptcore_page"]
    body, _, signature = session.partition(".")
    for forged in (
        f"{body}.{'0' * 64}",
        f"x{body}.{signature}",
        "",
        ".",
        "a.b.c",
        f"{body}.é".encode().hex(),
    ):
        assert (
            browser(catalog, access(open_reading=False))
            .get("/", headers={"cookie": f"ckptcore_page={forged}"})
            .status_code
            == 401
        )
    gone = access(open_reading=False, tokens={"another-token-of-bob-here": "bob"})
    assert browser(catalog, gone).get("/", headers={"cookie": f"ckptcore_page={session}"}).status_code == 401


PLACES = ("/", "/runs/llama", "/checkpoints", "/api/v1/runs", "/api/v1/checkpoints", "/search?q=a", "/audit")


def test_elsewhere_reading_needs_a_login(catalog: Catalog, filled: dict[str, str]) -> None:
    far = browser(catalog, address="10.1.2.3")
    closed = browser(catalog, access(open_reading=False))
    for client in (far, closed):
        for path in PLACES:
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert "llama/" not in answer.text
        assert client.get("/api/v1/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get("/api/v1/runs", headers={"authorization": "Bearer x"}).status_code == 401
    # A proxy on this machine forwards requests from elsewhere.
    assert browser(catalog).get("/", headers={"x-forwarded-for": "8.8.8.8"}).status_code == 401


def test_named_proxies_name_the_user(catalog: Catalog, filled: dict[str, str]) -> None:
    rights = access(open_reading=False, proxies=frozenset({"10.0.0.5"}))
    named = {"x-forwarded-user": "bob"}
    proxied = browser(catalog, rights, "10.0.0.5")
    assert "Log out bob" in proxied.get("/", headers=named).text
    assert proxied.get("/").status_code == 401
    assert browser(catalog, rights, "10.0.0.6").get("/", headers=named).status_code == 401
    assert proxied.get("/", headers=[("x-forwarded-user", "a"), ("x-forwarded-user", "b")]).status_code == 401
    ref = filled["export 20"]
    blind = proxied.post(f"/checkpoints/{ref}/alias", data={"name": "best"}, headers=named)
    assert blind.status_code == 403  # the proxy adds its header to requests of other sites, too
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', proxied.get("/", headers=named).text)
    assert found is not None
    data = {"name": "best", "csrf": found[1]}
    assert proxied.post(f"/checkpoints/{ref}/alias", data=data, headers=named).status_code == 303


def test_the_api_pages_through_everything(client: TestClient, catalog: Catalog, facts: Facts) -> None:
    for step in [*range(23), None, None]:
        place = f"/many/{step}" if step is not None else f"/many/none-{step}-{len(catalog.list())}"
        catalog.record_validation(facts(place, run="many", step=step))
    for path, cursor in (("/api/v1/steps?run=many&", "before"), ("/api/v1/checkpoints?", "before")):
        seen: list[str] = []
        after: str | None = None
        for _ in range(10):
            answer = client.get(f"{path}limit=7" + (f"&{cursor}={after}" if after else "")).json()
            seen += [row["checkpoint"]["uri"] for row in answer["rows"]]
            after = answer["next"]
            if after is None:
                break
        assert len(seen) == len(set(seen)) == 25, path
    ref = catalog.show("/many/3").checkpoint.id
    first = client.get(f"/api/v1/checkpoints/{ref}/tensors?limit=2").json()
    rest = client.get(f"/api/v1/checkpoints/{ref}/tensors", params={"after": first["next"]}).json()
    names = [row["fqn"] for row in first["rows"] + rest["rows"]]
    assert names == ["layers.0.weight", "layers.1.weight", "layers.2.weight", "norm"]
    found = client.get(f"/api/v1/checkpoints/{ref}/tensors?search=1.w").json()
    assert [row["fqn"] for row in found["rows"]] == ["layers.1.weight"]


@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/checkpoints?before=x",
        "/api/v1/checkpoints?before=1:2:3",
        "/api/v1/checkpoints?before=99999999999999.000000:1",
        "/api/v1/steps?run=llama&before=s:x:1",
        "/api/v1/checkpoints?limit=0",
        "/api/v1/checkpoints?limit=501",
        "/api/v1/checkpoints?state=full",
        "/api/v1/checkpoints/xyz",
        "/api/v1/best?metric=nothing",
        "/api/v1/steps?run=nothing",
        "/api/v1/checkpoints/0123456789ab",
        "/api/v1/nothing",
    ],
)
def test_the_api_refuses_what_it_cannot_use(client: TestClient, filled: dict[str, str], path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (400, 404), answer.text
    assert set(answer.json()) == {"error", "message", "hint"}


def test_openapi_describes_the_api(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert "/api/v1/checkpoints/{ref}/tensors" in schema["paths"]
    assert not [path for path in schema["paths"] if not path.startswith("/api/v1/")]
    changing = {path for path, methods in schema["paths"].items() if set(methods) == {"post"}}
    assert changing == {
        "/api/v1/checkpoints/{ref}/aliases",
        "/api/v1/checkpoints/{ref}/holds",
        "/api/v1/holds/{hold}/release",
        "/api/v1/aliases/rollback",
        "/api/v1/inbox/{ref}/retry",
        "/api/v1/outbox/{ref}/retry",
    }
    assert all(set(methods) == {"get"} for path, methods in schema["paths"].items() if path not in changing)


def test_json_has_no_number_that_json_lacks(client: TestClient, catalog: Catalog, facts: Facts) -> None:
    known, _ = read_facts({"metrics": {"loss": float("nan")}})
    ref = catalog.record_validation(facts("/n", run="n", step=1, training=((ANNOUNCED, known),)))
    for path in (f"/api/v1/checkpoints/{ref}", "/api/v1/checkpoints"):
        text = client.get(path).text
        json.loads(text, parse_constant=lambda name: pytest.fail(name))
        assert '"nan"' in text
    assert ">nan<" in client.get("/runs/n").text


def test_the_table_of_the_receiver_is_checked() -> None:
    table = PageTable(hosts=["hooks.example"], tokens={"ada": "ADA"}, proxies=["10.0.0.5"])
    rights = access_of(table, {"ADA": TOKEN})
    assert (rights.tokens, rights.open_reading) == ({TOKEN: "ada"}, False)
    assert access_of(table, {"ADA": TOKEN}).key == rights.key  # several receivers share sessions
    wrong = PageTable(hosts=["a b"], tokens={"ada": "ADA", "bob": "BOB"}, proxies=["ten"], user_header="x y")
    with pytest.raises(UsageError) as error:
        access_of(wrong, {"ADA": "short"})
    for text in (
        "ADA is shorter",
        "BOB is not set",
        "'a b' is no host",
        "'ten' is no IP",
        "'x y' is no name",
    ):
        assert text in error.value.message
    with pytest.raises(UsageError, match="nobody can log in"):
        access_of(PageTable(hosts=["h"]), {})


def test_failed_logins_are_limited(catalog: Catalog, filled: dict[str, str]) -> None:
    from ckptcore.page.settings import MOST

    wrong = {"authorization": "Bearer wrong-token-of-24-characters"}
    rights = access(open_reading=False)
    away = browser(catalog, rights, "203.0.113.7")
    for n in range(MOST):
        answer = (
            away.post("/login", data={"token": f"wrong-token-number-{n:06}"})
            if n % 2
            else away.get("/", headers=wrong)
        )
        assert answer.status_code == 401
    right = {"authorization": f"Bearer {TOKEN}"}
    for refused in (
        away.post("/login", data={"token": TOKEN}),
        away.get("/", headers=right),
        away.get("/api/v1/runs", headers=right),
        away.post(f"/api/v1/checkpoints/{filled['export 20']}/aliases", json={"name": "a"}, headers=right),
    ):
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= 300
        assert "ada" not in refused.text
    assert away.get("/login").status_code == 200  # a page without a login
    assert browser(catalog, rights, "203.0.113.8").get("/", headers=right).status_code == 200


def test_failed_logins_are_forgotten_and_bounded() -> None:
    from ckptcore.page import settings

    now = [0.0]
    counted = settings.FailedLogins(lambda: now[0])
    for n in range(settings.MOST):
        assert counted.wait("2001:db8::1") == 0
        counted.note(f"2001:db8::{n}")  # one network
        now[0] += 1
    assert counted.wait("2001:db8::ffff") == settings.SECONDS - settings.MOST
    assert counted.wait("2001:db8:1::1") == 0
    now[0] += settings.SECONDS
    assert counted.wait("2001:db8::1") == 0
    for n in range(settings.ADDRESSES + 5):
        counted.note(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}")
    assert len(counted._failed) == settings.ADDRESSES


def test_programs_change_by_json_with_a_token(
    client: TestClient, catalog: Catalog, filled: dict[str, str]
) -> None:
    ref, token = filled["export 20"], {"authorization": f"Bearer {TOKEN}"}
    aliases, holds = f"/api/v1/checkpoints/{ref}/aliases", f"/api/v1/checkpoints/{ref}/holds"
    log_in(client)  # a session does not count: another site could use it
    assert client.post(aliases, json={"name": "best"}).status_code == 401
    assert (
        client.post(
            aliases, json={"name": "best"}, headers=token | {"origin": "https://evil.example"}
        ).status_code
        == 403
    )
    assert client.post(aliases, content=b'{"name": "best"}', headers=token).status_code == 415
    assert client.post(aliases, json={"name": "x" * (64 << 10)}, headers=token).status_code == 413
    for wrong in ({}, {"name": "best", "forced": True}, {"name": 7}, [], "best"):
        assert client.post(aliases, json=wrong, headers=token).status_code == 400
    made = client.post(aliases, json={"name": "best", "expect": ""}, headers=token)
    assert made.status_code == 200
    assert (made.json()["name"], made.json()["checkpoint"], made.json()["version"]) == ("best", ref, 1)
    assert client.post(aliases, json={"name": "best", "expect": ""}, headers=token).status_code == 409
    hold = client.post(holds, json={"reason": "paper", "until": "2999-01-31"}, headers=token).json()
    assert (hold["owner"], hold["until"][:10]) == ("ada", "2999-01-31")
    assert client.post(holds, json={"reason": "paper", "until": "soon"}, headers=token).status_code == 400
    assert client.post(f"/api/v1/holds/{hold['id']}/release", headers=token).json()["id"] == hold["id"]
    assert client.post(f"/api/v1/holds/{hold['id']}/release", headers=token).status_code == 404
    with catalog.queueing() as conn:
        row, _ = inbox.accept(conn, *_event())
        [taken] = inbox.take(conn, _event()[0], limit=1, lease=_lease(), only=["hooks"])
        inbox.failed(conn, _event()[0], taken, "no such folder")
    assert client.post(f"/api/v1/inbox/{row.id}/retry", headers=token).json() == {"events": [row.id]}
    with catalog.reading() as conn:
        found = [(r.actor, r.via, r.action) for r in audit.listed(conn)]
    assert found == [
        ("ada", "page", action) for action in ("inbox.retry", "hold.release", "hold.place", "alias.set")
    ]


def test_the_inbox_as_json_has_no_bodies(client: TestClient, catalog: Catalog) -> None:
    with catalog.queueing() as conn:
        inbox.accept(conn, datetime.now(UTC), NewEvent("slurm", "e-1", uri="/r/llama/step-1", body="secret"))
    (row,) = client.get("/api/v1/inbox").json()["rows"]
    assert (row["source"], row["state"], row["uri"]) == ("slurm", "waiting", "/r/llama/step-1")
    assert "secret" not in str(row)
    assert client.get("/api/v1/inbox?state=done").json()["rows"] == []
    assert client.get("/api/v1/inbox?state=gone").status_code == 400


@pytest.mark.parametrize(
    ("peer", "lines", "address"),
    [
        ("192.0.2.9", ["10.0.0.5", "203.0.113.1"], "192.0.2.9"),  # no proxy: what it writes does not count
        ("127.0.0.1", ["10.0.0.5"], "127.0.0.1"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("10.0.0.5", ["203.0.113.1"], "203.0.113.1"),
        ("10.0.0.5", ["198.51.100.7, 203.0.113.1"], "203.0.113.1"),  # a client wrote the first
        ("10.0.0.5", ["198.51.100.7", "203.0.113.1"], "203.0.113.1"),
        ("10.0.0.5", ["198.51.100.7, 203.0.113.1, 10.0.0.6"], "203.0.113.1"),  # through two proxies
        ("10.0.0.5", ["203.0.113.1, 10.0.0.5, 10.0.0.6"], "203.0.113.1"),
        ("10.0.0.5", ["10.0.0.6"], "10.0.0.6"),
        ("::ffff:10.0.0.5", ["203.0.113.1"], "203.0.113.1"),
        ("10.0.0.5", ["203.0.113.1:4711"], "203.0.113.1"),
        ("10.0.0.5", ["[2001:DB8::1]:4711"], "2001:db8::1"),
        ("10.0.0.5", ["2001:db8::1"], "2001:db8::1"),
        ("10.0.0.5", ["203.0.113.1, unknown"], "10.0.0.5"),
        ("10.0.0.5", ["[", "203.0.113.1, [::1"], "10.0.0.5"),
        ("10.0.0.5", [""], "10.0.0.5"),
        ("testclient", ["10.0.0.5"], ""),
    ],
)
def test_the_address_is_that_of_the_connection_or_what_named_proxies_saw(
    peer: str, lines: list[str], address: str
) -> None:
    headers = [(b"x-forwarded-for", line.encode()) for line in lines]
    request = Request({"type": "http", "client": (peer, 1), "headers": headers})
    assert address_of(request, access(proxies=frozenset({"10.0.0.5", "10.0.0.6"}))) == address
    assert address_of(request, access()) == plain_address(peer)  # nobody is named


def test_a_session_behind_tls_is_sent_by_tls_alone(catalog: Catalog) -> None:
    rights = access(open_reading=False, proxies=frozenset({"10.0.0.5"}))
    for peer, scheme, secure in (
        ("10.0.0.5", "https", True),
        ("10.0.0.5", "http", False),
        ("10.0.0.6", "https", False),
    ):
        answer = browser(catalog, rights, peer).post(
            "/login", data={"token": TOKEN}, headers={"x-forwarded-proto": scheme}
        )
        assert ("Secure" in answer.headers["set-cookie"]) == secure
