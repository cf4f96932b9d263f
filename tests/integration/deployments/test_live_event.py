"""A sharded job sends the fingerprint of its memory, and what it saved is converted by that event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import warm
import webhooks
from paths import JOBS, ROOT

from ckptcore.catalog.training import ANNOUNCED, read_facts
from ckptcore.conversion.pipeline import convert
from ckptcore.conversion.registration import Announcement
from ckptcore.planning.request import Request


def test_a_sharded_job_sends_what_its_checkpoint_is_compared_with(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            events.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(202)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        done = subprocess.run(
            [*warm.python(), str(JOBS / "live_event_job.py"), str(tmp_path / "step-7")],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=dict(os.environ)
            | {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'deployments' / 'senders'}",
                "CKPTCORE_HOOK_URL": f"http://127.0.0.1:{server.server_port}/",
                "CKPTCORE_HOOK_SECRET": webhooks.WHSEC,
            },
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    (event,) = events
    facts, left_out = read_facts(event["data"]["meta"])
    assert (facts.live_fingerprint, left_out) == (done.stdout.strip(), ())
    announcement = Announcement("llama", 7, facts.as_form(), ANNOUNCED)
    request = Request(event["data"]["uri"], str(tmp_path / "out"), verb="consolidate")
    result = convert(request, catalog_url=False, announcement=announcement)
    assert result.live is not None
    assert (result.live.verdict, result.live.compared) == ("equal", done.stdout.strip())


class SingleDeviceStrategy(SimpleNamespace):
    """As Lightning's: its model is the module."""


class DeepSpeedStrategy(SimpleNamespace):
    """As Lightning's: its model has partitioned parameters."""


def test_the_lightning_callback_sends_what_its_file_is_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks: Any = ModuleType("lightning.pytorch.callbacks")
    callbacks.Callback = object
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", callbacks)
    monkeypatch.syspath_prepend(str(ROOT / "deployments" / "senders"))
    import lightning_callback

    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(lightning_callback, "announce", lambda *_, meta: sent.append(meta))
    module = torch.nn.ModuleDict({"model": torch.nn.Linear(5, 3), "norm": torch.nn.BatchNorm1d(3)})
    path = tmp_path / "step=7.ckpt"

    def save(filepath: str) -> None:
        state = {"state_dict": module.state_dict(), "global_step": 7, "pytorch-lightning_version": "2.5"}
        torch.save(state, filepath)

    trainer = SimpleNamespace(
        strategy=SingleDeviceStrategy(model=module),
        save_checkpoint=save,
        is_global_zero=True,
        global_step=7,
        current_epoch=0,
        callback_metrics={},
    )
    lightning_callback.AnnounceCheckpoint("llama", every=True, fingerprint=True).setup(trainer, module, "fit")
    trainer.save_checkpoint(str(path))
    (meta,) = sent
    assert "live_model_fingerprint" in meta
    announcement = Announcement("llama", 7, meta, ANNOUNCED)
    request = Request(str(path), str(tmp_path / "out"), verb="consolidate")
    result = convert(request, catalog_url=False, announcement=announcement)
    assert result.live is not None
    assert (result.live.verdict, result.live.compared) == ("equal", meta["live_model_fingerprint"])
    assert lightning_callback._live_facts(SimpleNamespace(strategy=DeepSpeedStrategy(model=module))) == {}
