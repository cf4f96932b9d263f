"""One source in several folders, as nodes with local disks leave it: right or refused, never a part."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fault_s3 import FaultyS3, Stored, serving
from paths import FIXTURES
from retiring import delete_now

import ckptcore
from ckptcore.catalog import maintenance, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert
from ckptcore.errors import DamagedCheckpoint, NotComplete, SourceChanged, UsageError
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.setting_aside import root_above
from ckptcore.planning.request import Request, Settings
from ckptcore.store import open_source_store
from ckptcore.utils.merged_url import merged_url

DCP = FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt"
SAMPLES = {
    "dcp": DCP,
    "safetensors": FIXTURES / "torch" / "hf_sharded_4r" / "ckpt",
    "ranks": FIXTURES / "torch" / "verl_fsdp2_4r" / "ckpt" / "global_step_10" / "actor",
    "megatron": FIXTURES / "megatron" / "legacy_llama_tp2pp2_0.15.3" / "ckpt",
}
SHARED = {".metadata", "metadata.json", "common.pt", "config.json"}  # what every node has


def split(source: Path, under: Path, nodes: int = 2) -> list[str]:
    """Copy a checkpoint to folders, each with every ``nodes``-th of its files, and return them."""
    files = sorted(f for f in source.rglob("*") if f.is_file())
    for number, file in enumerate(files):
        for node in range(nodes) if file.name in SHARED else (number % nodes,):
            target = under / f"node{node}" / "step-3" / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return [str(under / f"node{node}" / "step-3") for node in range(nodes)]


def converted(source: str | Sequence[str], target: Path, **options: object) -> tuple[ckptcore.Result, bytes]:
    result = ckptcore.convert(source, str(target), catalog=False, **options)
    return result, target.read_bytes()


def put(server: FaultyS3, key: str, data: bytes) -> None:
    crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    server.objects[key] = Stored(data, hashlib.md5(data).hexdigest(), crc32=crc)


def upload(server: FaultyS3, folder: str, name: str) -> str:
    for file in Path(folder).rglob("*"):
        if file.is_file():
            put(server, f"b/{name}/{file.relative_to(folder)}", file.read_bytes())
    return f"s3://b/{name}"


@pytest.mark.alike(2)
@pytest.mark.parametrize("kind", SAMPLES)
def test_equals_one_folder(kind: str, tmp_path: Path):
    source = SAMPLES[kind]
    nodes = split(source, tmp_path, 3)
    report = ckptcore.check(ckptcore.open(nodes), "bytes")
    alone = ckptcore.check(ckptcore.open(str(source)), "bytes")
    assert [(f.code, f.file) for f in report.findings] == [(f.code, f.file) for f in alone.findings]
    assert report.ok
    _, right = converted(str(source), tmp_path / "one.safetensors")
    _, found = converted(nodes, tmp_path / "merged.safetensors")
    assert found == right
    assert ckptcore.diff(nodes, str(source)).equal
    assert ckptcore.fingerprint(nodes).fingerprint == ckptcore.fingerprint(str(source)).fingerprint


def test_mixed_with_s3(tmp_path: Path):
    nodes = split(DCP, tmp_path, 3)
    _, right = converted(str(DCP), tmp_path / "one.safetensors")
    with serving() as server:
        mixed = [nodes[0], *(upload(server, node, f"node{n}") for n, node in enumerate(nodes[1:], 1))]
        for node in nodes[1:]:
            shutil.rmtree(node)
        result, found = converted(mixed, tmp_path / "mixed.safetensors")
        assert found == right
        assert (
            server.count("GET", "^$") <= 12
        )  # ranges of two folders, their metadata once, and the comparison
        assert ckptcore.check(ckptcore.open(mixed), "bytes").ok
        assert not [w for w in result.warnings if w.code == "unproven"]
        ckptcore.convert(mixed, "s3://b/out/model", to="dcp", catalog=False)
        assert ckptcore.diff("s3://b/out/model", str(DCP)).equal


def test_a_change_in_any_folder_is_seen(tmp_path: Path):
    nodes = split(DCP, tmp_path)
    with serving() as server:
        mixed = [nodes[0], upload(server, nodes[1], "node1")]
        for number in (0, 1):
            plan = ckptcore.prepare(mixed, str(tmp_path / f"out{number}.safetensors"))
            if number:
                name = next(k for k in server.objects if k.endswith(".distcp"))
                put(server, name, bytes(len(server.objects[name].data)))
            else:
                file = next(Path(nodes[0]).glob("*.distcp"))
                data = file.read_bytes()
                file.write_bytes(bytes(len(data)))
            with pytest.raises(SourceChanged):
                ckptcore.execute(plan)
            if not number:
                file.write_bytes(data)


def test_a_file_of_a_name_in_two_folders(tmp_path: Path):
    nodes = split(DCP, tmp_path)
    file = next(Path(nodes[0]).glob("*.distcp"))
    shutil.copy(file, nodes[1])  # equal: it is one file
    assert ckptcore.check(ckptcore.open(nodes), "bytes").ok
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    other = Path(nodes[1]) / file.name
    other.write_bytes(changed)
    with pytest.raises(DamagedCheckpoint, match="different bytes") as error:
        ckptcore.open(nodes)
    assert str(file) in error.value.message
    assert str(other) in error.value.message
    assert [f.code for f in error.value.findings] == ["files-differ"]
    other.write_bytes(changed + b"x")  # of another size
    with pytest.raises(DamagedCheckpoint, match="different bytes"):
        ckptcore.open(nodes)


def test_a_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    nodes = [*split(DCP, tmp_path), str(tmp_path / "node2" / "step-3")]
    found = ckptcore.check(ckptcore.open(nodes)).findings
    assert [(f.code, f.severity) for f in found] == [("not-complete", "error")]
    assert nodes[2] in found[0].message
    with pytest.raises(NotComplete):
        converted(nodes, tmp_path / "a.safetensors")
    _, right = converted(str(DCP), tmp_path / "one.safetensors")
    assert converted(nodes, tmp_path / "a.safetensors", allow_incomplete=True)[1] == right
    catalog = str(tmp_path / "catalog.sqlite")
    assert run(["validate", *nodes, "--catalog", catalog, "--output", "json"]) == 1
    assert "not-complete" in capsys.readouterr().out
    os.rename(nodes[0], f"{nodes[0]}.away")  # its files are missing then
    codes = {f.code for f in ckptcore.check(ckptcore.open(nodes)).findings}
    assert {"not-complete", "missing-file"} <= codes


def test_folders_that_overlap(tmp_path: Path):
    nodes = split(DCP, tmp_path)
    for other in (f"{nodes[0]}/../step-3", str(tmp_path)):
        with pytest.raises(UsageError, match="overlap"):
            ckptcore.open([nodes[0], other])
    with pytest.raises(UsageError, match="cannot write"):
        open_source_store(merged_url(nodes)).put("a", b"")


def test_destinations_at_a_folder_of_the_source(tmp_path: Path):
    nodes = split(DCP, tmp_path)
    for where in (nodes[1], f"{nodes[0]}/out", str(tmp_path / "node1"), merged_url(nodes)):
        with pytest.raises(UsageError):
            ckptcore.convert(nodes, where, to="dcp", overwrite=True, overwrite_foreign=True, catalog=False)
    assert ckptcore.check(ckptcore.open(nodes), "bytes").ok


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    nodes = split(DCP, tmp_path)
    catalog = ["--catalog", str(tmp_path / "catalog.sqlite")]
    out = str(tmp_path / "out.safetensors")

    def answer(*argv: str) -> dict:
        assert run([*argv, "--output", "json"]) == 0, capsys.readouterr().out
        return json.loads(capsys.readouterr().out)

    assert answer("inspect", *nodes)["root"] == merged_url(nodes)
    assert answer("validate", *nodes, *catalog)["ok"]
    assert answer("plan", *nodes, out)["files"]
    print_of_nodes = answer("fingerprint", *nodes, *catalog)["fingerprint"]
    assert print_of_nodes == answer("fingerprint", str(DCP), "--no-catalog")["fingerprint"]
    answer("consolidate", *nodes, out, *catalog)
    answer("reshard", *nodes, str(tmp_path / "mesh"), "--mesh", "fsdp=2", *catalog)
    answer("export", *nodes, str(tmp_path / "hf"), "--names", "stored", *catalog)
    assert answer("diff", merged_url(nodes), out)["equal"]
    assert run(["consolidate", merged_url(nodes), *catalog]) == 2  # no name to derive a destination from
    # Forgetting DST makes the last folder DST, which is never replaced.
    for more in ((), ("--overwrite",), ("--overwrite", "--to", "dcp")):
        assert run(["consolidate", *nodes, *more, *catalog]) != 0
    assert ckptcore.check(ckptcore.open(nodes), "bytes").ok
    with open_catalog(catalog[1]) as known:
        found = known.at(merged_url(nodes))
        assert found is not None
        assert (found[0].uri, found[0].step) == (merged_url(nodes), 3)
        assert [f.path for f in found[1]] == [".metadata", *(f"__{n}_0.distcp" for n in range(4))]


def test_retire_deletes_no_folder_of_a_merged_source(tmp_path: Path):
    nodes = split(DCP, tmp_path / "runs")
    catalog = str(tmp_path / "catalog.sqlite")
    request = Request(merged_url(nodes), str(tmp_path / "out.safetensors"))
    convert(request, Settings(fingerprint=True), None, catalog)
    with open_catalog(catalog) as known:
        row = known.at(request.source)
        assert row is not None
        with known.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", str(tmp_path / "runs"))
            # Below a root, as nothing registers it: the deletion itself has to refuse.
            above = (replace(roots.every(conn)[0], uri="merged:"),)
        with pytest.raises(UsageError, match="several folders"):
            root_above(above, row[0].uri)
        done = delete_now(known, Policy(1), yes=True)
        assert not [item for item in done.items if item.fate.value == "deleted"]
        with known.reading() as conn:  # its nodes alone, or folders above, are not free to be deleted
            assert maintenance.inside(conn, nodes[0]) == (request.source,)
            assert maintenance.inside(conn, str(tmp_path / "runs")) == (request.source,)
            assert maintenance.inside(conn, f"{nodes[0]}0") == ()
    assert ckptcore.check(ckptcore.open(nodes), "bytes").ok
