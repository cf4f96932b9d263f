"""A plan of `retire` read in parts says what the full plan says, with the retention of each root."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from ckptcore.catalog import CheckpointFacts, aliases, maintenance, open_catalog, query
from ckptcore.catalog import holds as kept
from ckptcore.catalog import watched_roots as roots
from ckptcore.operations.options import RetireOptions
from ckptcore.operations.retention.retire import plan
from ckptcore.operations.retention.root_retention import rules

NOW = datetime.now(UTC)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request, tmp_path_factory):
    """A catalog of sources under three roots: with and without runs and steps, tagged, named, kept."""
    if request.param == "sqlite":
        made = str(tmp_path_factory.mktemp("parts") / "catalog.sqlite")
        fill(made)
        yield made
        return
    from ckptcore.catalog import upgrade

    with request.getfixturevalue("postgres").database() as made:
        upgrade(made)
        fill(made)
        yield made


def fill(url):
    chance = random.Random(5)
    with open_catalog(url) as catalog:
        for place in ("/r/a", "/r/B", "/r/a/inner", "/r/a%", "/elsewhere"):
            for n in range(14):
                run = chance.choice([None, "one", "two", place])
                step = chance.choice([None, *range(8)])
                uri = f"{place}/{chance.choice('xyz')}/step-{n}" if n % 3 else f"{place}/step-{n}"
                public = catalog.record_validation(facts(uri, run, step), [])
                if n % 7 == 1:
                    catalog.tag(public, "keep", "yes")
                if n % 7 == 2:
                    with catalog.writing() as conn:
                        aliases.set_alias(conn, NOW, f"named{place.replace('%', '-')}/{n}", public)
                if n % 7 == 3:
                    with catalog.writing() as conn:
                        kept.place(conn, NOW, public, f"paper {n}", owner="ada")
        with catalog.writing() as conn:
            roots.add(conn, NOW, "lower", "/r/a", retention={"keep_last": 2})
            roots.add(conn, NOW, "upper", "/r/B", retention={"keep_every": 3})
            roots.add(conn, NOW, "inner", "/r/a/inner", retention={"keep_last": 1, "rest": "weights"})
            roots.add(conn, NOW, "odd", "/r/a%")


def facts(uri, run, step):
    return CheckpointFacts(
        uri=uri,
        format="dcp",
        manifest_digest=uri.encode().hex().ljust(64, "0")[:64],
        nbytes=64,
        tensors=[("w", "float32", (4, 4), 64)],
        files=[("__0_0.distcp", 64, None)],
        run=run,
        step=step,
    )


def stated(item):
    return item.source.id, item.fate, item.why


@pytest.mark.alike(2)
@pytest.mark.parametrize("scope", ["lower", "upper", "inner", "odd", "one", "two", "/r/a", None])
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_parts_are_the_full_plan(url, scope, limit):
    asked = RetireOptions(keep_every=4) if scope == "one" else RetireOptions()
    rules_of = partial(rules, asked)
    with open_catalog(url) as catalog:
        full = [stated(item) for item in plan(catalog, scope, rules_of)]
        found, after = [], None
        while part := list(plan(catalog, scope, rules_of, after=after, limit=limit)):
            found += [(item.source.uri, *stated(item)) for item in part]
            after = part[-1].source.id
    assert full
    assert sorted(each[1:] for each in found) == sorted(full)
    if url.startswith("/"):  # PostgreSQL sorts by its collation
        assert [each[0] for each in found] == sorted(each[0] for each in found)


def test_what_one_root_says_does_not_hold_for_another(url):
    asked = RetireOptions()
    with open_catalog(url) as catalog:
        found = {
            name: " ".join(w for i in plan(catalog, name, partial(rules, asked)) for w in i.why)
            for name in ("lower", "upper", "inner")
        }
    assert "one of the last 2" in found["lower"]
    assert "one of the last 1" in found["lower"]  # of the root inside it
    assert "a step of every 3" in found["upper"]
    assert "one of the last 2" not in found["inner"]


def test_ties_of_many_are_those_of_each(url, monkeypatch):
    with open_catalog(url) as catalog:
        with catalog.reading() as conn:
            ids = [row.id for row in maintenance.sources(conn)]
            full = maintenance.ties(conn, NOW, ids)
            monkeypatch.setattr(query, "_AT_ONCE", 3)
            assert maintenance.ties(conn, NOW, ids) == full
            assert {id: maintenance.ties(conn, NOW, [id])[id] for id in ids} == full
            assert sum(bool(each.tags) for each in full.values()) == 10
            assert sum(bool(each.aliases) for each in full.values()) == 10
            assert sum(bool(each.holds) for each in full.values()) == 10
            later = maintenance.ties(conn, NOW + timedelta(days=1), ids)
        assert later == full
        with pytest.raises(Exception, match="no checkpoint"), catalog.reading() as conn:
            maintenance.ties(conn, NOW, [*ids, "0" * 36])
