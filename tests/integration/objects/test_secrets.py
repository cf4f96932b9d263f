"""Secrets in every place where one can be: none is in anything that a run leaves."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from fault_s3 import FaultyS3, Stored
from paths import FIXTURES, ROOT

from ckptcore.cli.main import run

DCP = FIXTURES / "torch" / "dcp_dims_4r" / "ckpt"
SECRETS = {
    "key": "AKIAZZTOPENVIRONMENT",
    "secret": "zq1environmentsecretzq",
    "token": "zq2sessiontokenzq",
    "profile": "zq3profilesecretzq",
    "option": "zq4storageoptionzq",
    "userinfo": "zq5userinfozq",
    "signature": "zq6signaturezq",
    "fsspec": "zq7fsspecvariablezq",
    "meta": "zq8metazq",
}


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with FaultyS3() as made:
        for file in DCP.iterdir():
            made.objects[f"b/run/step-3/{file.name}"] = Stored(file.read_bytes(), "e" + file.name.strip("."))
        yield made


@pytest.fixture
def environment(server: FaultyS3, tmp_path: Path) -> dict[str, str]:
    profiles = tmp_path / "secret" / "credentials"
    profiles.parent.mkdir()
    profiles.write_text(
        f"[team]\naws_access_key_id = {SECRETS['key']}\naws_secret_access_key = {SECRETS['profile']}\n"
    )
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "FSSPEC_", "PREFECT_"))},
        "AWS_ACCESS_KEY_ID": SECRETS["key"],
        "AWS_SECRET_ACCESS_KEY": SECRETS["secret"],
        "AWS_SESSION_TOKEN": SECRETS["token"],
        "AWS_SHARED_CREDENTIALS_FILE": str(profiles),
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.url,
        "FSSPEC_S3_TOKEN": SECRETS["fsspec"],
        "CKPTCORE_CATALOG": f"sqlite:///{tmp_path}/left/catalog.sqlite",
        "PREFECT_HOME": str(tmp_path / "left" / "prefect"),
        "CKPTCORE_REQUEST_DEADLINE": "2",
    }


class Left:
    """All that runs leave: what they print, files, objects, and the rows of databases."""

    def __init__(self, server: FaultyS3, folder: Path, environment: dict[str, str]) -> None:
        self.server, self.folder, self.environment = server, folder, environment
        self.texts: dict[str, bytes] = {}
        folder.mkdir(exist_ok=True)

    def run(self, *argv: str, code: int | None = 0, module: str = "ckptcore") -> str:
        done = subprocess.run(
            [*(warm.command() if module == "ckptcore" else [sys.executable, "-m", module]), *argv],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            timeout=240,
            check=False,
        )
        assert code is None or done.returncode == code, done.stderr.decode()
        assert code is not None or done.returncode > 0
        self.texts[f"run {len(self.texts)}: {argv[0]}"] = done.stdout + done.stderr
        return done.stdout.decode()

    def search(self) -> list[str]:
        """Return where a secret is."""
        texts = dict(self.texts)
        for file in self.folder.rglob("*"):
            if file.is_file():
                texts[str(file)] = file.read_bytes()
            if file.suffix in (".sqlite", ".db"):
                with sqlite3.connect(file) as database:
                    texts[f"{file} dumped"] = "\n".join(database.iterdump()).encode()
        texts |= {f"object {key}": key.encode() + each.data for key, each in self.server.objects.items()}
        texts |= {
            f"upload {name}": json.dumps([u.key, u.meta]).encode() for name, u in self.server.uploads.items()
        }
        return [
            f"{s} in {where}" for where, t in texts.items() for s, v in SECRETS.items() if v.encode() in t
        ]


def test_no_run_leaves_a_secret(
    server: FaultyS3,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    left = Left(server, tmp_path / "left", environment)
    options = ("--storage-option", f"secret={SECRETS['option']}", "--storage-option", f"key={SECRETS['key']}")
    source = "s3://b/run/step-3"
    left.run(*options, "consolidate", source, "s3://b/out/model.safetensors", "--output", "json")
    left.run(
        "--storage-option",
        "profile=team",
        "plan",
        source,
        "s3://b/out/other",
        "--to",
        "dcp",
        "--save",
        str(left.folder / "plan"),
    )
    # A run that ends with its staging prefix left, and journals in it.
    server.fault("POST", query="uploadId", times=99, action="status", status=403, code="AccessDenied")
    left.run(*options, "consolidate", source, "s3://b/out/denied.safetensors", code=None)
    assert [key for key in server.objects if ".ckptcore/" in key]
    server.calm()
    monkeypatch.setattr(os, "environ", environment | {"CKPTCORE_REQUEST_DEADLINE": "0.2"})
    signed = f"{server.url}/b/none?X-Amz-Signature={SECRETS['signature']}"
    userinfo = f"s3://me:{SECRETS['userinfo']}@b/run/step-3"
    for url in (signed, userinfo, f"merged://[{source},{userinfo}]", f"http://{SECRETS['userinfo']}@h/a.pt"):
        for argv in (["consolidate", url, "never"], ["plan", url, "never"], ["export", source, url]):
            assert run(argv) == 2
    assert run(["inspect", userinfo]) > 2
    left.texts["in this process"] = "".join(capfd.readouterr()).encode()
    assert left.search() == []
    left.texts["proof that the search finds one"] = SECRETS["token"].encode()
    assert len(left.search()) == 1


TEXTS = (
    "--token {s}",
    "ran train.py --hf-token={s} --lr 1e-4",
    "WANDB_API_KEY={s} python train.py",
    "curl -H 'X-Api-Key: {s}' https://host/a",
    "see https://me:{s}@host/a?sig={s}",
    '["train.py", "--password", "{s}"]',
)


def test_no_text_of_a_user_leaves_a_secret(
    server: FaultyS3, environment: dict[str, str], tmp_path: Path
) -> None:
    """Facts, tags, reasons: in the catalog, in what is printed, and in logs."""
    left = Left(server, tmp_path / "left", environment)
    left.environment |= {
        "CKPTCORE_CATALOG_URL": f"sqlite:///{left.folder}/catalog.sqlite",
        "CKPTCORE_LOG_FORMAT": "json",
    }
    texts = [text.format(s=SECRETS["meta"]) for text in TEXTS]
    out = str(left.folder / "model.safetensors")
    options = [part for n, text in enumerate(texts) for part in ("--meta", f"note{n}={text}")]
    left.run("consolidate", str(DCP), out, *options, "--meta", f"config.argv={texts[-1]}")
    left.run("catalog", "meta", out, f"other={texts[0]}", f"config.command={texts[1]}")
    left.run("catalog", "tag", out, *(f"tag{n}={text}" for n, text in enumerate(texts)))
    left.run("catalog", "hold", "place", out, "--reason", texts[0])
    for argv in (["show", out], ["show", out, "--output", "json"], ["hold", "list"], ["list"]):
        left.run("catalog", *argv)
    left.run("consolidate", str(DCP), f"{out}.2", "--meta", texts[0], code=2)  # no KEY=VALUE: it is quoted
    assert left.search() == []
    detail = json.loads(left.run("catalog", "show", out, "--output", "json"))
    assert "--lr 1e-4" in json.dumps(detail)


@pytest.mark.soak
def test_no_flow_leaves_a_secret(server: FaultyS3, environment: dict[str, str], tmp_path: Path):
    left = Left(server, tmp_path / "left", environment)
    left.run("s3://b/run/step-3", "s3://b/flow/model.safetensors", module="flows.consolidate")
    url = f"s3://me:{SECRETS['userinfo']}@b/run/step-3"
    left.run(url, "s3://b/flow/never", module="flows.consolidate", code=2)
    assert list(left.folder.rglob("prefect.db"))
    assert left.search() == []
