"""Every loop over items: an exception that nobody foresaw, in one of them, is that one's finding."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from checkpoints import save
from prepared import Prepared
from safetensors.torch import load_file
from sqlalchemy import func, select, text

from ckptcore.catalog import claims as claim_rows
from ckptcore.catalog import open_catalog, sightings
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.models import Checkpoint, Conversion
from ckptcore.conversion import batch, pipeline, registration
from ckptcore.conversion.batch import convert_batch
from ckptcore.conversion.pipeline import convert
from ckptcore.custody import upkeep
from ckptcore.errors import SourceUnreadable
from ckptcore.operations import claims, readiness, rebuild_catalog, scrub
from ckptcore.operations.automation import sweep
from ckptcore.operations.export_target import ExportTarget
from ckptcore.operations.options import RetireOptions
from ckptcore.operations.retention import purge, retire
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.root_retention import rules
from ckptcore.planning.request import Settings

AT_ONCE = sweep.SweepSettings(settle_s=0)

SETTINGS = Settings(memory=256 << 20)
NUMBERS = (0, 7, 9)
ODD = "step-7"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return Prepared(tmp_path_factory.mktemp("items") / "place")


@pytest.fixture
def place(request, prepared):
    """A folder: empty, with steps under a root that is watched, or with what a sweep made of them."""
    state = next((name for name in ("converted", "steps") if name in request.fixturenames), None)
    return prepared.empty() if state is None else prepared.restore(state, PREPARE[state])


@pytest.fixture
def url(place):
    return str(place / "catalog.sqlite")


@pytest.fixture
def runs(place):
    (place / "runs" / "llama").mkdir(parents=True, exist_ok=True)
    return place / "runs"


@pytest.fixture
def steps(place):
    return place / "exports"


@pytest.fixture
def converted(place):
    return place / "exports"


def save_steps(place):
    for step in NUMBERS:
        save(place / "runs" / "llama" / f"step-{step}", step)
    target = {"destination": "{root}/../exports/{name}"}
    with open_catalog(str(place / "catalog.sqlite")) as opened, opened.writing() as conn:
        roots.add(conn, datetime.now(UTC), "r", str(place / "runs"), targets=[target])


def convert_steps(place):
    save_steps(place)
    url = str(place / "catalog.sqlite")
    with open_catalog(url) as opened:
        items = sweep_all(opened, url, together=True)
    assert {item.standing.value for item in items.values()} == {"made"}


PREPARE = {"steps": save_steps, "converted": convert_steps}


@pytest.fixture(params=["batch", pytest.param("one by one", marks=pytest.mark.soak)])
def swept(request, catalog, url):
    """Return a function that sweeps as the command does, or as a flow on other machines."""
    return lambda: sweep_all(catalog, url, request.param == "batch")


def sweep_all(catalog, url, together):
    found = sweep.sweep(
        catalog,
        lambda r: convert(r, SETTINGS, None, url),
        settings=sweep.SweepSettings(settle_s=0, retry_failed=True),
        convert_each=(lambda r: convert_batch(r, SETTINGS, catalog, catalog_url=url)) if together else None,
    )
    return {item.source.rsplit("/", 1)[-1]: item for item in found.items}


class Breaks:
    """Replaces functions so that they raise for one item: a name in the text of any argument."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.armed, self.raised = monkeypatch, True, 0

    def __call__(self, owner, name, odd=ODD, kind=RuntimeError):
        inner = getattr(owner, name)

        def breaking(*args, **more):
            places = [getattr(a, n, "") for a in args for n in ("destination", "home")]  # of folders beside
            if self.armed and odd in repr((args, more, places)):
                self.raised += 1
                raise kind("unforeseen")
            return inner(*args, **more)

        self.monkeypatch.setattr(owner, name, breaking)


@pytest.fixture
def breaks(monkeypatch):
    return Breaks(monkeypatch)


def conversions(catalog):
    with catalog.reading() as conn:
        return dict(conn.execute(select(Conversion.state, func.count()).group_by(Conversion.state)).all())


# (module, function, what becomes of the odd one): where the sweep may meet what nobody foresaw.
SWEEP = {
    "its names": (ExportTarget, "request", "refused"),
    "its look": (sweep, "look", "unread"),
    "its state": (sightings, "note", "unread"),
    "its claim": (sweep, "_compared_with_target", "unread"),
    "its earlier output": (sweep, "_made_before", "failed"),
    "taking its claim": (claim_rows, "take", "failed"),
    "reading it": (pipeline, "inspect", "failed"),
    "planning it": (pipeline, "compose", "failed"),
    "publishing it": (pipeline, "finish_staged", "failed"),
    "the facts of its row": (registration, "_made", "failed"),
    "facts about its training": (registration, "stored_facts", "made"),
    "recording it": (Catalog, "succeed_each", "failed"),
    "its proof": (registration, "_keep_verdicts", "failed"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if number % 3 == 0 else pytest.mark.soak)
        for number, case in enumerate(SWEEP)
    ],
)
def test_one_checkpoint_of_a_sweep(catalog, steps, swept, breaks, case):
    owner, name, standing = SWEEP[case]
    if case == "recording it":
        breaks(Catalog, "succeed")  # where one is converted alone
    breaks(owner, name)
    items = swept()
    assert breaks.raised
    others = {n: i.standing.value for n, i in items.items() if n != ODD}
    assert others == {"step-0": "made", "step-9": "made"}
    odd = items.get(ODD)
    assert odd is not None
    assert odd.standing.value == standing
    assert standing == "made" or "unforeseen" in odd.why
    assert conversions(catalog).keys() <= {"succeeded", "failed"}
    # What was published is registered by the next run, and everything else is made by it.
    breaks.armed = False
    after = swept()
    assert {i.standing.value for i in after.values()} <= {"made", "converted"}
    assert conversions(catalog)["succeeded"] == 3
    assert all((steps / f"step-{n}" / "model.safetensors").exists() for n in NUMBERS)
    assert float(load_file(steps / ODD / "model.safetensors")["scale"]) == 7


# Where a sweep may meet what nobody foresaw of one root, and what has become of that root's checkpoints.
ROOT = {"looking through it": ("look_through", 0), "recording it": ("note_swept", 1)}


@pytest.mark.parametrize("case", ROOT)
def test_one_root_of_a_sweep(catalog, runs, watch, swept, breaks, case):
    for name in ("llama", "olmo"):
        save(runs / name / "step-7", 7)
        watch(name, include=[f"{name}/*"], destination="{root}/../exports/{run}-{name}")
    function, converted = ROOT[case]
    breaks(sweep, function, odd="name='llama'")
    found = swept()
    assert breaks.raised
    assert found["runs"].standing.value == "unread"
    assert found["runs"].root == "llama"
    assert "unforeseen" in found["runs"].why
    assert conversions(catalog) == {"succeeded": 1 + converted}
    breaks.armed = False
    assert {i.standing.value for i in swept().values()} <= {"made", "converted"}
    assert conversions(catalog) == {"succeeded": 2}


def test_a_claim_that_cannot_be_renewed_is_renewed_later(catalog, steps, swept, breaks, monkeypatch):
    monkeypatch.setattr(claim_rows, "LEASE", claim_rows.LEASE / 1e6)
    breaks(claims.claims, "renew", odd="")
    assert {i.standing.value for i in swept().values()} == {"made"}


def test_an_error_of_a_batch_converts_each_alone(catalog, steps, url, breaks):
    """A batch that ends with an exception is converted one by one: outputs that are there are registered."""

    def convert_each(requests):
        done = convert_batch(requests, SETTINGS, catalog, catalog_url=url)
        if len(requests) > 1:
            raise RuntimeError("unforeseen")
        return done

    found = sweep.sweep(
        catalog, lambda r: convert(r, SETTINGS, None, url), settings=AT_ONCE, convert_each=convert_each
    )
    assert {i.standing.value for i in found.items} <= {"made", "converted"}
    assert conversions(catalog)["succeeded"] >= 3


def test_nothing_runs_after_settings_that_do_not_fit(catalog, steps, url, monkeypatch):
    monkeypatch.setattr(batch, "_shares", lambda *_: (_ for _ in ()).throw(RuntimeError("unforeseen")))
    found = sweep.sweep(
        catalog,
        lambda r: convert(r, SETTINGS, None, url),
        settings=AT_ONCE,
        convert_each=lambda r: convert_batch(r, SETTINGS, catalog, catalog_url=url),
    )
    assert {i.standing.value for i in found.items} == {"failed"}
    assert "running" not in conversions(catalog)


SCRUB = {
    "reading it": (scrub, "prove"),
    "its row": (Catalog, "show"),
    "recording it": (scrub, "_record_look"),
}


def test_one_checkpoint_of_a_scrub(catalog, converted, monkeypatch):
    with catalog.reading() as conn:
        odd = conn.execute(
            select(Checkpoint.uuid).where(Checkpoint.uri.endswith(f"runs/llama/{ODD}"))
        ).scalar_one()
    for case, (owner, name) in SCRUB.items():
        with monkeypatch.context() as patch:
            breaks = Breaks(patch)
            breaks(owner, name, odd=odd)
            report = scrub.scrub(catalog, share=1.0)
        assert breaks.raised, case
        assert len(report.looked) == 6, case
        wrong = [look for look in report.looked if look.proven.proof.value not in ("proven", "unproven")]
        assert [look.checkpoint.id for look in wrong] == [odd], case
        assert "unforeseen" in wrong[0].proven.message, case
        assert report.exit_code == 1, case


def test_one_place_of_a_rebuild(catalog, steps, runs, monkeypatch):
    functions = ("validate", "facts", "_adopted", "_checkpoints_at")
    cases = [(name, RuntimeError, "internal") for name in functions]
    cases += [(name, SourceUnreadable, "source-unreadable") for name in ("validate", "_adopted")]
    for name, kind, expected in cases:
        with monkeypatch.context() as patch:
            breaks = Breaks(patch)
            breaks(rebuild_catalog, name, kind=kind)
            rebuilt = rebuild_catalog.rebuild(catalog, [str(runs / "llama" / f"step-{n}") for n in NUMBERS])
        assert breaks.raised, name
        assert {row.uri.rsplit("/", 1)[-1] for row in rebuilt.recorded} == {"step-0", "step-9"}, name
        ((uri, code, message),) = rebuilt.left_out
        assert uri.endswith(ODD), name
        assert code == expected, name
        assert "unforeseen" in message, name


def test_a_defect_while_a_place_is_checked_is_not_remembered(steps, swept, breaks):
    """Nothing is remembered of it: the next sweep looks once more."""
    breaks(readiness, "validate", odd=ODD)
    assert swept()[ODD].standing.value == "unread"
    breaks.armed = False
    assert swept()[ODD].standing.value == "made"


NONE, WEEKS = timedelta(0), timedelta(weeks=2)


def retired(catalog, grace=NONE, keep=1):
    """What becomes of each source where only the newest stay; both sides of a proof are read."""
    report = retire.retire(
        catalog, Policy(keep), yes=True, grace=grace, fingerprint_settings=SETTINGS, verify_settings=SETTINGS
    )
    return {item.source.uri.rsplit("/", 1)[-1]: item for item in report.items}


RETIRE = {
    "its rule": "_rules",
    "its root": "root_above",
    "its proof": "find_replacement",
    "what is in it": "inside_of",
    "setting it aside": "put_aside",
    "purging it": "purge_one",
}


def test_one_source_of_retire(place, converted, monkeypatch, prepared):
    """Whatever breaks for one source, the other one goes."""
    odd = place / "runs" / "llama" / ODD
    before = {p: p.read_bytes() for p in odd.rglob("*") if p.is_file()}
    for case, function in RETIRE.items():
        prepared.restore("converted", convert_steps)
        with open_catalog(str(place / "catalog.sqlite")) as catalog:
            with monkeypatch.context() as patch:
                breaks = Breaks(patch)
                breaks(retire, function)
                items = retired(catalog)
            assert breaks.raised, case
            fates = {name: item.fate.value for name, item in items.items()}
            assert fates == {"step-0": "deleted", ODD: "unsafe", "step-9": "kept"}, case
            assert "unforeseen" in " ".join(items[ODD].why), case
            assert {p: p.read_bytes() for p in odd.rglob("*") if p.is_file()} == before, case
            if case == list(RETIRE)[-1]:
                assert retired(catalog)[ODD].fate.value == "deleted"
    assert not odd.exists()


def test_a_source_that_cannot_be_listed_is_kept_as_the_others_are(catalog, converted, breaks):
    breaks(retire, "contents")
    found = retire.retire(catalog, Policy(3))
    assert breaks.raised
    assert sorted(item.files is None for item in found.items) == [False, False, True]


PURGE = ("_opened", "_source_of", "purge_one", "_give_to_child", "_read_child", "require_sound")


def test_one_thing_of_a_purge(catalog, converted, runs, monkeypatch):
    retired(catalog, timedelta(weeks=1))

    def purged():
        report = purge.purge(catalog, SETTINGS, None, due=catalog.now() + WEEKS)
        return {item.uri.rsplit("/", 1)[-1]: item for item in report}

    others = {"step-0": "purged"}  # by the first of them
    for name in PURGE:
        with monkeypatch.context() as patch:
            breaks = Breaks(patch)
            breaks(purge, name)
            items = purged()
        assert breaks.raised, name
        assert {n: item.fate for n, item in items.items()} == {ODD: "kept"} | others, name
        assert "unforeseen" in items[ODD].why, name
        others = {}
    assert {n: item.fate for n, item in purged().items()} == {ODD: "purged"}


def test_an_odd_row_of_what_is_set_aside_is_one_row(catalog, converted):
    retired(catalog, timedelta(weeks=1))
    with catalog.writing() as conn:
        conn.execute(text(f"UPDATE set_aside SET due_at = 'x' WHERE uri LIKE '%{ODD}'"))
    listed = {item.uri.rsplit("/", 1)[-1]: item for item in purge.waiting(catalog, None)}
    assert {n: item.fate for n, item in listed.items()} == {"step-0": "waiting", ODD: "kept"}
    assert "due_at holds 'x'" in listed[ODD].why
    found = {
        i.uri.rsplit("/", 1)[-1]: i for i in purge.purge(catalog, SETTINGS, None, due=catalog.now() + WEEKS)
    }
    assert {n: item.fate for n, item in found.items()} == {"step-0": "purged", ODD: "kept"}
    assert "due_at holds 'x'" in found[ODD].why


def test_an_odd_folder_of_what_is_set_aside_is_one_row(catalog, converted):
    retired(catalog, timedelta(weeks=1))
    with catalog.writing() as conn:
        conn.execute(text(f"UPDATE set_aside SET record = :odd WHERE uri LIKE '%{ODD}'"), {"odd": b"\xff"})
    found = list(purge.purge(catalog, SETTINGS, None, due=catalog.now() + WEEKS))
    assert {i.fate for i in found if i.uri.endswith("step-0")} == {"purged"}
    odd = [item for item in found if item.uri.endswith(ODD)]
    assert {i.fate for i in odd} == {"kept"}
    assert any("record holds b'" in item.why for item in odd)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE checkpoint SET origin = '{{' WHERE uri LIKE '%runs/llama/{odd}'",
        "UPDATE checkpoint SET total_bytes = 'x' WHERE uri LIKE '%exports/{odd}'",
        "UPDATE conversion SET request = '[]' WHERE source_uri LIKE '%/{odd}'",
    ],
)
def test_nothing_is_deleted_by_an_odd_row(catalog, converted, runs, statement):
    with catalog.writing() as conn:
        conn.execute(text(statement.format(odd=ODD)))
    items = retired(catalog)
    assert {n: item.fate.value for n, item in items.items()} == {
        "step-0": "deleted",
        ODD: "unsafe",
        "step-9": "kept",
    }
    assert "cannot be used" in " ".join(items[ODD].why)
    assert (runs / "llama" / ODD).exists()


@pytest.mark.parametrize("target", ["{", '{"retention": 3}', '{"retention": {"keep_lots": 1}}'])
def test_an_odd_rule_of_a_root_deletes_nothing(catalog, converted, runs, target):
    """What the root keeps is not known then: the defaults are not what its user wants."""
    with catalog.writing() as conn:
        conn.execute(text("UPDATE watched_roots SET target = :odd"), {"odd": target})
    policy, allowed = rules(RetireOptions(keep_last=1))
    asked = partial(rules, RetireOptions(keep_last=1))
    means = {"fingerprint_settings": SETTINGS, "verify_settings": SETTINGS}
    found = retire.retire(catalog, policy, yes=True, grace=NONE, allowed=allowed, of_root=asked, **means)
    assert {item.fate.value for item in found.items} == {"unsafe", "kept"}
    whys = {item.why[0] for item in found.items if item.fate.value == "unsafe"}
    assert all(" holds " in why or "no field keep_lots" in why for why in whys), whys
    assert (runs / "llama" / ODD).exists()


@pytest.mark.parametrize("name", ["recorded_ids", "recorded_obligation"])
def test_one_obligation(catalog, converted, breaks, name):
    retired(catalog)
    assert len(upkeep.listed(catalog)) == 2
    with catalog.writing() as conn:
        conn.execute(text("UPDATE checkpoint SET state = 'gone' WHERE uri LIKE '%exports/step-0'"))
    breaks(upkeep, name)
    lost = upkeep.look_after(catalog)
    assert breaks.raised
    assert lost > 0
    assert sorted(each.lost > 0 for each in upkeep.listed(catalog)) == [False, True]


def test_one_record_of_an_obligation(catalog, converted, breaks):
    retired(catalog)
    with catalog.writing() as conn:
        conn.execute(text("DELETE FROM obligation"))
    breaks(upkeep, "read_obligations")
    places = [str(converted / name) for name in ("step-0", ODD)]
    count, (unread,) = upkeep.read_records(catalog, places)
    assert (count, "unforeseen" in unread) == (1, True)
    breaks.armed = False
    assert upkeep.read_records(catalog, places) == (1, ())
