"""Test that a source is deleted only if a verified child fully replaces it, and no user wants to keep it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from checkpoints import save
from retiring import delete_now as retire
from torch import arange, ones
from torch import save as torch_save

from ckptcore.catalog import aliases, holds, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.training import facts_of_pairs
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts
from ckptcore.custody import holdings
from ckptcore.custody.set_aside import LocalSetAside
from ckptcore.errors import CatalogError, Conflict
from ckptcore.operations.options import RetireOptions
from ckptcore.operations.retention import replacement as module
from ckptcore.operations.retention import setting_aside
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.operations.retention.root_retention import rules
from ckptcore.planning.request import Request, Settings

MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)


@pytest.fixture
def made(runs, url, watch, tmp_path):
    """Three steps, watched and converted with fingerprints; step -> source."""
    watch()
    sources = {n: save(runs / "llama" / f"step-{n}", n) for n in (1, 2, 3)}
    for n, source in sources.items():
        convert(Request(str(source), str(tmp_path / f"out/step-{n}")), MEANS, None, url)
    return sources


@pytest.fixture
def retired(catalog):
    """Return a function that applies keep-last 1: (options) -> fate and reasons by step."""

    def go(yes=True, last=1, **more):
        found = retire(catalog, Policy(last), yes=yes, **more)
        return {i.source.step: (i.fate.value, i.why) for i in found.items}

    return go


def fates(found):
    return {step: fate for step, (fate, _) in found.items()}


def test_nothing_is_deleted_by_default(made, retired):
    assert fates(retired(yes=False)) == {1: "to retire", 2: "to retire", 3: "kept"}
    assert all(source.exists() for source in made.values())


def test_what_a_verified_child_holds_is_deleted_and_stays_known(made, retired, catalog, tmp_path):
    before = datetime.now(UTC)
    assert fates(retired()) == {1: "deleted", 2: "deleted", 3: "kept"}
    assert sorted(p.name for p in made[1].parent.iterdir()) == ["step-3"]
    row = catalog.show(str(made[1])).checkpoint
    assert row.state == "deleted"
    assert row.deleted_at >= before
    lines = catalog.lineage(str(tmp_path / "out/step-1"))
    assert lines.ancestors[0].source.uri == str(made[1])
    assert fates(retired()) == {3: "kept"}
    save(made[1], 1)  # the same bytes come back: they are there again
    catalog_validate(catalog, made[1])
    restored = catalog.show(str(made[1])).checkpoint
    assert (restored.state, restored.deleted_at) == ("present", None)


def catalog_validate(catalog, source):
    catalog.record_validation(facts(inspect(str(source)), str(source)), ())


def test_tags_aliases_and_holds_keep(made, retired, catalog):
    catalog.tag(str(made[1]), "paper", "yes")
    with catalog.writing() as conn:
        aliases.set_alias(conn, datetime.now(UTC), "best", str(made[2]))
    found = retired()
    assert found[1] == ("kept", ("tagged paper",))
    assert found[2] == ("kept", ("alias best",))
    with catalog.writing() as conn:
        aliases.remove(conn, "best")
        holds.place(conn, datetime.now(UTC), str(made[2]), "audit")
    assert retired()[2] == ("kept", ("held: audit",))


def test_the_source_of_what_is_promoted_is_kept(made, retired, catalog, tmp_path, url):
    """Also where it was made in two steps."""
    convert(Request(str(tmp_path / "out/step-1"), str(tmp_path / "again")), MEANS, None, url)
    with catalog.writing() as conn:
        aliases.set_alias(conn, datetime.now(UTC), "prod", str(tmp_path / "again"))
    found = retired()
    assert found[1] == ("kept", ("source of alias prod",))
    assert found[2][0] == "deleted"
    with catalog.writing() as conn:
        aliases.remove(conn, "prod")
    assert retired()[1][0] == "deleted"


def test_the_best_steps_are_kept(made, catalog, watch, tmp_path):
    """A metric of an export counts for its step; without one in the run, nothing goes."""
    asked = RetireOptions(keep_last=1, keep_best=["1:loss"])
    found = retire(catalog, *rules(asked)[:1], yes=True)
    assert {item.source.step: item.fate.value for item in found.items} == {1: "kept", 2: "kept", 3: "kept"}
    for step, loss in ((1, 2.5), (2, 2.25), (3, 2.75)):
        catalog.describe(str(tmp_path / f"out/step-{step}"), facts_of_pairs([f"metrics.loss={loss}"], "meta"))
    with catalog.writing() as conn:  # what is odd may be the best
        conn.exec_driver_sql("UPDATE metric SET value = 'x' WHERE value = 2.5")
    found = retire(catalog, *rules(asked)[:1], yes=True)
    assert {item.source.step: item.fate.value for item in found.items} == {1: "kept", 2: "kept", 3: "kept"}
    with catalog.writing() as conn:
        conn.exec_driver_sql("UPDATE metric SET value = 2.5 WHERE value = 'x'")
    found = retire(catalog, *rules(asked)[:1], yes=True)
    fates = {item.source.step: (item.fate.value, item.why[0]) for item in found.items}
    assert fates[1][0] == "deleted"
    assert fates[2] == ("kept", "one of the 1 best by loss")
    assert fates[3][0] == "kept"


def test_a_source_that_is_being_read_is_kept(made, retired, catalog):
    catalog.begin({}, source_uri=str(made[1]), destination_uri="/elsewhere", verb="export", tool_version="1")
    found = retired()
    assert found[1][0] == "kept"
    assert found[1][1][0].endswith("reads it")


@pytest.mark.parametrize("ruin", ["altered", "missing", "gone"])
def test_a_damaged_child_replaces_nothing(ruin, made, retired, tmp_path):
    out = tmp_path / "out/step-1"
    if ruin == "altered":
        data = bytearray((out / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (out / "model.safetensors").write_bytes(data)
    elif ruin == "missing":
        (out / "model.safetensors").unlink()
    else:
        shutil.rmtree(out)
    found = retired()
    assert found[1][0] == "unsafe"
    assert made[1].exists()
    assert found[2][0] == "deleted"


def test_sources_without_child_or_fingerprint_are_kept(runs, url, watch, retired, catalog, tmp_path):
    watch()
    for n in (1, 2, 3):
        save(runs / "llama" / f"step-{n}", n)
        catalog_validate(catalog, runs / "llama" / f"step-{n}")
    without = Settings(memory=32 << 20, workers=1)
    convert(Request(str(runs / "llama/step-2"), str(tmp_path / "out/step-2")), without, None, url)
    found = retired()
    assert found[1] == ("unsafe", ("it has no child",))
    assert "--fingerprint" in found[2][1][0]
    assert fates(retired(fingerprint_settings=MEANS)) == {1: "unsafe", 2: "deleted", 3: "kept"}


def test_a_child_that_lacks_a_tensor_replaces_nothing(runs, url, watch, retired, tmp_path):
    watch()
    for n in (1, 2):
        save(runs / "llama" / f"step-{n}", n)
        request = Request(str(runs / f"llama/step-{n}"), str(tmp_path / f"out/step-{n}"), exclude=("scale",))
        convert(request, MEANS, None, url)
    assert retired(fingerprint_settings=MEANS)[1][0] == "unsafe"
    assert (runs / "llama/step-1").exists()


def test_a_cast_child_is_accepted_only_on_request(runs, url, watch, retired, tmp_path):
    watch()
    for n in (1, 2):
        save(runs / "llama" / f"step-{n}", n)
        request = Request(str(runs / f"llama/step-{n}"), str(tmp_path / f"out/step-{n}"), dtype="bfloat16")
        convert(request, MEANS, None, url)
    for options in ({}, {"fingerprint_settings": MEANS}):
        found = retired(**options)
        assert (found[1][0], "--accept-loss cast" in found[1][1][0]) == ("unsafe", True)
    assert retired(allowed=Allowed.of(["*"]))[1][0] == "unsafe"  # no glob means it
    assert retired(allowed=Allowed.of(["cast"]))[1][0] == "deleted"


def test_files_and_objects_that_the_child_lacks_are_deleted_by_name_only(made, retired, tmp_path):
    torch_save({"step": 1}, made[1] / "scheduler.pt")
    found = retired()
    assert found[1][0] == "unsafe"
    assert "scheduler.pt" in found[1][1][0]
    assert (made[1] / "scheduler.pt").exists()
    assert retired(allowed=Allowed(loss=("scheduler.*",)))[1][0] == "deleted"


def test_a_source_rewritten_since_is_not_deleted(made, retired):
    data = next(made[1].glob("*.distcp"))
    raw = bytearray(data.read_bytes())
    data.write_bytes(raw)  # equal bytes, but nobody knows
    found = retired()
    assert (found[1][0], "since it was converted; --fingerprint" in found[1][1][0]) == ("unsafe", True)
    assert retired(fingerprint_settings=MEANS)[1][0] == "deleted"


def resaved(source):
    """Other values under the same names, in the same files."""
    save(source, 77)


def touched_scale(source):
    """One byte in place: neither names nor sizes change."""
    with open(next(source.glob("*.distcp")), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def one_file_more(source):
    (source / "late.pt").write_bytes(b"optimizer")


@pytest.mark.grid
@pytest.mark.parametrize("options", [{}, {"fingerprint_settings": MEANS}], ids=["known", "fingerprint"])
@pytest.mark.parametrize("happens", [resaved, touched_scale, one_file_more])
@pytest.mark.parametrize("when", ["_require_same", "_mark_retired"])
def test_a_source_saved_meanwhile_is_not_deleted(when, happens, options, made, retired, monkeypatch):
    before = getattr(setting_aside, when)

    def meanwhile(*given):
        if made[1].exists() and not (noticed := getattr(meanwhile, "once", False)):
            meanwhile.once = not noticed
            happens(made[1])
        return before(*given)

    monkeypatch.setattr(setting_aside, when, meanwhile)
    found = retired(**options)
    assert (found[1][0], "while this ran" in found[1][1][0]) == ("unsafe", True)
    assert sorted(p.name for p in made[1].parent.iterdir()) == ["step-1", "step-3"]
    assert inspect(str(made[1])).tensors


@pytest.mark.parametrize("which", ["source", "child"])
def test_a_source_saved_after_its_fingerprint_is_not_deleted(which, made, retired, tmp_path, monkeypatch):
    take, child = module.fingerprint, tmp_path / "out/step-1"

    def meanwhile(manifest, settings):
        found = take(manifest, settings)
        if which == "source" and manifest.root == str(made[1]):
            touched_scale(made[1])
        if which == "child" and manifest.root == str(child) and not made[1].exists():
            os.utime(child / "model.safetensors")  # the purge reads it
        return found

    for where in (module, holdings):
        monkeypatch.setattr(where, "fingerprint", meanwhile)
    found = retired(fingerprint_settings=MEANS)
    assert (found[1][0], "while this ran" in found[1][1][0]) == ("unsafe", True)
    assert made[1].exists()


def test_a_source_written_while_it_is_moved_is_restored(made, retired, monkeypatch):
    move = LocalSetAside.move_in

    def meanwhile(aside):
        move(aside)
        if aside.record.uri == str(made[1]):
            touched_scale(Path(aside.home, made[1].name))  # a writer that had it open

    monkeypatch.setattr(LocalSetAside, "move_in", meanwhile)
    found = retired()
    assert fates(found) == {1: "unsafe", 2: "deleted", 3: "kept"}
    assert sorted(p.name for p in made[1].parent.iterdir()) == ["step-1", "step-3"]


def test_another_checkpoint_at_its_place_is_not_deleted(made, retired):
    shutil.rmtree(made[1])
    save(made[1], 1, extra=ones(3))
    assert retired()[1][0] == "unsafe"
    assert retired(fingerprint_settings=MEANS).get(1, ("unsafe",))[0] == "unsafe"
    assert made[1].exists()


def test_only_below_watched_roots(made, retired, catalog, tmp_path, url):
    with catalog.writing() as conn:
        roots.remove(conn, "r")
        roots.add(conn, datetime.now(UTC), "other", str(tmp_path / "runs" / "lla"))
    assert retired() == {}
    assert run(["retire", "llama", "--yes", "--catalog", url]) == 2
    assert made[1].exists()


def test_a_root_of_another_case_is_another_root(made, retired, catalog, tmp_path):
    with catalog.writing() as conn:
        roots.remove(conn, "r")
        roots.add(conn, datetime.now(UTC), "other", str(tmp_path / "RUNS"))
    assert retired(yes=False) == {}


def test_a_hold_that_is_set_meanwhile_wins(made, retired, catalog, monkeypatch):
    same = setting_aside._require_same

    def meanwhile(*given):
        with open_catalog(catalog.url.removeprefix("sqlite:///")) as other, other.writing() as conn:
            if not holds.active(conn, datetime.now(UTC), str(made[1])):
                holds.place(conn, datetime.now(UTC), str(made[1]), "needed")
        return same(*given)

    monkeypatch.setattr(setting_aside, "_require_same", meanwhile)
    found = retired()
    assert found[1] == ("kept", ("held: needed, meanwhile",))
    assert made[1].exists()


def test_holds_and_deletions_race(runs, url, watch, catalog, tmp_path):
    watch()
    for n in range(9):
        convert(
            Request(str(save(runs / "llama" / f"step-{n}", n)), str(tmp_path / f"out/step-{n}")),
            MEANS,
            None,
            url,
        )
    placed = []

    def hold():
        with open_catalog(url) as mine:
            for n in reversed(range(8)):
                try:
                    with mine.writing() as conn:
                        holds.place(conn, datetime.now(UTC), str(runs / f"llama/step-{n}"), "race")
                    placed.append(n)
                except Conflict:
                    pass

    thread = threading.Thread(target=hold)
    thread.start()
    retire(catalog, Policy(1), yes=True)
    thread.join()
    left = {int(p.name.removeprefix("step-")) for p in (runs / "llama").iterdir()}
    assert left == {*placed, 8}


def test_a_failing_commit_restores_it(made, retired, monkeypatch):
    moved = []
    rename, writing = LocalSetAside.move_in, Catalog.writing

    def noted(aside):
        rename(aside)
        moved.append(aside)

    @contextmanager
    def failing(self):
        with writing(self) as conn:
            yield conn
            if moved:
                moved.clear()
                raise CatalogError("the disk of the catalog is full")

    monkeypatch.setattr(LocalSetAside, "move_in", noted)
    monkeypatch.setattr(Catalog, "writing", failing)
    found = retired()
    assert found[1] == ("unsafe", ("the disk of the catalog is full",))
    assert made[1].exists()


def test_a_deleted_checkpoint_gets_no_alias_and_no_hold(made, retired, catalog):
    retired()
    with pytest.raises(Conflict, match="was deleted"), catalog.writing() as conn:
        aliases.set_alias(conn, datetime.now(UTC), "best", str(made[1]))
    with pytest.raises(Conflict, match="was deleted"), catalog.writing() as conn:
        holds.place(conn, datetime.now(UTC), str(made[1]), "late")


def test_files_that_are_one_save_each(runs, url, watch, retired, tmp_path):
    watch()
    (runs / "pl").mkdir()
    for n in (1, 2):
        torch_save({"w": arange(4) + n}, runs / "pl" / f"step={n}.pt")
        convert(Request(str(runs / f"pl/step={n}.pt"), str(tmp_path / f"o{n}.safetensors")), MEANS, None, url)
    assert fates(retired()) == {1: "deleted", 2: "kept"}
    assert [p.name for p in (runs / "pl").iterdir()] == ["step=2.pt"]


def test_a_file_saved_meanwhile_is_not_deleted(runs, url, watch, retired, tmp_path, monkeypatch):
    watch()
    (runs / "pl").mkdir()
    for n in (1, 2):
        torch_save({"w": arange(4) + n}, runs / "pl" / f"step={n}.pt")
        convert(Request(str(runs / f"pl/step={n}.pt"), str(tmp_path / f"o{n}.safetensors")), MEANS, None, url)
    same = setting_aside._require_same

    def meanwhile(*given):
        torch_save({"w": arange(4) + 7}, runs / "pl" / "step=1.pt")
        return same(*given)

    monkeypatch.setattr(setting_aside, "_require_same", meanwhile)
    assert fates(retired()) == {1: "unsafe", 2: "kept"}
    assert len(list((runs / "pl").iterdir())) == 2


def test_the_command_line(made, url, capsys):
    assert run(["retire", "--keep-last", "1", "--catalog", url]) == 0
    text = capsys.readouterr().out
    assert "no source was changed, --yes sets them aside" in text
    assert "1 kept, 2 to retire" in text
    assert made[1].exists()
    assert (
        run(
            [
                "retire",
                "r",
                "--keep-last",
                "1",
                "--keep-every",
                "2",
                "--yes",
                "--catalog",
                url,
                "--output",
                "json",
            ]
        )
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["counts"] == {"retired": 1, "kept": 2}
    assert answer["checkpoints"][0]["why"][0] == "not one of the last 1, not of every 2"
    assert not made[1].exists()
    assert run(["retire", "--keep-last", "0", "--catalog", url]) == 2
    assert os.listdir(made[2].parent)


def test_an_export_that_failed_its_verification_replaces_nothing(made, retired, catalog, tmp_path):
    written = catalog.show(str(tmp_path / "out/step-1")).written_by[0].id
    catalog.record_verdict(written, [("fingerprints", "failed", "w differs")])
    found = retired()
    assert found[1][0] == "unsafe"
    assert "failed when it was verified as an export" in " ".join(found[1][1])
    assert fates(found)[2] == "deleted"
    assert made[1].exists()
    catalog.record_verdict(written, [("fingerprints", "ok", "equal")])
    assert fates(retired())[1] == "deleted"
