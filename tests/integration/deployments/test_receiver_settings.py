"""Parts: the examples in the receiver's modules, its tables, and what a configuration must be."""

from __future__ import annotations

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import webhooks
import yaml
from local_system import state

from ckptcore.errors import UsageError
from ckptcore.page.http_errors import REFUSALS, RequestRefused
from ckptcore.planning.request import Request
from deployments.local import system
from deployments.receiver.senders import DIALECTS
from deployments.receiver.settings import flow_run_for, load

EXAMPLE = Path(importlib.import_module("deployments.receiver").__file__ or "").with_name("example.toml")


@pytest.mark.parametrize("name", ["dispatch", "event", "settings", "verify"])
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"deployments.receiver.{name}"))
    assert tried > 0
    assert failed == 0


def test_the_statuses_of_refusals() -> None:
    assert {status for status, _ in REFUSALS.values()} == {
        400,
        401,
        403,
        404,
        408,
        409,
        413,
        415,
        422,
        431,
        503,
    }
    assert "secret" not in str(RequestRefused("unauthorized", "no secret matches").reply)
    assert "/var" not in str(RequestRefused("unavailable", "/var/lib/catalog is away").reply)


def test_the_example_is_complete_and_has_every_kind() -> None:
    named = [line.split('"')[1::2] for line in EXAMPLE.read_text().splitlines() if line.startswith("secret")]
    env = {name: webhooks.WHSEC for names in named for name in names}
    settings, senders = load(EXAMPLE, env)
    assert {source.kind for source in settings.sources.values()} == set(DIALECTS)
    assert len(senders["slurm"].secrets) == 2
    assert senders["trainer"].parameters == {"verb": "export", "dtype": "bf16"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('roots = ["runs"]', "not a plain path"),
        ('roots = ["/"]', "not a plain path"),
        ('roots = ["/runs/../etc"]', "not a plain path"),
        ("roots = []", "source slurm: there are no allowed roots"),
        ('destination = "/out/{step}/{name}"', "{name} is not one of"),
        ("colour = 3", "colour is no key of this file"),
        ('destnation = "/out"', "destnation is no key of this file (did you mean destination?)"),
        ("destination = 3", "destination: Input should be a valid string"),
        ('sources.Big = { kind = "bearer", secrets = ["TOKEN"] }', "lower-case letters"),
        ('sources.a = { kind = "smoke", secrets = ["TOKEN"] }', "(got 'smoke')"),
        ('sources.a = { kind = "bearer", secrets = [] }', "secrets"),
        ('sources.a = { kind = "bearer", secrets = ["NOWHERE"] }', "NOWHERE is not set"),
        ('sources.a = { kind = "bearer", secrets = ["SHORT"] }', "SHORT is shorter than 16"),
        ('sources.a = { kind = "standard-webhooks", secrets = ["TEXT"] }', "base64"),
        ('sources.a = { kind = "determined", secrets = ["TEXT"] }', "set `uri`"),
        ('sources.a = { kind = "eventbridge", secrets = ["TOKEN"] }', "set `uri`"),
        ('sources.a = { kind = "github", secrets = ["TEXT"], header = "x-mine" }', "header"),
        ('notify.a = { url = "ftp://x", secret = "WHSEC" }', "url"),
        ('notify.a = { url = "https://x", secret = "TEXT" }', "base64"),
        ('notify.a = { url = "https://[::1", secret = "WHSEC" }', "is not a URL"),
        ('notify.a = { url = "https:///hook", secret = "WHSEC" }', "has no host"),
        ("roots = ", "Invalid"),
    ],
)
def test_errors_are_reported_at_start(line: str, expected: str, tmp_path: Path) -> None:
    lines = [one for one in webhooks.CONFIG.splitlines() if one.split(" =")[0] != line.split(" =")[0]]
    config = tmp_path / "receiver.toml"
    config.write_text("\n".join([line, *lines]))
    with pytest.raises(UsageError) as caught:
        load(config, webhooks.SECRETS | {"SHORT": "fifteen-letters"})
    assert expected in caught.value.message
    assert "fifteen-letters" not in caught.value.message


def test_what_is_missing_is_named_without_values(tmp_path: Path) -> None:
    config = tmp_path / "receiver.toml"
    config.write_text('roots = ["/runs"]\nsources.a = { kind = "bearer", secrets = "fifteen-letters" }\n')
    with pytest.raises(UsageError) as caught:
        load(config, {})
    assert caught.value.message == (
        f"cannot use {config}: destination is missing; sources.a.secrets: Input should be a valid list"
    )


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.toml: No such file or directory$"):
        load(tmp_path / "no.toml", {})


def test_the_configuration_of_the_tests_has_every_kind() -> None:
    kinds = {source["kind"] for source in tomllib.loads(webhooks.CONFIG)["sources"].values()}
    assert kinds == set(DIALECTS)


def shipped(tmp_path: Path) -> dict[str, str]:
    """name -> each configuration that the repository ships or writes."""
    folder = EXAMPLE.parent.parent
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    return {
        "example": EXAMPLE.read_text(),
        "kubernetes": (folder / "kubernetes" / "receiver.toml").read_text(),
        "compose": compose["configs"]["receiver"]["content"],
        "local": system.filled("receiver.toml", state(root="/checkpoints", exports="/exports")),
    }


@pytest.mark.parametrize("name", ["example", "kubernetes", "compose", "local"])
@pytest.mark.parametrize("run", ["", "llama"])
def test_a_checkpoint_of_lightning_becomes_a_folder_at_every_shipped_receiver(
    name: str, run: str, tmp_path: Path
) -> None:
    """Its `.ckpt`, a file or a folder, must not name the output: that would be one file of `torch.save`."""
    config = tmp_path / "receiver.toml"
    config.write_text(shipped(tmp_path)[name])
    names = re.findall(r'"([A-Z_]{6,})"', config.read_text())
    _, senders = load(config, dict.fromkeys(names, webhooks.WHSEC))
    uri = "/checkpoints/lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt"
    found = flow_run_for(senders["trainer"], uri, run, 2).parameters
    assert found["destination"] == "/exports/lightning_logs/version_0/checkpoints/epoch=0-step=2"
    request = Request(found["source"], found["destination"], found.get("verb", "export"))
    assert request.single is None
