"""Exports are sent to a hub: what is sent, what is refused, and what faults and kills leave."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import huggingface_hub.constants
import pytest
from blake3 import blake3
from fake_hub import TOKEN, Answer, Asked, FakeHub, fake_hub
from paths import ROOT
from sqlalchemy import text

from ckptcore import errors
from ckptcore.catalog import open_catalog
from ckptcore.catalog.history import LEVEL, settle_alarms
from ckptcore.catalog.types import CheckpointFacts, ConversionFacts
from ckptcore.cli.main import run
from ckptcore.errors import Finding
from ckptcore.operations.publication.push import FileFate, PushOutcome, PushRules, push, push_each

URL = "hf://org/model.v1@step-{step}"
ALARMS = ("norm-jumped", "step-repeated")
CARD = b"---\nlibrary_name: transformers\n---\n\n# tiny\n"


class World:
    """A hub, a catalog and exports that it knows."""

    def __init__(self, tmp_path: Path, hub: FakeHub) -> None:
        self.root, self.hub = tmp_path, hub
        self.url = f"sqlite:///{tmp_path}/catalog.sqlite"
        self.catalog = open_catalog(self.url)

    def export(self, step: int, weights: bytes | None = None, verdict: str = "ok", more: str = "") -> str:
        """Make an export of a step, and record it as `ckptcore export` and `verify-export` do."""
        folder = self.root / "exports" / f"step-{step}"
        folder.mkdir(parents=True)
        files = {
            "model-00001-of-00002.safetensors": weights or os.urandom(3000),
            "model-00002-of-00002.safetensors": f"weights of {step}".encode() * 100,
            "model.safetensors.index.json": b'{"weight_map": {}}',
            "config.json": b'{"model_type": "llama"}',
            "README.md": CARD,
            **({more: b"more"} if more else {}),
        }
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        recorded = [(name, len(data), blake3(data).hexdigest()) for name, data in files.items()]
        is_data = [name.endswith(".safetensors") for name in files]
        common = {"manifest_digest": f"{step:064x}", "nbytes": 1, "tensors": [("w", "float32", (1,), 4)]}
        source = CheckpointFacts(
            f"{self.root}/runs/tiny/step-{step}", "dcp", files=[], run="tiny", step=step, **common
        )
        derived = CheckpointFacts(
            str(folder),
            "safetensors",
            files=[file for file, data in zip(recorded, is_data, strict=True) if data],
            extra=[file for file, data in zip(recorded, is_data, strict=True) if not data],
            verified="bytes",
            **{**common, "manifest_digest": f"{step + 1000:064x}"},
        )
        conversion = self.catalog.begin(
            {}, source_uri=source.uri, destination_uri=str(folder), verb="export", tool_version="1"
        )
        self.catalog.succeed(
            conversion, ConversionFacts("plan", 1, 1, None, {}), source=source, derived=derived
        )
        if verdict:
            self.catalog.record_verdict(conversion, [("elements", verdict, "")])
        return str(folder)

    def push(self, folder: str, url: str = URL, **rules: object):
        return push(self.catalog, folder, url, PushRules(**rules))

    def rows(self, sql: str) -> list[tuple]:
        with self.catalog.reading() as conn:
            return [tuple(row) for row in conn.execute(text(sql))]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True, raising=False)
        yield hub


@pytest.fixture
def world(tmp_path: Path, hub: FakeHub) -> Iterator[World]:
    made = World(tmp_path, hub)
    yield made
    made.catalog.close()


def content(folder: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library's own repeats come without a wait."""
    monkeypatch.setattr(time, "sleep", lambda _: None)


def test_an_export_becomes_a_branch_of_its_step(world: World, hub: FakeHub):
    folder = world.export(1000)
    done = world.push(folder)
    assert done.outcome is PushOutcome.PUSHED
    assert done.url == "hf://org/model.v1@step-1000"
    assert hub.at("step-1000") == content(folder)
    assert done.commit == hub.branches["step-1000"]
    assert hub.at("main") == {}
    assert done.sent_bytes == sum(map(len, content(folder).values()))
    assert world.rows(
        "SELECT verb, state, source_uri, destination_uri, bytes_out FROM conversion WHERE verb = 'push'"
    ) == [("push", "succeeded", folder, "hf://org/model.v1@step-1000", done.sent_bytes)]
    detail = world.catalog.show(done.conversion)
    assert detail.conversion.request["commit"] == done.commit
    assert [row.uri for row in detail.sources] == [folder]
    # Nothing goes a second time.
    uploads = hub.uploads()
    repeated = world.push(folder)
    assert (repeated.outcome, repeated.commit, repeated.sent) == (PushOutcome.PRESENT, done.commit, ())
    assert hub.uploads() == uploads
    assert hub.branches["step-1000"] == done.commit


def test_files_that_the_repository_has_are_not_sent(world: World, hub: FakeHub):
    same = os.urandom(5000)
    first, second = world.export(1, same), world.export(2, same)
    world.push(first)
    world.push(second)
    assert hub.uploads().count(hashlib.sha256(same).hexdigest()) == 1
    assert hub.at("step-2") == content(second)


def test_a_step_with_an_alarm_is_refused_unless_it_is_accepted(world: World, hub: FakeHub):
    folder, now = world.export(8), datetime.now(UTC)
    alarms = [Finding(code, LEVEL, "it moved") for code in ALARMS]
    with world.catalog.writing() as conn:
        settle_alarms(conn, now, f"{world.root}/runs/tiny/step-8", alarms)
    for accept in ((), ALARMS[:1]):
        with pytest.raises(errors.UnprovenCheckpoint) as caught:
            world.push(folder, accept=accept)
        assert f"--accept {ALARMS[-1]}" in caught.value.hint
    assert hub.asked == []
    assert world.push(folder, accept=ALARMS).outcome is PushOutcome.PUSHED
    assert run(["push", folder, URL, "--accept", "odd", "--catalog", world.url]) == 2


def test_a_dry_run_sends_nothing(world: World, hub: FakeHub):
    folder = world.export(7)
    planned = world.push(folder, dry_run=True)
    assert planned.outcome is PushOutcome.PLANNED
    assert {file.path: file.fate for file in planned.files} == dict.fromkeys(content(folder), FileFate.NEW)
    assert {asked.method for asked in hub.asked} == {"GET"}
    assert world.rows("SELECT count(*) FROM conversion WHERE verb = 'push'") == [(0,)]
    world.push(folder)
    assert world.push(folder, dry_run=True).outcome is PushOutcome.PRESENT


@pytest.mark.parametrize("tag", [False, True])
def test_a_branch_or_tag_with_another_steps_content_is_refused(world: World, hub: FakeHub, tag: bool):
    first, second = world.export(1), world.export(2)
    world.push(first, "hf://org/model.v1@best", tag=tag)
    before = hub.at("best")
    uploads = hub.uploads()
    with pytest.raises(
        errors.DestinationExists, match=r"model-00001-of-00002.safetensors \(another content\)"
    ):
        world.push(second, "hf://org/model.v1@best", tag=tag)
    assert (hub.at("best"), hub.uploads()) == (before, uploads)
    world.push(second, "hf://org/model.v1@best", tag=tag, overwrite=True)
    assert hub.at("best") == content(second)
    assert "pushing-best" not in hub.branches


@pytest.mark.parametrize("tag", [False, True])
def test_a_branch_at_the_first_commit_is_refused_unless_a_killed_push_left_it(
    world: World, hub: FakeHub, tag: bool
):
    branch = "pushing-step-1" if tag else "step-1"
    first = hub.commit({"README.md": b"license: mit"}, None)
    hub.branches.update(main=first, **{branch: first})
    folder = world.export(1)
    with pytest.raises(errors.DestinationExists):
        world.push(folder, tag=tag)
    assert (hub.branches[branch], hub.uploads()) == (first, [])
    del hub.branches[branch]
    hub.fault = lambda asked: Answer(500) if "/commit/" in asked.path else None
    with pytest.raises(errors.StorageTrouble):
        world.push(folder, tag=tag)
    assert hub.branches[branch] == first
    hub.fault = lambda _: None
    world.push(folder, tag=tag)
    assert hub.at("step-1") == content(folder)


def test_a_file_of_the_branch_that_the_export_lacks_is_another_content(world: World, hub: FakeHub):
    folder = world.export(1)
    commit = world.push(folder).commit
    hub.branches["step-1"] = hub.commit({**hub.commits[commit], "old.bin": b"x"}, commit)
    with pytest.raises(errors.DestinationExists, match=r"old.bin \(not in this output\)"):
        world.push(folder)
    done = world.push(folder, overwrite=True)
    assert hub.at("step-1") == content(folder)
    assert {f.path: f.fate for f in done.files}["old.bin"] is FileFate.REMOVED


def test_a_tag_names_a_commit_and_leaves_no_branch(world: World, hub: FakeHub):
    folder = world.export(3)
    done = world.push(folder, tag=True)
    assert hub.tags == {"step-3": done.commit}
    assert set(hub.branches) == {"main"}
    assert world.push(folder, tag=True).outcome is PushOutcome.PRESENT
    with pytest.raises(errors.DestinationExists, match="is a tag"):
        world.push(folder)


def test_a_killed_push_of_a_tag_is_finished(world: World, hub: FakeHub):
    folder = world.export(3)

    def lose_tags(asked: Asked) -> Answer | None:
        return Answer(500) if "/tag/" in asked.path else None

    hub.fault = lose_tags
    with pytest.raises(errors.StorageTrouble):
        world.push(folder, tag=True)
    assert "pushing-step-3" in hub.branches
    hub.fault = lambda _: None
    uploads = hub.uploads()
    assert world.push(folder, tag=True).commit == hub.tags["step-3"]
    assert (hub.uploads(), set(hub.branches)) == (uploads, {"main"})


@pytest.mark.parametrize("present", [True, False])
def test_anothers_branch_of_the_name_that_a_tag_needs_stays(world: World, hub: FakeHub, present: bool):
    folder = world.export(3)
    if present:
        world.push(folder, tag=True)
    theirs = hub.commit({"theirs.bin": b"x"}, hub.branches["main"])
    hub.branches["pushing-step-3"] = theirs
    if present:
        assert world.push(folder, tag=True).outcome is PushOutcome.PRESENT
    else:
        with pytest.raises(errors.DestinationExists, match="pushing-step-3"):
            world.push(folder, tag=True)
    assert hub.branches["pushing-step-3"] == theirs
    if not present:
        world.push(folder, tag=True, overwrite=True)
        assert hub.at("step-3") == content(folder)


def test_a_tag_that_another_one_made_meanwhile_is_a_conflict(world: World, hub: FakeHub):
    theirs = hub.commit({"theirs.bin": b"x"}, hub.branches["main"])

    def tag_meanwhile(asked: Asked) -> None:
        if "/commit/" in asked.path:
            hub.tags["step-3"] = theirs

    hub.fault = tag_meanwhile
    with pytest.raises(errors.Conflict):
        world.push(world.export(3), tag=True)
    assert hub.tags == {"step-3": theirs}


@pytest.mark.parametrize("part", ["refs", "tree", "preupload", "commit", "commits"])
def test_a_page_in_place_of_the_hubs_answer_is_no_success(world: World, hub: FakeHub, part: str):
    folder = world.export(1)
    page = Answer(200, b"<html>log in</html>", {"Content-Type": "text/html"})
    hub.fault = lambda asked: page if part in asked.path.split("/") else None
    with pytest.raises(errors.StorageTrouble, match="none of a hub") as caught:
        world.push(folder)
    assert "HF_ENDPOINT" in caught.value.hint


def test_a_commit_without_a_commits_name_is_looked_up(world: World, hub: FakeHub):
    answer = {"commitUrl": f"{hub.endpoint}/{hub.repository}/commit/step-1", "commitOid": "step-1"}
    body = json.dumps(answer).encode()
    hub.fault = lambda a: Answer(200, body, is_done=True) if "/commit/" in a.path else None
    assert world.push(world.export(1)).commit == hub.branches["step-1"]


@pytest.mark.parametrize(("data", "reason"), [(None, "more than"), (b"\xff\xfe", "not UTF-8")])
def test_a_card_that_is_none_is_refused_before_anything_is_sent(
    world: World, hub: FakeHub, tmp_path: Path, data: bytes | None, reason: str
):
    card = Path("/dev/zero") if data is None else tmp_path / "card.md"
    if data is not None:
        card.write_bytes(data)
    with pytest.raises(errors.UsageError, match=reason):
        world.push(world.export(1), card=card)
    assert (hub.uploads(), set(hub.branches)) == ([], {"main"})


@pytest.mark.parametrize("name", [".gitattributes", ".git/config"])
def test_files_of_git_are_refused_before_anything_is_sent(world: World, hub: FakeHub, name: str):
    with pytest.raises(errors.UsageError, match="git's own"):
        world.push(world.export(1, more=name))
    assert (hub.uploads(), set(hub.branches)) == ([], {"main"})


def test_another_card_is_sent_in_place_of_the_exports(world: World, hub: FakeHub, tmp_path: Path):
    folder, card = world.export(1), tmp_path / "card.md"
    card.write_bytes(b"---\nlicense: apache-2.0\n---\n# published\n")
    world.push(folder, card=card)
    assert hub.at("step-1") == {**content(folder), "README.md": card.read_bytes()}
    assert (Path(folder) / "README.md").read_bytes() == CARD


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda folder: (folder / "config.json").write_bytes(b'{"model_type": "LLAMA"}'), "digest-mismatch"),
        (lambda folder: (folder / "config.json").unlink(), "missing-file"),
        (lambda folder: (folder / "optimizer.pt").write_bytes(b"x"), "added-file"),
        (lambda folder: (folder / "model.safetensors").symlink_to("config.json"), "added-file"),
        (lambda folder: os.truncate(folder / "model-00002-of-00002.safetensors", 5), "truncated-file"),
    ],
)
def test_what_is_not_as_it_was_written_is_not_sent(world: World, hub: FakeHub, change, finding: str):
    folder = world.export(1)
    change(Path(folder))
    with pytest.raises(errors.DamagedCheckpoint) as caught:
        world.push(folder)
    assert caught.value.exit_code == 1
    assert [f.code for f in caught.value.findings] == [finding]
    assert {asked.method for asked in hub.asked} <= {"GET"}


@pytest.mark.parametrize(("verdict", "code"), [("", 26), ("not-done", 26), ("failed", 26)])
def test_what_nothing_has_proven_is_not_sent(world: World, hub: FakeHub, verdict: str, code: int):
    folder = world.export(1, verdict=verdict)
    with pytest.raises(errors.UnprovenCheckpoint) as caught:
        world.push(folder)
    assert caught.value.exit_code == code
    with pytest.raises(errors.UnprovenCheckpoint, match="does not know it"):
        world.push(str(world.root))
    assert hub.asked == []


def test_a_file_that_changes_while_it_is_sent_is_not_committed(world: World, hub: FakeHub):
    folder = world.export(1)
    path = Path(folder) / "config.json"

    def change(asked: Asked) -> Answer | None:
        if asked.method == "PUT":
            path.write_bytes(path.read_bytes())
        return None

    hub.fault = change
    with pytest.raises(errors.SourceChanged, match=r"config.json of .* changed"):
        world.push(folder)
    assert hub.at("step-1") == {}
    assert world.rows("SELECT state, error_code FROM conversion WHERE verb = 'push'") == [
        ("failed", "source-changed")
    ]
    hub.fault = lambda _: None
    assert world.push(folder).outcome is PushOutcome.PUSHED


@pytest.mark.parametrize("is_done", [False, True])
def test_a_lost_reply_of_the_commit(world: World, hub: FakeHub, is_done: bool):
    folder = world.export(1)

    def lose(asked: Asked) -> Answer | None:
        return Answer(0, is_done=is_done) if "/commit/" in asked.path else None

    hub.fault = lose
    if is_done:
        assert world.push(folder).commit == hub.branches["step-1"]
    else:
        with pytest.raises(errors.StorageTrouble) as caught:
            world.push(folder)
        assert caught.value.transient
        assert hub.at("step-1") == {}
    hub.fault = lambda _: None
    uploads = hub.uploads()
    world.push(folder)
    assert hub.at("step-1") == content(folder)
    assert hub.uploads() == uploads


def test_short_troubles_of_the_store_of_large_files_are_waited_for(
    world: World, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
):
    quick(monkeypatch)
    folder, answers = world.export(1), [Answer(503), Answer(0), Answer(500)]
    hub.fault = lambda asked: answers.pop() if asked.method == "PUT" and answers else None
    world.push(folder)
    assert hub.at("step-1") == content(folder)


def test_a_branch_that_moves_meanwhile_is_a_conflict(world: World, hub: FakeHub):
    folder = world.export(1)

    def move(asked: Asked) -> Answer | None:
        if asked.method == "PUT":
            hub.branches["step-1"] = hub.commit({"other.txt": b"x"}, hub.branches["step-1"])
        return None

    hub.fault = move
    with pytest.raises(errors.Conflict):
        world.push(folder)
    assert hub.at("step-1") == {"other.txt": b"x"}


@pytest.mark.parametrize(
    ("status", "path"),
    [(401, "/refs"), (403, "/branch/"), (404, "/preupload/"), (403, "/commit/"), (400, "/commit/")],
)
def test_a_hub_that_refuses_is_an_error_of_the_destination(
    world: World, hub: FakeHub, status: int, path: str, capfd: pytest.CaptureFixture[str]
):
    folder = world.export(1)
    hub.fault = lambda asked: Answer(status) if path in asked.path else None
    with pytest.raises(errors.DestinationUnwritable) as caught:
        world.push(folder)
    assert caught.value.exit_code == 9
    assert TOKEN not in str(caught.value.as_dict())
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_a_repository_is_created_only_on_request(world: World, hub: FakeHub):
    folder = world.export(1)
    hub.exists = False
    with pytest.raises(errors.DestinationUnwritable, match="no such repository"):
        world.push(folder)
    assert world.push(folder, create=True, dry_run=True).outcome is PushOutcome.PLANNED
    assert not hub.exists
    world.push(folder, create=True)
    assert hub.at("step-1") == content(folder)
    created = next(json.loads(a.body) for a in hub.asked if a.path.endswith("/repos/create"))
    assert "private" in (created.get("visibility"), *created)  # by the library's version


def test_no_address_or_token_reaches_errors_logs_or_the_catalog(
    world: World, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    quick(monkeypatch)
    secret = "an-odd-token-of-a-proxy"
    monkeypatch.setenv("HF_TOKEN", secret)

    def refuse(asked: Asked) -> Answer | None:
        # A proxy that repeats the header, and addresses that are signed.
        if asked.method == "PUT":
            return Answer(503)
        return (
            Answer(403, headers={"X-Error-Message": f"Bearer {secret} may not"})
            if asked.method == "GET"
            else None
        )

    hub.fault = refuse
    folder = world.export(1)
    with pytest.raises(errors.DestinationUnwritable) as caught:
        world.push(folder)
    assert secret not in str(caught.value.as_dict())
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.fault = lambda asked: Answer(503) if asked.method == "PUT" else None
    with pytest.raises(errors.StorageTrouble) as trouble:
        world.push(folder)
    captured = capfd.readouterr()
    recorded = str(world.rows("SELECT * FROM conversion")) + str(trouble.value.as_dict())
    for place in (recorded, captured.out, captured.err):
        assert "secretsignature" not in place
        assert TOKEN not in place


def test_a_commit_that_holds_something_else_is_no_success(world: World, hub: FakeHub):
    folder = world.export(1)

    def alter(asked: Asked) -> Answer | None:
        commit = hub.branches.get("step-1")
        if "/tree/" in asked.path and commit is not None and "config.json" in hub.commits[commit]:
            hub.commits[commit]["config.json"] = b"{}"
        return None

    hub.fault = alter
    with pytest.raises(errors.OutputMismatch, match=r"config\.json"):
        world.push(folder)


@pytest.mark.parametrize(
    "url",
    [
        "hf://org/m@" + 40 * "a",
        "hf://org/m@a/b",
        "hf://datasets/org/m@a",
        "hf://org@a",
        "s3://b/k",
        "hf://org/m@..",
        "hf://org/m@",
    ],
)
def test_urls_that_name_no_branch_are_refused(world: World, hub: FakeHub, url: str):
    folder = world.export(1)
    with pytest.raises(errors.UsageError):
        world.push(folder, url)
    assert hub.asked == []


def test_several_outputs_go_each_to_its_own_place(world: World, hub: FakeHub):
    folders = [world.export(step) for step in (1, 2, 3)]
    (Path(folders[1]) / "config.json").unlink()
    done = push_each(world.catalog, folders, URL, PushRules())
    assert [item.outcome for item in done] == [PushOutcome.PUSHED, PushOutcome.FAILED, PushOutcome.PUSHED]
    assert done[1].error.code == "damaged"
    with pytest.raises(errors.UsageError, match=r"\{step\}"):
        push_each(world.catalog, folders, "hf://org/model.v1@a", PushRules())


def test_the_command_line_answers_in_json_and_with_the_errors_code(
    world: World, hub: FakeHub, capsys: pytest.CaptureFixture[str]
):
    folders = [world.export(step) for step in (1, 2)]
    common = ["--catalog", world.url, "--output", "json"]
    assert run(["push", folders[0], URL, "--dry-run", *common]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["outputs"]
    assert planned["outcome"] == "would-push"
    assert planned["sent_bytes"] == sum(map(len, content(folders[0]).values()))
    assert run(["push", *folders, URL, *common]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [item["outcome"] for item in answer["outputs"]] == ["pushed", "pushed"]
    assert run(["push", folders[1], "hf://org/model.v1@step-1", *common]) == 7
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "destination-exists"
    os.truncate(Path(folders[1]) / "config.json", 1)
    assert run(["push", *folders, URL, *common]) == 1
    assert [i["outcome"] for i in json.loads(capsys.readouterr().out)["outputs"]] == ["present", "failed"]


def test_a_push_of_twenty_steps_that_is_killed_goes_on_where_it_was(world: World, hub: FakeHub):
    folders = [world.export(step) for step in range(20)]
    command = [sys.executable, "-m", "ckptcore", "push", *folders, URL, "--catalog", world.url]
    environment = os.environ | hub.environment(str(world.root / "home"))
    killed: list[int] = []

    def kill(asked: Asked) -> Answer | None:
        # Of the eleventh step, one of two large files has arrived.
        if asked.method == "PUT" and len(hub.uploads()) == 22 and not killed:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            return Answer(0)
        return None

    hub.fault = kill
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    arrived, complete = set(hub.large), [b for b in hub.branches if b != "main" and hub.at(b)]
    assert 8 <= len(complete) < 20
    asked = len(hub.asked)
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    sent = [a.path.rpartition("/")[2] for a in hub.asked[asked:] if a.method == "PUT"]
    large = {
        hashlib.sha256(d).hexdigest()
        for f in folders
        for n, d in content(f).items()
        if n.endswith(".safetensors")
    }
    assert sorted(sent) == sorted(large - arrived)
    commits = [a.path.rpartition("/")[2] for a in hub.asked[asked:] if "/commit/" in a.path]
    assert sorted(commits) == sorted(f"step-{step}" for step in range(20) if f"step-{step}" not in complete)
    for step, folder in enumerate(folders):
        assert hub.at(f"step-{step}") == content(folder)
    assert TOKEN not in done.stdout + done.stderr
    states = world.rows(
        "SELECT state, count(*) FROM conversion WHERE verb = 'push' GROUP BY state ORDER BY state"
    )
    assert dict(states)["failed"] == 1
