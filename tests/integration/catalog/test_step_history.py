"""The history of a run finds planted faults and stops promotion; a healthy run has no alarm."""

import copy

import pytest
import small_moe
import torch
from catalog_page import browser, text_of
from sqlalchemy import select, update

import ckptcore
from ckptcore.catalog import aliases, history, open_catalog
from ckptcore.catalog.models import Checkpoint, StepStatistics
from ckptcore.cli.catalog_render import render_history
from ckptcore.comparison.step_history import read_history, settle
from ckptcore.conversion.registration import record_statistics
from ckptcore.errors import CatalogError, Conflict
from ckptcore.page import views
from ckptcore.planning.request import Settings

STEPS = 20
EXPERT, EMBEDDING = "model.layers.1.experts.2.", "model.embed.weight"


def faulty(states):
    """The states with another step's weights, a dead expert, a NaN moment and a frozen tensor that moved."""
    states = copy.deepcopy(states)
    states[6]["model"] = copy.deepcopy(states[2]["model"])  # step 7 has the weights of step 3
    for step in range(10, STEPS):  # from step 11 on
        for name in ("layers.1.experts.2.weight", "layers.1.experts.2.bias"):
            states[step]["model"][name] = states[9]["model"][name].clone()
    states[14]["optim"]["state"]["layers.0.router.weight"]["exp_avg_sq"][0, 0] = torch.nan
    states[16]["model"]["embed.weight"][3, 3] += 0.01  # step 17, and it is what it was at step 18
    return states


FOUND = {
    *((step, "step-repeated") for step in (3, 7)),
    *((step, "expert-died") for step in range(11, STEPS + 1)),
    (15, "not-finite"),
    (17, "frozen-changed"),
}


def ask(url, statement):
    """The rows of a statement, as tuples."""
    with open_catalog(url) as catalog, catalog.reading() as conn:
        return [tuple(row) for row in conn.exec_driver_sql(statement)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """run -> (path of each step, its manifest, its statistics)."""
    root = tmp_path_factory.mktemp("runs")
    healthy = list(small_moe.train(STEPS))
    made = {}
    for run, states in (("healthy", healthy), ("faulty", faulty(healthy))):
        made[run] = []
        for number, state in enumerate(states, 1):
            path = small_moe.save(state, root / run / f"step-{number}")
            manifest = ckptcore.open(path)
            made[run].append(
                (path, manifest, ckptcore.api.statistics(manifest, settings=Settings(workers=1)))
            )
    return made


@pytest.fixture
def recorded(url, runs):
    for steps in runs.values():
        for path, manifest, measured in steps:
            record_statistics(manifest, path, measured, url)
    return url


@pytest.mark.alike(1)
def test_faults_are_found_by_a_line_of_sql_and_on_the_page_and_stop_promotion(
    recorded, runs, tmp_path, monkeypatch
):
    rows = ask(recorded, "SELECT run, step, code, fqn FROM alarms ORDER BY step, code, fqn")
    assert {row[0] for row in rows} == {"faulty"}  # 20 healthy steps have no alarm
    assert {(step, code) for _, step, code, _ in rows} == FOUND
    named = {code: fqn for _, _, code, fqn in rows}
    assert named["expert-died"] == EXPERT.rstrip(".")
    assert named["not-finite"] == "optim.state.layers.0.router.weight.exp_avg_sq"
    assert named["frozen-changed"] == EMBEDDING

    with open_catalog(recorded) as catalog:
        client = browser(catalog)
        page = client.get("/history/faulty")
        for step, code in FOUND:
            assert any(
                r.split()[:2] == [str(step), code] for r in text_of(page.text).split("\n") if r.split()[:1]
            )
        assert "Map of change" in page.text
        assert "open alarm" in client.get("/runs/faulty").text
        assert "No step has an alarm" in client.get("/history/healthy").text
        steps = [step.step for step in read_history(catalog, "healthy").steps]
        monkeypatch.setattr(views, "STEPS", len(steps) - 2)
        newest, older = (
            client.get(f"/history/healthy{further}").text for further in ("", f"?before={steps[2]}")
        )
        assert f'rel="next" href="/history/healthy?before={steps[2]}"' in newest
        assert [f">{step}</a>" in newest for step in steps[1:3]] == [False, True]
        assert [f">{step}</a>" in older for step in steps[1:3]] == [True, False]
        assert 'rel="next"' not in older

    outputs = {}
    for run in runs:
        source, output = runs[run][16][0], tmp_path / run
        outputs[run] = ckptcore.convert(source, output, catalog=recorded).destination
    with open_catalog(recorded) as catalog, catalog.writing() as conn:
        with pytest.raises(Conflict, match=r"frozen-changed.*step 17") as refusal:
            aliases.promote(conn, "prod", outputs["faulty"])
        assert "--accept frozen-changed" in refusal.value.hint
        aliases.promote(conn, "prod", outputs["healthy"])
        with pytest.raises(Conflict):  # the name of another alarm accepts nothing
            aliases.promote(conn, "prod", outputs["faulty"], accept=["norm-jumped"])
        codes = ["expert-died", "frozen-changed"]
        aliases.promote(conn, "prod", outputs["faulty"], accept=codes)
        assert aliases.history(conn, "prod")[0].detail["accepted"] == codes


def test_a_step_that_is_measured_late_settles_the_steps_behind_it(url, runs):
    steps = runs["faulty"]
    for number in (10, 12, 11):  # the expert died at 11, so 12 is judged once more by 11
        path, manifest, measured = steps[number - 1]
        alarms = record_statistics(manifest, path, measured, url)
        assert [alarm.code for alarm in alarms] == ([] if number == 10 else ["expert-died"])
    rows = ask(url, "SELECT step, message FROM alarms ORDER BY step")
    assert [step for step, _ in rows] == [11, 12]
    assert all(f"those of step {step - 1}" in message for step, message in rows)


def test_a_conversion_measures_what_it_reads(tmp_path, runs, monkeypatch):
    path, manifest, measured = runs["healthy"][0]
    catalog = str(tmp_path / "catalog.sqlite")
    forms = set()
    for number, (memory, workers, mesh) in enumerate(
        ((1 << 20, 3, ""), (1 << 28, 1, ""), (1 << 28, 2, "fsdp=2"))
    ):
        settings = Settings(memory=memory, workers=workers, stats=True)
        verb = {"verb": "reshard", "mesh": mesh} if mesh else {}
        result = ckptcore.convert(path, tmp_path / str(number), settings=settings, catalog=catalog, **verb)
        if mesh:
            pairs = zip(sorted(result.measured), sorted(measured), strict=True)
            for mine, theirs in pairs:
                assert mine.fqn == theirs.fqn
                assert mine.statistics.norm == pytest.approx(theirs.statistics.norm, rel=1e-6)
        else:
            forms.add(tuple(sorted(result.measured)))
    assert forms == {tuple(sorted(measured))}  # bits depend on neither tiles nor workers
    [row] = ask(catalog, "SELECT step, tensors, nan FROM step_history")
    assert row == (1, len(manifest.tensors), 0)


def test_two_steps_also_measure_what_only_the_second_has(url, tmp_path):
    same = {"same": torch.ones(3), "shape": torch.ones(2), "kind": torch.ones(4)}
    second = {**same, "shape": torch.full((5,), torch.inf), "kind": torch.ones(4, dtype=torch.complex64)}
    second["new"] = torch.full((8,), torch.nan)
    manifests = []
    for step, tensors in ((1, same), (2, second)):
        path = tmp_path / "run" / f"step-{step}"
        path.mkdir(parents=True)
        torch.save(tensors, path / "model.pt")
        manifests.append(ckptcore.open(path))
    between = ckptcore.api.changes(*manifests, settings=Settings(workers=1))
    assert [change.fqn for change in between.tensors] == ["same"]
    assert between.unmeasured == ("kind",)
    alone = ckptcore.api.statistics(manifests[1], settings=Settings(workers=1))
    assert sorted(between.measured) == sorted(alone)
    path = str(tmp_path / "run" / "step-2")
    alarms = record_statistics(
        manifests[1], path, between.measured, url, (str(tmp_path / "run/step-1"), between)
    )
    assert {(alarm.code, alarm.fqn) for alarm in alarms} == {("not-finite", "new"), ("not-finite", "shape")}


def test_a_step_that_is_kept_twice_is_one_step_before(url, tmp_path):
    """A norm is judged by two steps, not by two copies of one."""
    for folder, step, scale in (("a", 1, 0.1), ("a", 2, 1.0), ("b", 2, 1.0), ("a", 3, 20.0)):
        path = tmp_path / folder / "run" / f"step-{step}"
        path.mkdir(parents=True)
        weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)) * scale
        torch.save({"weight": weight}, path / "model.pt")
        manifest = ckptcore.open(path)
        measured = ckptcore.api.statistics(manifest, settings=Settings(workers=1))
        assert record_statistics(manifest, str(path), measured, url) == []
    assert ask(url, "SELECT run, step FROM step_history ORDER BY step, uri") == [
        ("run", 1),
        ("run", 2),
        ("run", 2),
        ("run", 3),
    ]
    read = []

    class Counted:
        """A connection that notes how many rows an answer with packed columns has."""

        def __init__(self, conn):
            self._conn = conn

        def execute(self, query):
            answer = self._conn.execute(query).freeze()
            read.extend(row.columns for row in answer() if hasattr(row, "columns"))
            return answer()

    with open_catalog(url) as catalog, catalog.reading() as conn:
        listed = history.steps(Counted(conn), "run", columns=True, limit=2)
        assert [(step.step, step.uri) for step in listed] == [
            (2, str(tmp_path / "b" / "run" / "step-2")),
            (3, str(tmp_path / "a" / "run" / "step-3")),
        ]
        assert read == [step.statistics.columns for step in listed]  # those of no other step are read
        before = history.steps(conn, "run", columns=True, before=2)
        assert [step.step for step in before] == [1]


@pytest.mark.alike(3)
@pytest.mark.parametrize("blob", [b"", b"\xff\x00", None], ids=["empty", "foreign", "truncated"])
def test_damaged_statistics_of_one_step_stay_its_own_trouble(url, runs, caplog, blob):
    steps = runs["healthy"][:4]
    for path, manifest, measured in steps[:3]:
        record_statistics(manifest, path, measured, url)
    with open_catalog(url) as catalog:
        with catalog.writing() as conn:
            damaged = history.at(conn, str(steps[1][0]))
            columns = damaged.statistics.columns[:-9] if blob is None else blob
            row = select(Checkpoint.id).where(Checkpoint.uuid == damaged.checkpoint).scalar_subquery()
            change = update(StepStatistics).where(StepStatistics.checkpoint_id == row)
            conn.execute(change.values(columns=columns))
        path, manifest, measured = steps[3]
        assert record_statistics(manifest, path, measured, url) == []
        assert "step-2 are damaged" in caplog.text
        run_history = read_history(catalog, "healthy", tensors=True)
        assert [step.step for step in run_history.steps] == [1, 2, 3, 4]
        assert run_history.damaged == [2]
        assert [step.step for step, _ in run_history.tensor(EMBEDDING)] == [1, 3, 4]
        page = browser(catalog).get("/history/healthy")
        assert page.status_code == 200
        assert "tensors of step 2 any more" in page.text
        with pytest.raises(CatalogError, match="damaged"):
            settle(catalog, str(steps[1][0]))
        path, manifest, measured = steps[1]
        assert record_statistics(manifest, path, measured, url) == []
        assert read_history(catalog, "healthy", tensors=True).damaged == []


def test_an_odd_number_in_the_row_of_a_step_is_named_beside_the_others(tmp_path, runs, capsys):
    catalog_url = str(tmp_path / "catalog.sqlite")  # PostgreSQL refuses a text in a column of numbers
    for path, manifest, measured in runs["healthy"][:2]:
        record_statistics(manifest, path, measured, catalog_url)
    with open_catalog(catalog_url) as catalog:
        with catalog.writing() as conn:
            conn.exec_driver_sql("UPDATE step_statistics SET norm = '<b>', nan = 'x' WHERE checkpoint_id = 1")
        run_history = read_history(catalog, "healthy")
        odd, sound = run_history.steps
        assert (odd.statistics.norm, odd.statistics.nan, sound.trouble) == (None, 0, "")
        assert "norm holds '<b>', not a number; nan holds 'x', not an integer" in odd.trouble
        page = browser(catalog).get("/history/healthy")
    assert page.status_code == 200
    assert "norm holds &#39;&lt;b&gt;&#39;" in page.text
    render_history(run_history, None)
    assert "catalog-row" in capsys.readouterr().out
