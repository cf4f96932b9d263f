"""Senders: each script that ships is run against a receiver that listens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import live
import pytest
import webhooks
import yaml
from lightning_cases import lightning_python
from paths import JOBS, ROOT

SENDERS = ROOT / "deployments" / "senders"
URI = webhooks.URI
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
pytestmark = pytest.mark.xdist_group("receiver")  # one process for all of them


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    with live.receiver(tmp_path_factory.mktemp("live")) as found:
        yield found


@pytest.fixture
def env(running: live.Live) -> dict[str, str]:
    """The environment of a job. The catalog's inbox is empty."""
    running.rows.clear()
    return {
        "PATH": f"{Path(sys.executable).parent}:{PATH}",
        "CKPTCORE_HOOK_URL": f"{running.url}/hooks/standard",
        "CKPTCORE_HOOK_SECRET": webhooks.WHSEC,
    }


def run(*command: str | Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), env=dict(env), capture_output=True, text=True, timeout=300, check=False
    )


def announced(running: live.Live, count: int = 1) -> list[tuple[Any, ...]]:
    """The rows of the inbox, once there are that many: scripts may send in the background."""
    end = time.monotonic() + 120
    while len(found := running.rows("source, type, uri, run, step")) < count and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("script", ["send.sh", "send.py"])
def test_scripts(script: str, running: live.Live, env: dict[str, str]) -> None:
    done = run(SENDERS / script, URI, "llama", "7", env=env)
    assert (done.returncode, json.loads(done.stdout)["status"]) == (0, "accepted"), done.stderr
    assert run(SENDERS / script, "/runs/mistral/step=8", env=env).returncode == 0
    assert announced(running) == [
        ("standard", "checkpoint.saved", URI, "llama", 7),
        ("standard", "checkpoint.saved", "/runs/mistral/step=8", "", None),
    ]


@pytest.mark.parametrize("script", ["send.sh", "send.py"])
@pytest.mark.parametrize(("step", "expected"), [("0300", 300), ("000", 0), ("0", 0), ("08", 8)])
def test_steps_may_begin_with_zeros(
    script: str, step: str, expected: int, running: live.Live, env: dict[str, str]
) -> None:
    assert run(SENDERS / script, URI, "llama", step, env=env).returncode == 0
    assert announced(running) == [("standard", "checkpoint.saved", URI, "llama", expected)]


@pytest.mark.parametrize("script", ["send.sh", "send.py"])
def test_scripts_report_refusals(script: str, running: live.Live, env: dict[str, str]) -> None:
    outside = run(SENDERS / script, "/elsewhere/x", env=env)
    assert outside.returncode != 0
    assert "forbidden-root" in outside.stdout + outside.stderr
    assert "Traceback" not in outside.stderr
    wrong = run(SENDERS / script, URI, env=env | {"CKPTCORE_HOOK_SECRET": "whsec_" + "QUJD" * 8})
    assert wrong.returncode != 0
    assert "unauthorized" in wrong.stdout + wrong.stderr
    assert run(SENDERS / script, URI, 'll"ama', "7x", env=env).returncode != 0
    assert running.rows() == []


@pytest.mark.parametrize("script", ["send.sh", "send.py"])
@pytest.mark.parametrize(
    ("arguments", "unset", "expected"),
    [
        ([], "", "usage: send"),
        (["--help"], "", "usage: send"),
        ([URI, "llama", "7x"], "", "whole number"),
        ([URI], "CKPTCORE_HOOK_URL", "CKPTCORE_HOOK_URL"),
        ([URI], "CKPTCORE_HOOK_SECRET", "CKPTCORE_HOOK_SECRET"),
    ],
)
def test_scripts_say_in_a_line_what_is_wrong(
    script: str, arguments: list[str], unset: str, expected: str, running: live.Live, env: dict[str, str]
) -> None:
    done = run(SENDERS / script, *arguments, env={name: env[name] for name in env if name != unset})
    assert done.returncode in (1, 2)
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert running.rows() == []


def test_python_retries_until_the_receiver_runs(
    running: live.Live, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SENDERS))
    import send

    answers = iter([503, 429, None])
    real = send.urllib.request.urlopen

    def urlopen(request: Any, timeout: float) -> Any:
        status = next(answers)
        if status is None:
            return real(request, timeout=timeout)
        raise send.urllib.error.HTTPError(request.full_url, status, "", {}, open(os.devnull, "rb"))  # type: ignore[arg-type]  # noqa: SIM115

    monkeypatch.setattr(send.urllib.request, "urlopen", urlopen)
    reply = send.announce(URI, url=env["CKPTCORE_HOOK_URL"], secret=webhooks.WHSEC, waits=(0.0, 0.0))
    assert reply["status"] == "accepted"


@pytest.fixture
def dying(running: live.Live) -> Iterator[str]:
    """An address that breaks the connection twice, in the two ways of a killed server; then the receiver."""
    ours = httpx.URL(running.url)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(30)

    def serve() -> None:
        for answer in (b"", b"HTTP/1.1 202 Accepted\r\ncontent-length: 60\r\n\r\n{"):
            caller, _ = listener.accept()
            with caller:
                caller.recv(65536)
                caller.sendall(answer)
        with listener.accept()[0] as caller, socket.create_connection((ours.host, ours.port or 80)) as there:
            there.settimeout(10)
            caller.settimeout(1)
            try:
                while part := caller.recv(65536):
                    there.sendall(part)
            except TimeoutError:
                caller.sendall(there.recv(65536))

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join()
    listener.close()


@pytest.mark.parametrize("script", ["send.sh", "send.py"])
def test_a_receiver_killed_during_its_reply_gets_a_retry(
    script: str, running: live.Live, env: dict[str, str], dying: str
) -> None:
    done = run(
        SENDERS / script, URI, "llama", "7", env=env | {"CKPTCORE_HOOK_URL": f"{dying}/hooks/standard"}
    )
    assert (done.returncode, json.loads(done.stdout)["status"]) == (0, "accepted"), done.stderr
    assert announced(running) == [("standard", "checkpoint.saved", URI, "llama", 7)]


LIGHTNING = """
import sys, types
callbacks = types.ModuleType("lightning.pytorch.callbacks")
callbacks.Callback = type("Callback", (), {})
for name in ("lightning", "lightning.pytorch"):
    sys.modules.setdefault(name, types.ModuleType(name))
sys.modules.setdefault("lightning.pytorch.callbacks", callbacks)
from lightning_callback import AnnounceCheckpoint
class Trainer:
    is_global_zero, global_step, current_epoch, callback_metrics = True, 7, 0, {"loss": 2.5}
    def save_checkpoint(self, filepath, weights_only=None):
        self.global_step += weights_only or 0
trainer, one = Trainer(), AnnounceCheckpoint(run="llama", every=True)
for _ in range(2):
    one.setup(trainer, None, "validate")
    one.setup(trainer, None, "fit")         # fitted again, it is listened to once
trainer.save_checkpoint("/runs/llama/.lr_find_a.ckpt")      # the tuner's own
trainer.save_checkpoint(sys.argv[1])
trainer.save_checkpoint("/runs/llama/last.ckpt")            # the same once more
one.every = False
trainer.save_checkpoint("/runs/llama/step-8", weights_only=1)
trainer.save_checkpoint("/runs/llama/step-9", weights_only=1)
one.teardown(trainer, None, "validate")
trainer.is_global_zero = False
one.on_exception(trainer, None, KeyboardInterrupt())        # another rank
trainer.is_global_zero = True
one.on_exception(trainer, None, KeyboardInterrupt())
one.teardown(trainer, None, "fit")          # the same one is not announced twice
trainer.save_checkpoint("/runs/llama/step-10", weights_only=1)      # as savers do on an exception
"""


def test_lightning_callback(running: live.Live, env: dict[str, str]) -> None:
    env |= {"PYTHONPATH": str(SENDERS)}
    done = run(sys.executable, "-c", LIGHTNING, URI, env=env)
    assert done.returncode == 0, done.stderr
    assert [row[2:] for row in announced(running, 3)] == [
        (URI, "llama", 7),
        ("/runs/llama/step-9", "llama", 9),
        ("/runs/llama/step-10", "llama", 10),
    ]
    # Training continues without a receiver or without settings.
    for other in ({"CKPTCORE_HOOK_URL": "http://127.0.0.1:9/"}, {"CKPTCORE_HOOK_SECRET": "*"}):
        quick = LIGHTNING.replace(
            "from lightning_callback", "import send; send.WAITS = ()\nfrom lightning_callback"
        )
        quick = quick.replace(
            "trainer, one = ", "send.announce.__kwdefaults__['waits'] = ()\ntrainer, one = "
        )
        done = run(sys.executable, "-c", quick, URI, env=env | other)
        assert done.returncode == 0, done.stderr
        assert "was not announced" in done.stderr


def test_lightning_announces_the_steps_of_saved_files(tmp_path: Path) -> None:
    python, job = lightning_python(), JOBS / "lightning_sender_job.py"
    done = run(python, job, tmp_path, env={"PATH": PATH, "PYTHONPATH": str(SENDERS)})
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])
    assert all(announced == saved for way in steps.values() for _, announced, saved in way)
    assert {way: [step for _, step, _ in rows] for way, rows in steps.items()} == {
        "every": [4, 8, 12],
        "the last": [12],
        "the best": [4],
        "failed": [8],
        "failed and saved": [8, 9],
        "failed at once": [],
    }
    assert "last.ckpt" not in done.stdout


TORCH = """
import sys, torch_exit
torch_exit.install(run="llama")
torch_exit.saved("/runs/llama/step-6", 6)
torch_exit.saved("/runs/llama/step-7", 7)
if sys.argv[1] == "raise":
    raise RuntimeError("loss is nan")
"""


@pytest.mark.parametrize(("rank", "end", "rows"), [("0", "well", 1), ("0", "raise", 1), ("1", "well", 0)])
def test_torch_exit_hook(rank: str, end: str, rows: int, running: live.Live, env: dict[str, str]) -> None:
    env |= {"PYTHONPATH": str(SENDERS), "RANK": rank}
    done = run(sys.executable, "-c", TORCH, end, env=env)
    assert done.returncode == (1 if end == "raise" else 0), done.stderr
    assert [row[2:] for row in running.rows("source, type, uri, run, step")] == [(URI, "llama", 7)] * rows


@pytest.fixture
def epilog(running: live.Live, tmp_path: Path) -> dict[str, str]:
    """The environment in which Slurm's controller starts an epilog: no PATH."""
    running.rows.clear()
    (tmp_path / "hook.url").write_text(f"{running.url}/hooks/slurm\n")
    (tmp_path / "hook.header").write_text(f"Authorization: Bearer {webhooks.TOKEN}\n")
    return {
        "CKPTCORE_HOOK_ETC": str(tmp_path),
        "CKPTCORE_HOOK_LOG": str(tmp_path / "log"),
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_START_TIME": "1760000000",
        "SLURM_CLUSTER_NAME": "big",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_EXIT_CODE2": "0:0",
        "SLURM_JOB_COMMENT": f"ckpt={URI} run=llama step=7",
    }


def test_slurm_epilog(running: live.Live, epilog: dict[str, str]) -> None:
    for _ in range(2):  # once per node, or once more after a restart of the controller
        assert run(SENDERS / "slurm_epilog.sh", env=epilog).returncode == 0
    assert announced(running) == [("slurm", "job.completed", URI, "llama", 7)]
    assert running.rows("event_id") == [("slurm-big-4242-1760000000",)]
    retried = epilog | {"SLURM_JOB_START_TIME": "1760009999", "SLURM_JOB_COMMENT": f"ckpt={URI}"}
    assert run(SENDERS / "slurm_epilog.sh", env=retried).returncode == 0
    assert announced(running, 2)[1] == ("slurm", "job.completed", URI, "train", None)


def test_slurm_epilog_does_not_expand_the_comment(
    running: live.Live, epilog: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("step=9", "run=other"):
        (tmp_path / name).touch()
    comment = f"ckpt={URI} run=* step=0300 * s*"
    assert run(SENDERS / "slurm_epilog.sh", env=epilog | {"SLURM_JOB_COMMENT": comment}).returncode == 0
    assert announced(running) == [("slurm", "job.completed", URI, "*", 300)]


def test_slurm_epilog_retries_too(running: live.Live, epilog: dict[str, str], dying: str) -> None:
    Path(epilog["CKPTCORE_HOOK_ETC"], "hook.url").write_text(f"{dying}/hooks/slurm")
    assert run(SENDERS / "slurm_epilog.sh", env=epilog).returncode == 0
    assert announced(running) == [("slurm", "job.completed", URI, "llama", 7)]


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_JOB_EXIT_CODE2": "1:0"},
        {"SLURM_JOB_EXIT_CODE2": "0:9"},
        {"SLURM_JOB_COMMENT": ""},
        {"SLURM_JOB_COMMENT": "nothing of ours"},
        {"SLURM_JOB_COMMENT": f'ckpt={URI}","uri":"/runs/other'},
        {"SLURM_JOB_COMMENT": f"ckpt={URI} step=7x"},
        {"SLURM_JOB_COMMENT": f"ckpt={URI} step=$(exit 3)"},
        {"CKPTCORE_HOOK_ETC": "/nowhere"},
    ],
)
def test_slurm_epilog_succeeds_for_any_job_name(
    change: dict[str, str], running: live.Live, epilog: dict[str, str]
) -> None:
    assert run(SENDERS / "slurm_epilog.sh", env=epilog | change).returncode == 0
    time.sleep(0.3)
    assert running.rows() == []


def test_kubernetes_job(running: live.Live, env: dict[str, str], tmp_path: Path) -> None:
    job = yaml.safe_load((SENDERS / "kubernetes_job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["apiVersion"], job["kind"], pod["restartPolicy"]) == ("batch/v1", "Job", "Never")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    # The container's own command line, with the mounted script where it is here and no GPUs to train on.
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "torchrun").chmod(0o755)
    (line,) = container["args"]
    line = line.replace(mounts["send"], str(SENDERS))
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    secrets = {one["name"] for one in container["env"] if "valueFrom" in one}
    assert secrets == {"CKPTCORE_HOOK_URL", "CKPTCORE_HOOK_SECRET"}
    inside = env | given | {"PATH": f"{tmp_path}:{env['PATH']}", "CHECKPOINT": "/runs/llama/step-300"}
    done = run(*container["command"], line, env=inside)
    assert done.returncode == 0, done.stderr
    assert [row[2:] for row in announced(running)] == [("/runs/llama/step-300", "llama", 300)]
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexit 1\n")
    assert run(*container["command"], line, env=inside).returncode != 0
    assert len(running.rows()) == 1


def test_wandb_template(running: live.Live, env: dict[str, str]) -> None:
    # docs.wandb.ai: what the template's variables become.
    body = (SENDERS / "wandb.json").read_text()
    for name, value in {
        "event_type": "LINK_ARTIFACT",
        "artifact_collection_name": "llama",
        "artifact_metadata.uri": URI,
        "artifact_version_string": "team/project/llama:v3",
        "artifact_metadata.step": "7",
        "event_author": "ana",
        "project_name": "project",
    }.items():
        body = body.replace(f"${{{name}}}", value)
    assert "${" not in body
    headers = {"content-type": "application/json"} | webhooks.wandb(body.encode(), 0, webhooks.TEXT)
    answer = httpx.post(f"{running.url}/hooks/wandb", content=body.encode(), headers=headers)
    assert answer.status_code == 202, answer.text
    assert announced(running) == [("wandb", "LINK_ARTIFACT", URI, "llama", 7)]
