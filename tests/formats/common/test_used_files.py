"""Track used files: only files that the reader of the chosen format used count, each in its role."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptcore
from ckptcore.conversion.foreign_files import require_accounted
from ckptcore.conversion.pipeline import validate
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import Used, placed, used
from ckptcore.custody.holdings import rest_of
from ckptcore.errors import DestinationExists
from ckptcore.formats import open_source, read_manifest
from ckptcore.planning.request import Request
from ckptcore.store.listing import contents

pytestmark = pytest.mark.filterwarnings("ignore")


def safetensors_folder(folder: Path) -> Path:
    """Detection looks into metadata.json, which another format could have written."""
    folder.mkdir()
    save_file({"w": torch.arange(6.0)}, folder / "model.safetensors")
    (folder / "metadata.json").write_text('{"run": "of another user"}')
    return folder


def dcp_folder(folder: Path) -> Path:
    dcp.save({"w": torch.arange(6.0), "note": "of a run"}, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text("{}")
    return folder


SHARDS = ("shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors")


def hf_shards_folder(folder: Path) -> Path:
    """Shards, their consolidated file, files that prove the tensors' sizes, and files of others."""
    (folder / "sharded").mkdir(parents=True)
    for rank, name in enumerate(SHARDS):
        info = {"model.embed_tokens.weight": {"saved_offsets": [rank * 2, 0]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(
            {"model.embed_tokens.weight": torch.full((2, 3), rank)}, folder / "sharded" / name, metadata
        )
    full = torch.tensor([0, 0, 1, 1]).repeat_interleave(3).reshape(4, 3)
    save_file({"model.embed_tokens.weight": full}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"vocab_size": 4, "hidden_size": 3}')
    (folder / "README.md").write_text("of another user")
    return folder


def shards_alone_folder(folder: Path) -> Path:
    """Without the consolidated file, the configuration proves that no shard is missing."""
    (hf_shards_folder(folder) / "model.safetensors").unlink()
    return folder


def read(folder: Path) -> Manifest:
    with closing((source := open_source(str(folder))).store):
        return read_manifest(source)


# folder -> (data, compared, described, beside)
SAMPLES: dict[Callable[[Path], Path], tuple[set[str], set[str], set[str], set[str]]] = {
    safetensors_folder: ({"model.safetensors"}, set(), set(), {"metadata.json"}),
    dcp_folder: ({"__0_0.distcp"}, set(), {".metadata"}, {"config.json"}),
    hf_shards_folder: (
        {f"sharded/{name}" for name in SHARDS},
        {"model.safetensors"},
        set(),
        {"config.json", "README.md"},
    ),
    shards_alone_folder: ({f"sharded/{name}" for name in SHARDS}, set(), {"config.json"}, {"README.md"}),
}


@pytest.mark.parametrize("make", SAMPLES, ids=lambda m: m.__name__)
def test_the_role_of_each_file(make: Callable[[Path], Path], tmp_path: Path) -> None:
    manifest = read(make(tmp_path / "ckpt"))
    data, compared, described, beside = SAMPLES[make]
    assert used(manifest) == Used(frozenset(data), frozenset(compared), frozenset(described))
    assert {f.path for f in manifest.beside} == beside
    assert set(placed(manifest)) == data | compared
    assert used(Manifest.load(manifest.dump())).data == data


@pytest.mark.parametrize("make", SAMPLES, ids=lambda m: m.__name__)
def test_files_opened_for_detection_are_unproven(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """No format, store or catalog proves their bytes: validate must name them."""
    folder = make(tmp_path / "ckpt")
    report = validate(ckptcore.open(str(folder)), "bytes")
    assert SAMPLES[make][3] <= set(report.unproven)


@pytest.mark.parametrize("make", SAMPLES, ids=lambda m: m.__name__)
def test_files_retired_with_a_source(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Only files of the checkpoint itself, or of its location, count as part of a child."""
    folder = make(tmp_path / "ckpt")
    manifest = read(folder)
    lost = {
        each.name for each in rest_of(manifest, str(folder), contents(str(folder))) if each.kind == "file"
    }
    _, compared, described, beside = SAMPLES[make]
    assert lost == beside | compared | (described - {".metadata"})


@pytest.mark.parametrize("make", SAMPLES, ids=lambda m: m.__name__)
def test_files_replaced_with_an_output(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Everything that the reader used belongs to the folder, and other files are strangers."""
    folder = make(tmp_path / "ckpt")
    request = Request(str(tmp_path / "other"), str(folder), overwrite=True)
    with pytest.raises(DestinationExists) as caught:
        require_accounted(request, {})
    assert set(caught.value.values["strangers"]) == SAMPLES[make][3]


def test_below_a_root_of_steps(tmp_path: Path) -> None:
    """Paths are relative to the manifest's root, wherever the source was opened."""
    folder = tmp_path / "run" / "iter_0000003"
    folder.parent.mkdir()
    dcp_folder(folder)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("3")
    for opened in (folder, folder.parent):
        manifest = read(opened)
        assert used(manifest) == Used(frozenset({"__0_0.distcp"}), frozenset(), frozenset({".metadata"}))
        assert {f.path for f in manifest.beside} == {"config.json"}
        assert set(manifest.stamps) == {"__0_0.distcp", ".metadata"}
    assert require_strangers(folder.parent) == {
        "latest_checkpointed_iteration.txt",
        "iter_0000003/config.json",
    }


def require_strangers(folder: Path) -> set[str]:
    request = Request(str(folder.parent / "other"), str(folder), overwrite=True)
    with pytest.raises(DestinationExists) as caught:
        require_accounted(request, {})
    return set(caught.value.values["strangers"])


def test_on_an_object_store() -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    name = "memory://used/ckpt"
    header = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    files.pipe(f"{name}/model.safetensors", len(header).to_bytes(8, "little") + header + b"ab")
    files.pipe(f"{name}/metadata.json", b"{}")
    try:
        with closing((source := open_source(name)).store):
            manifest = read_manifest(source)
        assert used(manifest) == Used(frozenset({"model.safetensors"}), frozenset(), frozenset())
        assert [f.path for f in manifest.beside] == ["metadata.json"]
    finally:
        files.rm("memory://used", recursive=True)
