"""The files for containers, clusters and systemd fit their schemas and the programs that they start.

Docker and Kubernetes themselves do not run here.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from local_system import environment, state
from paths import ROOT

from deployments.receiver.settings import load
from deployments.worker import PATIENCE, SERVER_SECONDS

FOLDER = ROOT / "deployments"
ROOT = FOLDER.parent
SECRETS = {"CKPTCORE_HOOK_TOKEN": "t" * 24, "CKPTCORE_HOOK_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
COMPOSE_SCHEMA = ROOT / "tests" / "fixtures" / "compose" / "compose-spec.json"
KUBERNETES = "1.32"
PROGRAMS = {"ckptcore", "prefect", "python"}  # what the image has on its PATH


def memory_of_worker(limit: int, memory: int = 1024) -> int:
    """The memory of a worker in MiB; deployments/README.md has the formula."""
    return 192 + limit * (512 + memory)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return found


def kubernetes() -> Iterator[dict[str, Any]]:
    for path in sorted((FOLDER / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def containers() -> Iterator[dict[str, Any]]:
    for one in kubernetes():
        pod = one.get("spec", {}).get("template", {}).get("spec", {})
        yield from pod.get("initContainers", [])
        yield from pod.get("containers", [])


def starts(command: list[str]) -> None:
    """Fail unless the image can start it."""
    assert command[0] in PROGRAMS, command
    if command[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(command[2]) is not None, command


def limit_of(command: list[str]) -> int:
    return int(command[command.index("--limit") + 1])


def test_compose_starts_existing_programs() -> None:
    services = compose()["services"]
    assert {"postgres", "migrate", "deploy", "prefect", "worker", "receiver", "s3"} == services.keys()
    for name, service in services.items():
        if name not in ("postgres", "s3"):
            starts(service["command"])
        for other in service.get("depends_on", {}):
            assert other in services
    assert services["s3"]["profiles"] == ["s3"]
    worker = services["worker"]
    assert worker["mem_limit"] == f"{memory_of_worker(limit_of(worker['command']))}m"


def problems_of(found: dict[str, Any]) -> list[str]:
    """Return the violations of the Compose Specification's JSON schema, with their paths."""
    schema = json.loads(COMPOSE_SCHEMA.read_text())
    errors = jsonschema.Draft7Validator(schema).iter_errors(found)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]


def test_compose_fits_its_schema() -> None:
    assert problems_of(compose()) == []


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        (("services", "worker"), {"mem_limt": "1g"}),
        (("services", "worker"), {"stop_grace_period": 60}),
        (("services", "postgres", "healthcheck"), {"intervall": "2s"}),
        (("services", "migrate", "depends_on"), {"postgres": {"condition": "service_well"}}),
        (("configs", "receiver"), {"contents": "roots = []"}),
    ],
)
def test_the_schema_of_compose_finds_mistakes(where: tuple[str, ...], wrong: dict[str, Any]) -> None:
    found = compose()
    place = found
    for name in where:
        place = place[name]
    place.update(wrong)
    (problem,) = problems_of(found)
    assert problem.startswith(".".join(where))


def test_compose_comes_up_from_nothing() -> None:
    services, image = compose()["services"], (FOLDER / "Dockerfile").read_text()
    made = re.search(r"^RUN useradd --uid (\d+) --create-home ckptcore && (.*)$", image, re.MULTILINE)
    assert made is not None
    user, folders = made.groups()
    # A new volume takes the owner of the image's folder, which must be there.
    assert services["prefect"]["volumes"] == ["prefect:/home/ckptcore/.prefect"]
    assert folders == "install -d -o ckptcore -g ckptcore -m 700 /home/ckptcore/.prefect"
    # While the databases are created, the server listens on its socket only.
    probe = services["postgres"]["healthcheck"]["test"]
    assert probe[probe.index("-h") + 1] == "127.0.0.1"
    assert services["migrate"]["restart"] == services["deploy"]["restart"] == "on-failure"
    # Folders of the host keep their owner, so the file must name the owner that they need.
    for path in ("compose.yaml", "compose.env.example", "README.md"):
        assert f"install -d -o {user} -g {user} /srv/exports" in (FOLDER / path).read_text(), path


def test_the_image_has_project_code_in_its_path_and_nothing_of_it_installed() -> None:
    image = (FOLDER / "Dockerfile").read_text()
    build, _, final = image.partition("\nFROM ")[2].partition("\nFROM ")
    (root,) = re.findall(r"PYTHONPATH=(\S+)", final)
    assert f"\nWORKDIR {root}\n" in final
    code = ("deployments", "flows", "tasks")
    assert re.findall(r"^COPY (\w+) (\S+)$", final, re.MULTILINE) == [(n, f"{root}/{n}") for n in code]
    # The library is built where none of them is.
    assert re.findall(r"^COPY (\w+) (\w+)$", build, re.MULTILINE) == [("alembic",) * 2, ("ckptcore",) * 2]
    (extras,) = re.findall(r"'\.\[(.*)\]'", build)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"flows", "postgres"} <= set(extras.split(",")) <= set(project["optional-dependencies"])
    named = re.search(r"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_(\w+)=", build)
    assert named is not None
    assert named[1] == project["name"].upper()
    assert "VERSION" in compose()["services"]["worker"]["build"]["args"]


def test_every_variable_of_compose_is_documented() -> None:
    used = set(re.findall(r"\$\{(\w+)", (FOLDER / "compose.yaml").read_text()))
    documented = set(
        re.findall(r"^(?:# )?([A-Z_0-9]+)=", (FOLDER / "compose.env.example").read_text(), re.MULTILINE)
    )
    assert used - documented == {"CKPTCORE_VERSION"}
    assert documented <= used


def test_every_server_has_the_settings_of_make_up(monkeypatch: pytest.MonkeyPatch) -> None:
    env = environment(state(), "prefect", monkeypatch)
    wanted = {name: value for name, value in env.items() if name.startswith("PREFECT_SERVER_")}
    # What differs from place to place, and a setting of clients.
    for name in ("DATABASE_CONNECTION_URL", "API_AUTH_STRING", "UI_API_URL", "EPHEMERAL_ENABLED"):
        wanted.pop(f"PREFECT_SERVER_{name}")
    # Without these two, `prefect deployment run --watch` shows no log, and so no reason of a failure.
    assert wanted["PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED"] == "true"
    assert wanted["PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED"] == "true"
    unit = (FOLDER / "systemd/ckptcore-prefect.service").read_text()
    (pod,) = [each for each in containers() if each["name"] == "prefect"]
    found = {
        "compose": compose()["services"]["prefect"]["environment"],
        "kubernetes": {each["name"]: each["value"] for each in pod["env"]},
        "systemd": dict(
            word.split("=")
            for line in re.findall("^Environment=(.*)", unit, re.MULTILINE)
            for word in line.split()
        ),
    }
    for place, env in found.items():
        assert not wanted.items() - env.items(), place


def test_their_receivers_have_valid_settings(tmp_path: Path) -> None:
    texts = [
        compose()["configs"]["receiver"]["content"],
        (FOLDER / "kubernetes" / "receiver.toml").read_text(),
    ]
    for text in texts:
        (tmp_path / "receiver.toml").write_text(text)
        settings, senders = load(tmp_path / "receiver.toml", SECRETS)
        assert settings.deployment == "arrived/arrived"
        assert senders.keys() == {"trainer", "curl"}


def test_kubernetes_starts_existing_programs() -> None:
    kinds = [one["kind"] for one in kubernetes()]
    assert kinds.count("Deployment") == 3
    assert kinds.count("Job") == 1
    for container in containers():
        starts(container["command"])
        assert container["resources"]["requests"]["memory"]
        if "deployments.worker" in container["command"]:
            asked = f"{memory_of_worker(limit_of(container['command']))}Mi"
            assert container["resources"]["requests"]["memory"] == asked
            assert container["resources"]["limits"]["memory"] == asked
        if container["name"] in ("prefect", "receiver"):
            assert container["livenessProbe"]
            assert container["readinessProbe"]


def test_kubernetes_fits_its_schemas() -> None:
    kube = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    job = yaml.safe_load((FOLDER / "senders" / "kubernetes_job.yaml").read_text())
    for one in (*kubernetes(), job):
        if one["kind"] != "Kustomization":
            kube.validate(one, KUBERNETES, strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limit": {"nvidia.com/gpu": 8}}
    with pytest.raises(kube.ValidationError):
        kube.validate(job, KUBERNETES, strict=True)


def test_kustomize_builds_it(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on this machine")
    shutil.copytree(FOLDER / "kubernetes", tmp_path / "k")
    for example in (tmp_path / "k").glob("*.env.example"):
        example.rename(example.with_suffix(""))
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "k"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    names = {(one["kind"], one["metadata"]["name"]) for one in made}
    for one in made:
        pod = one.get("spec", {}).get("template", {}).get("spec")
        for container in (pod or {}).get("containers", []):
            assert container["image"] == "registry.example/ckptcore:latest"
            for source in container.get("envFrom", []):
                kind, ref = next(iter(source.items()))
                assert ({"secretRef": "Secret", "configMapRef": "ConfigMap"}[kind], ref["name"]) in names


def test_a_pod_gets_the_secrets_that_it_needs() -> None:
    given = {
        container["name"]: {one["secretRef"]["name"] for one in container["envFrom"] if "secretRef" in one}
        for container in containers()
    }
    assert given == {
        "prefect": {"server"},
        "catalog": {"client"},
        "deploy": {"client"},
        "worker": {"client", "storage"},
        "receiver": {"client", "hooks"},
    }
    folder = FOLDER / "kubernetes"
    (made,) = [one for one in kubernetes() if one["kind"] == "Kustomization"]
    for secret in made["secretGenerator"]:
        assert (folder / f"{secret['envs'][0]}.example").exists()
    known = {
        secret["name"]: re.findall(
            r"^(\w+)=", (folder / f"{secret['envs'][0]}.example").read_text(), re.MULTILINE
        )
        for secret in made["secretGenerator"]
    }
    # The names that the receiver's settings and the processes read, none of them twice.
    assert sorted(name for names in known.values() for name in names) == sorted(
        {
            "PREFECT_SERVER_DATABASE_CONNECTION_URL",
            "PREFECT_SERVER_API_AUTH_STRING",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "PREFECT_API_AUTH_STRING",
            "CKPTCORE_CATALOG_URL",
            *SECRETS,
        }
    )
    assert set(known["hooks"]) == SECRETS.keys()


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    units = sorted((FOLDER / "systemd").glob("*.service"))
    assert [unit.stem for unit in units] == [
        f"ckptcore-{n}" for n in ("deploy", "prefect", "receiver", "worker")
    ]
    for unit in units:
        text = unit.read_text()
        if " -m deployments." in text:
            (place,) = re.findall(r"^WorkingDirectory=(\S+)$", text, re.MULTILINE)
            assert f"\nEnvironment=PYTHONPATH={place}\n" in text
            assert f" {place} " in (FOLDER / "README.md").read_text()
        for line in re.findall(r"^ExecStart(?:Pre)?=/opt/ckptcore/bin/(.*)$", text, re.MULTILINE):
            starts(line.split())
        # The programs are not where they would be installed.
        (tmp_path / unit.name).write_text(re.sub(r"/opt/ckptcore/bin/\w+", "/bin/true", text))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(tmp_path / unit.name for unit in units)],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stderr, done.stderr
    worker = (FOLDER / "systemd" / "ckptcore-worker.service").read_text()
    limit = int(re.findall(r"--limit (\d+)", worker)[0])
    assert f"MemoryMax={memory_of_worker(limit)}M" in worker


def test_a_stopped_worker_has_time_to_release_its_runs() -> None:
    """The longest case: the worker and its runs are killed, and the server is slow."""
    longest = 3 * PATIENCE + SERVER_SECONDS + 10
    (pod,) = [
        one["spec"]["template"]["spec"]
        for one in kubernetes()
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "worker"
    ]
    assert pod["terminationGracePeriodSeconds"] >= longest
    assert "deployments.worker" in pod["containers"][0]["command"]
    service = compose()["services"]["worker"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= longest
    assert "deployments.worker" in service["command"]
    unit = (FOLDER / "systemd" / "ckptcore-worker.service").read_text()
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) >= longest
    assert "\nKillMode=mixed\n" in unit  # if all got the signal, runs would end without a report
    assert " -m deployments.worker " in unit


def test_the_image_is_built_from_existing_files() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()
    ]
    assert {"alembic", "ckptcore", "deployments", "flows", "tasks"} < set(copied)
    assert all((ROOT / name).exists() for name in copied)
    extras = re.findall(r"'\.\[(.*)\]'", text)[0].split(",")
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
    assert "\nUSER ckptcore\n" in text
