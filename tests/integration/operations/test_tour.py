"""The tour: from a training run to a promoted, proven export, with every part in its place.

train -> webhook with metrics -> export -> the page shows it -> the best is found -> the alias moves -> an
event goes out -> retention drops the optimizer of the others -> scrub proves everything that is left, and
finds a changed byte.

Prefect's server is left out, which `tests/integration/flows` has: `Runs.start` runs the stages of a flow.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import pytest
import torch
import torch.distributed.checkpoint as dcp
from paths import ROOT
from retiring import delete_now as retire
from standardwebhooks import Webhook
from starlette.testclient import TestClient
from tiny_llama import tiny_llama

from ckptcore.catalog import CheckpointDetail, open_catalog, retirements
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.training import ANNOUNCED
from ckptcore.cli.main import run as ckptcore
from ckptcore.conversion import pipeline
from ckptcore.conversion.registration import Announcement, start
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.scrub import scrub
from ckptcore.operations.verify import Proof
from ckptcore.planning.request import Request, Settings
from deployments.receiver.app import make_app
from deployments.receiver.dispatch import RunState, announce_aliases, work
from deployments.receiver.inbox import EventQueues
from deployments.receiver.serve import send_due
from deployments.receiver.settings import load

TOKEN, WHSEC, PAGE_TOKEN = "token-of-sixteen-and-more", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "p" * 24
SECRETS = {"TOKEN": TOKEN, "WHSEC": WHSEC}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LOSSES = {10: 3.5, 20: 2.25, 30: 2.75}
CONFIG = """
roots = ["{runs}"]
destination = "{exports}/{{path}}"
[parameters]
verb = "export"
[sources.trainer]
kind = "bearer"
secrets = ["TOKEN"]
[notify.registry]
url = "https://registry.example/hook"
secret = "WHSEC"
events = ["conversion.succeeded", "alias.moved"]
"""


class Runs:
    """Prefect, as far as the receiver needs it: a run is the stages of a conversion, in this process."""

    def __init__(self, catalog: str) -> None:
        self.catalog = catalog
        self.ended: dict[str, RunState] = {}
        self.events: list[str] = []

    def start(
        self, deployment: str, parameters: Mapping[str, Any], *, key: str, name: str, tags: Sequence[str]
    ) -> str:
        """Convert as the flow `arrived` does."""
        id, means = f"run-{len(self.ended)}", Settings(memory=32 << 20, workers=1, fingerprint=True)
        request = Request(parameters["source"], parameters["destination"], parameters["verb"])
        announcement = Announcement(parameters["run"], parameters["step"], parameters["meta"], ANNOUNCED)
        registration = start(request, self.catalog, id, announcement)
        manifest = pipeline.inspect(request.source)
        prepared = pipeline.prepare(request, means, manifest, self.catalog)
        pipeline.execute(prepared.plan_uri, settings=means)
        result = pipeline.finish(prepared.plan_uri, means)
        pipeline.register(registration, result, manifest)
        pipeline.remove_staging(prepared.plan_uri)
        self.ended[id] = RunState("COMPLETED", datetime.now(UTC), "")
        return id

    def states(self, ids: Sequence[str]) -> Mapping[str, RunState]:
        """Return the ended runs."""
        return {id: self.ended[id] for id in ids}

    def tell(self, event: str, uri: str, payload: Mapping[str, Any]) -> None:
        """Keep the event's name."""
        self.events.append(event)


def train(folder: Path) -> dict[int, float]:
    """Train a few steps, and save each tenth with its optimizer; return the losses that are reported."""
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(24).reshape(2, 12)
    for step in LOSSES:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        place = folder / f"step-{step}"
        dcp.save(
            {"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=place, no_dist=True
        )
        model.config.save_pretrained(place)
    return LOSSES


def seen(address: str, folder: Path) -> str:
    """Return a page as Chromium builds it; without Chromium, as the server sends it."""
    if CHROMIUM is None:
        with urlopen(address, timeout=60) as answer:
            return str(answer.read().decode())
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.usefixtures("asked_here")
def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    url, runs_folder, exports = str(tmp_path / "catalog.sqlite"), tmp_path / "runs", tmp_path / "exports"
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", url)
    config = tmp_path / "receiver.toml"
    config.write_text(CONFIG.format(runs=runs_folder, exports=exports))
    settings, senders = load(config, SECRETS)
    box, runs = EventQueues(url), Runs(url)
    with open_catalog(url) as catalog, catalog.writing() as conn:
        roots.add(conn, datetime.now(UTC), "tiny", str(runs_folder), include=(), targets=[{"verb": "export"}])

    # Train; each save is announced with its metrics.
    losses = train(runs_folder / "tiny")
    with TestClient(make_app(senders, box)) as client:
        for step, loss in losses.items():
            event = {
                "uri": str(runs_folder / f"tiny/step-{step}"),
                "run": "tiny",
                "step": step,
                "meta": {"metrics": {"loss": loss}, "git_commit": "3f9a12c", "user": "ada"},
            }
            headers = {"authorization": f"Bearer {TOKEN}", "idempotency-key": f"save-{step}"}
            assert client.post("/hooks/trainer", json=event, headers=headers).status_code == 202
    # Export, once each.
    assert work(box, runs, senders, settings.notify) == 3
    box_rows = [exports / f"tiny/step-{step}" for step in losses]
    assert all((place / "config.json").is_file() for place in box_rows)
    assert ckptcore(["verify-export", str(exports / "tiny/step-20")]) == 0  # as the flow does
    capfd.readouterr()

    # The page shows it; the metric names the best; the alias moves.
    command = [sys.executable, "-m", "ckptcore.page", "--catalog", url, "--port", "0"]
    environment = {**os.environ, "CKPTCORE_PAGE_TOKEN": PAGE_TOKEN}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            root = server.stdout.readline().split()[-1].rstrip("/")
            page = re.sub(r"<[^>]+>", " ", seen(f"{root}/runs/tiny", tmp_path).replace("<wbr>", ""))
            assert all(str(loss) in page for loss in losses.values())
            assert "loss" in page
            best = httpx.get(f"{root}/api/v1/best?metric=loss&kind=derived&limit=1").json()["rows"][0]
            assert (best["value"], best["step"]) == (2.25, 20)
            ref = best["checkpoint"]["id"]
            moved = httpx.post(
                f"{root}/api/v1/checkpoints/{ref}/aliases",
                json={"name": "tiny/best", "expect": ""},
                headers={"authorization": f"Bearer {PAGE_TOKEN}"},
            )
            assert moved.status_code == 200, moved.text
        finally:
            server.terminate()
    with open_catalog(url) as catalog, catalog.reading() as conn:
        rows = conn.exec_driver_sql(
            "SELECT step FROM best_by_metric WHERE run = 'tiny' AND metric = 'loss' AND goal = 'min'"
        ).all()
    assert {row[0] for row in rows} == {20}

    # The event goes out, signed, with the proofs of what it names.
    announce_aliases(box, runs, settings.notify)  # type: ignore[arg-type]
    assert runs.events[-1] == "ckptcore.alias.moved"
    received: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        received.append(Webhook(WHSEC).verify(request.content, dict(request.headers)))
        return httpx.Response(204)

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        send_due(box, settings.notify, client, SECRETS)
    (event,) = [each["data"] for each in received if each["type"] == "alias.moved"]
    assert (event["alias"], event["checkpoint"], event["step"]) == ("tiny/best", ref, 20)
    assert event["uri"] == str(exports / "tiny/step-20")
    assert event["fingerprint"]
    box.close()

    drop_optimizers(url, runs_folder / "tiny", exports / "tiny")

    # Everything that is left is proven, and a changed byte is found.
    with open_catalog(url) as catalog:
        assert scrub(catalog, 1.0).exit_code == 0
        changed = exports / "tiny/step-20/config.json"
        data = bytearray(changed.read_bytes())
        data[data.index(b"96")] ^= 1
        changed.write_bytes(data)
        found = scrub(catalog, 1.0)
    assert found.exit_code != 0
    assert [
        each.checkpoint.uri for each in found.looked if each.proven.proof in (Proof.CHANGED, Proof.DAMAGED)
    ] == [str(changed.parent)]
    capfd.readouterr()
    assert ckptcore(["scrub", "--share", "1", "--output", "json"]) != 0
    assert "config.json" in capfd.readouterr().out


def drop_optimizers(url: str, run: Path, exports: Path) -> None:
    """Free the optimizers of steps that retention does not keep; their models stay, proven by the exports.

    Without a loss that is accepted by name, nothing is freed.
    """
    asked = ["retire", "tiny", "--keep-last", "1"]
    with open_catalog(url) as catalog:
        refused = retire(catalog, Policy(1), "tiny", yes=True)
        assert {i.source.step: i.fate.value for i in refused.items} == {
            10: "unsafe",
            20: "kept",  # the source of what is promoted
            30: "kept",
        }
        assert all((run / f"step-{step}" / ".metadata").is_file() for step in LOSSES)
        before = {step: catalog.show(str(exports / f"step-{step}")).checkpoint for step in LOSSES}  # type: ignore[union-attr]
    nbytes = sum(file.stat().st_size for file in run.glob("step-10/*"))
    assert ckptcore([*asked, "--rest", "weights", "--yes", "--grace", "0", "--catalog", url]) == 0
    assert sorted(place.name for place in run.iterdir()) == ["step-20", "step-30"]
    assert all((run / step / ".metadata").is_file() for step in ("step-20", "step-30"))
    with open_catalog(url) as catalog:
        source = catalog.show(str(run / "step-10"))
        assert isinstance(source, CheckpointDetail)
        assert source.checkpoint.state == "deleted"
        with catalog.reading() as conn:
            record = retirements.of(conn, source.checkpoint.id)
        assert record is not None
        assert (record.child, record.proof) == (before[10].id, "model part")
        lost = {each.name: each for each in record.given_up}
        assert {each.kind for each in lost.values()} == {"optimizer"}
        assert any(name.endswith(".exp_avg") for name in lost)
        with catalog.reading() as conn:
            freed = conn.exec_driver_sql("SELECT sum(freed) FROM retirement").scalar_one()
    assert freed == nbytes
